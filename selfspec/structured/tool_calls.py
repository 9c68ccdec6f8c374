"""Tools: what a model may call, the formats in which models write calls, and the grammar that holds them to these.

An output is free text up to a call's mark; from there on, the grammar leaves nothing but calls of the tools. Where a
call is required, it begins with the mark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from uuid import uuid4

from selfspec.decoding.outputs import CompletionOutput, RequestOutput
from selfspec.errors import flag, got
from selfspec.params import SamplingParams
from selfspec.structured.formats import FORMATS, NAME, CallFormat, CallPiece, CallReader, format_of
from selfspec.structured.outputs import MAX_SCHEMA, StructuredOutputs, closed

MOST_TOOLS = 1024
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Args:
        description: what the model is told; None: nothing.
        parameters: a JSON schema of the arguments, an object.
        strict: keywords of the schema that cannot be honoured are refused; else they are left to the model.
    """

    name: str
    description: str | None
    parameters: Json
    strict: bool = False

    @property
    def as_dict(self) -> Json:
        """As chat templates take it."""
        told = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": self.parameters}}

    @property
    def schema(self) -> str:
        """What arguments follow: an object, without properties that the function does not name.

        Parts of JSON are separated as in the templates' own JSON, so that a small model cannot write spaces for ever.
        """
        schema = closed({"type": "object", **self.parameters})
        return json.dumps(schema | {"x-guidance": OPTIONS | {"lenient": not self.strict}})


def tool_of(given: Any, name: str) -> Tool:
    """A tool in OpenAI's words, `{"type": "function", "function": {...}}`.

    Args:
        name: of what is given, for the error.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        kind = f"of type {given.get('type')!r}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ValueError(f"{name} must be of type function, which is what models here can call, and it is {kind}")
    own = given.get("function")
    if not isinstance(own, Mapping):
        raise ValueError(f"{name} must have a function, an object with a name, {got(own)}")
    called, told, strict = own.get("name"), own.get("description"), own.get("strict")
    if not isinstance(called, str) or not NAME.fullmatch(called):
        raise ValueError(f"{name}.function.name must have 1 to 128 letters, digits or any of _ . : / -, {got(called)}")
    if not isinstance(told, str | None):
        raise ValueError(f"{name}.function.description must be a text, {got(told)}")
    parameters: Any = own.get("parameters")
    parameters = NO_PARAMETERS if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(f"{name}.function.parameters must be the JSON schema of an object, {got(parameters)}")
    if parameters:
        try:
            StructuredOutputs(json=parameters)
        except ValueError as problem:
            reason = str(problem).replace("structured_outputs.json", f"{name}.function.parameters")
            raise ValueError(reason) from problem
    return Tool(called, told, dict(parameters), False if strict is None else flag(f"{name}.function.strict", strict))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar(StructuredOutputs):
    """Structured outputs that are free text, calls of tools, or either.

    Args:
        lark: the grammar; its first lines are the tools', one each.
        names: of the tools.
    """

    lark: str = ""
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.lark) > MAX_SCHEMA:
            raise ValueError(f"tools must have schemas of at most {MAX_SCHEMA} characters, got {len(self.lark)}")

    @property
    def source(self) -> tuple[str, str]:
        return "tools", self.lark

    def refusal(self, reason: str) -> str:
        found = re.match(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)", reason)
        if found is None or int(found[1]) > len(self.names):
            return f"tools are refused by llguidance: {reason}"
        at = int(found[1]) - 1
        return f"tools: the parameters of {self.names[at]!r} are refused by llguidance: {found[2]}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a conversation, and how the model calls them.

    Args:
        tools: those that the model is told of.
        outputs: the grammar; None: calls are not asked for.
        ends: texts of end-of-text tokens, where the marks are special tokens, and so special tokens are in texts.
    """

    tools: tuple[Tool, ...]
    format: CallFormat
    outputs: ToolGrammar
    ends: tuple[str, ...]

    @classmethod
    def of(
        cls,
        tools: Sequence[Any],
        tool_choice: Any = None,
        parallel: bool | None = None,
        *,
        tokenizer: Any,
        template: str,
        eos: frozenset[int],
        parser: str | None = None,
        text: StructuredOutputs | None = None,
    ) -> Self | None:
        """What a request asks for; None: the model calls nothing.

        Args:
            tools: in OpenAI's words.
            tool_choice: "none", "auto", "required", or a tool by name, which is called once; None: auto.
            parallel: whether an output may have several calls; None: it may.
            tokenizer: whose added tokens may be marks.
            template: the chat template, of which the format follows.
            eos: end-of-text tokens.
            parser: the format's name; None: that of the template.
            text: what an output that calls nothing must look like, JSON; None: any text.

        Raises:
            ValueError: a tool, or what the choice names, is wrong; the template's format is not known.
        """
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"tools must be at most {MOST_TOOLS}, got {len(tools)}")
        made = tuple(tool_of(one, f"tools[{i}]") for i, one in enumerate(tools))
        names = [one.name for one in made]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tools must have different names, and several are {doubled!r}")
        mode, allowed = _choice(tool_choice, names)
        parallel = True if parallel is None else flag("parallel_tool_calls", parallel)
        if mode == "none" or not made:
            if mode in ("required", "named"):
                raise ValueError("tool_choice needs tools, and there are none; send tools, or leave it out")
            return None
        called = [one for one in made if one.name in allowed]
        if (found := format_of(template) if parser is None else FORMATS[parser]) is None:
            raise ValueError(
                "tools cannot be called, since the chat template's format of calls is not known here; name one of "
                f"{', '.join(FORMATS)} as tool_call_parser (--tool-call-parser)"
            )
        added = dict(tokenizer.get_added_vocab())
        lark = _grammar(called, found, added, eos, mode != "auto", parallel and mode != "named", text)
        special = {*tokenizer.all_special_tokens}
        grammar = ToolGrammar(lark=lark, names=tuple(one.name for one in called))
        keeps_special = any(mark in special for mark in found.tokens)
        ends = tuple(tokenizer.convert_ids_to_tokens(sorted(eos))) if keeps_special else ()
        return cls(made, found, grammar, ends)

    @property
    def as_dicts(self) -> list[Json]:
        """The tools as chat templates take them."""
        return [one.as_dict for one in self.tools]

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same, with the grammar."""
        changes: Json = {"skip_special_tokens": False} if self.ends else {}
        return replace(params, structured_outputs=self.outputs, **changes)

    def reader(self) -> CallReader:
        """Finds the calls of an output."""
        return CallReader(self.format, self.ends)

    def read(self, output: RequestOutput) -> RequestOutput:
        """The same, the calls apart from the text."""
        return replace(output, outputs=[self._read(own) for own in output.outputs])

    def _read(self, output: CompletionOutput) -> CompletionOutput:
        text, calls = gathered(self.reader().read(output.text, True))
        made = [call_of(new_id(f"{uuid4()}"), name, arguments) for name, arguments in calls]
        return replace(output, text=text, tool_calls=made or None)


def gathered(pieces: Iterable[CallPiece]) -> tuple[str, list[tuple[str, str]]]:
    """The text of pieces, and the names and arguments of their calls."""
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if piece.call is None:
            text += piece.text
        elif piece.name is not None:
            calls.append((piece.name, piece.text))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return text, calls


def call_of(name: str, function: str, arguments: str) -> Json:
    """A call in OpenAI's words; `name` is its id."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def new_id(source: str, prefix: str = "call_") -> str:
    """The id of a call, always the same of the same text."""
    return prefix + hashlib.sha256(source.encode()).hexdigest()[:24]


def _choice(given: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Whether to call, "none", "auto", "required" or "named", and the tools that may be called."""
    if given is None or given in ("none", "auto", "required"):
        return given or "auto", names
    kind = given.get("type") if isinstance(given, Mapping) else None
    own = given.get(kind) if kind in ("function", "allowed_tools") else None
    if kind == "function" and isinstance(own, Mapping) and isinstance(own.get("name"), str):
        wanted, mode = [own["name"]], "named"
    elif isinstance(own, Mapping) and isinstance(own.get("tools"), list) and own.get("mode") in ("auto", "required"):
        functions = [one.get("function") if isinstance(one, Mapping) else None for one in own["tools"]]
        wanted, mode = [one.get("name") if isinstance(one, Mapping) else None for one in functions], own["mode"]
    else:
        raise ValueError(f"tool_choice must be {CHOICES}, {got(given)}")
    if unknown := [one for one in wanted if one not in names]:
        raise ValueError(f"tool_choice names {unknown[0]!r}, and the tools are {', '.join(names) or 'none'}")
    if not wanted:
        raise ValueError("tool_choice must allow at least one tool")
    return mode, wanted


def _grammar(
    tools: Sequence[Tool],
    form: CallFormat,
    added: Mapping[str, int],
    eos: frozenset[int],
    is_required: bool,
    parallel: bool,
    text: StructuredOutputs | None,
) -> str:
    """A grammar in llguidance's Lark: first the tools' lines, then the frame."""

    def written(what: str) -> str:
        """A text as the model writes it, its added tokens as such."""
        marks = "|".join(re.escape(one) for one in form.tokens if one in added)
        parts = [one for one in re.split(f"({marks})", what) if one] if marks else [what] if what else []
        return " ".join(f"<[{added[one]}]>" if one in added else json.dumps(one) for one in parts)

    lines = [f"tool_{i}: {written(one.name + form.between)} %json {one.schema}" for i, one in enumerate(tools)]
    calls = f"{written(form.opening)} call" + (f" ({written(form.separator)} call)*" if parallel else "")
    lines += [f"calls: {calls} {written(form.closing)}"]
    one_of = " | ".join(f"tool_{i}" for i in range(len(tools)))
    lines += [f"call: {written(form.before)} ({one_of}) {written(form.after)}"]
    if is_required:
        return "\n".join([*lines, f"start: {written(form.mark)} calls"])
    marks = [added[one] for one in form.tokens if one in added]
    others = sorted({*added.values()} - {*marks} - eos)
    other = [f"other: <[{','.join(map(str, others))}]>"] if others else []
    if text is not None:
        kind, source = text.source
        if kind != "json" or not form.mark:  # what begins a call may begin JSON, too
            raise ValueError(f"structured_outputs.{kind} cannot be asked for with tools that may be called")
        schema = json.dumps({"x-guidance": OPTIONS, **json.loads(source)})
        return "\n".join([*lines, f"start: {written(form.mark)} calls | %json {schema}"])
    lines += [*other, "TEXT: /(?s:.*)/"]
    if not form.mark:  # a call is the whole answer
        begun = [f"<[{one}]> calls" for one in marks]
        free = f"FIRST? {'(other TEXT)*' if others else ''}"
        lines += [f"start: {' | '.join(['calls', free, *begun])}"]
        return "\n".join([*lines, f"FIRST: /[^{re.escape(form.before[0])}](?s:.*)/"])
    lines += [f"mark[lazy]: TEXT {json.dumps(form.mark)}"]
    ways = ["TEXT", "mark calls"] + ([f"TEXT <[{added[form.mark]}]> calls"] if form.mark in added else [])
    return "\n".join([*lines, f"start: {'(TEXT other)*' if others else ''} ({' | '.join(ways)})"])
