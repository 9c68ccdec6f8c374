"""`CallFormat`: how models write calls of tools. `CallReader` finds them in an output as it grows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

NAME = re.compile("[A-Za-z0-9_.:/-]{1,128}")  # of a tool: nothing in it has to be quoted, in JSON or in grammars
SYSTEM = """# Tools

You may call functions. These are their signatures, one a line:
<tools>
{signatures}
</tools>

A call is a JSON object with the function's name and its arguments, written so:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""  # in Hermes' format, for templates that know no tools
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """An output with calls is: free text, mark, opening, a call, separator, a call, ..., closing.

    A call is: before, the tool's name, between, the arguments as a JSON object, after.

    Args:
        mark: "" where an output that calls has no text.
        tokens: parts of these texts that some tokenizers have as a token of their own.
        lead: one of them that may precede a call without a mark.
    """

    mark: str
    opening: str
    before: str
    between: str
    after: str
    separator: str
    closing: str
    tokens: tuple[str, ...] = ()
    lead: str = ""


_AS_JSON = {"before": '{"name": "', "between": '", "arguments": '}
_HERMES = {"after": "}\n</tool_call>", "separator": "\n<tool_call>\n", "closing": ""}
_ARRAY = {"after": "}", "separator": ", ", "closing": "]"}
FORMATS = {
    "hermes": CallFormat("<tool_call>", "\n", **_AS_JSON, **_HERMES, tokens=("<tool_call>", "</tool_call>")),
    "llama3_json": CallFormat(
        "", "", '{"name": "', '", "parameters": ', "}", "; ", "", ("<|python_tag|>",), "<|python_tag|>"
    ),
    "mistral": CallFormat("[TOOL_CALLS]", "[", **_AS_JSON, **_ARRAY, tokens=("[TOOL_CALLS]",)),
    "mistral_args": CallFormat(
        "[TOOL_CALLS]", "", "", "[ARGS]", "", "[TOOL_CALLS]", "", tokens=("[TOOL_CALLS]", "[ARGS]")
    ),
}
"""By name. Those of Hermes 2 Pro, 3 and Qwen 2.5, 3; Llama 3.1 to 3.3; Mistral to 2024, and from 2025 on."""


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools."""
    return re.search(r"\btools\b", template) is not None


def format_of(template: str) -> CallFormat | None:
    """The format of which a chat template tells the model; Hermes' where it tells it nothing of tools, which is then
    told in a system message; None: one that is not known here.
    """
    template = template.replace('\\"', '"')  # of texts in double quotes
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral_args" if "[ARGS]" in template else "mistral"]
    if "<tool_call>" in template and not re.search("<function=|<arg_key>", template):
        return FORMATS["hermes"]
    if "ipython" in template and '"parameters": ' in template:
        return FORMATS["llama3_json"]
    return None if knows_tools(template) else FORMATS["hermes"]


class CallPiece(NamedTuple):
    """What is new of an output.

    Args:
        call: which call it belongs to; None: the text before them.
        text: of the text, or of the call's arguments.
        name: of the tool, with the first piece of a call.
    """

    call: int | None
    text: str
    name: str | None = None


class CallReader:
    """Finds calls in an output as it grows. Text that may be the beginning of a call is held back.

    Args:
        form: None: there are none, and all is text.
        ends: texts of end-of-text tokens, which are no part of the text.
    """

    def __init__(self, form: CallFormat | None, ends: Sequence[str] = ()) -> None:
        self._form, self._ends, self._held = form, ends, ""
        self.num_calls = 0  # that came so far
        self._state: Literal["text", "calls", "arguments", "plain"] = "plain" if form is None else "text"
        self._depth, self._in_string, self._is_escaped = 0, False, False  # in the arguments of the last call
        if form is not None:
            begin = form.before or form.mark
            self._call = re.compile(f"{re.escape(begin)}({NAME.pattern}){re.escape(form.between)}")
            self._longest = len(begin) + 128 + len(form.between)

    @property
    def has_called(self) -> bool:
        """Whether there is a call, and none lacks its end."""
        return self.num_calls > 0 and self._state == "calls"

    def read(self, text: str, is_last: bool = False) -> list[CallPiece]:
        """The pieces that are certain with some more of the output."""
        self._held += text
        found = list[CallPiece]()
        if self._state in ("text", "plain") and (told := self._text(is_last)):
            found.append(CallPiece(None, told))
        while self._held and self._state in ("calls", "arguments"):
            if self._state == "arguments":
                found.append(CallPiece(self.num_calls - 1, self._arguments()))
            elif (begun := self._call.search(self._held)) is not None:
                found.append(CallPiece(self.num_calls, "", begun[1]))
                self._held, self._state = self._held[begun.end() :], "arguments"
                self.num_calls += 1
            else:
                break
        return found

    def _text(self, is_last: bool) -> str:
        """The text that is certainly none of a call's."""
        form, held, keep = self._form, self._held, 0
        if form is not None and self._state == "text":
            at = held.find(form.mark) if form.mark else self._whole_call(form)
            if at >= 0:
                self._state, self._held = "calls", held[at:]
                return held[:at]
            keep = overlap(held, form.mark) if form.mark else len(held) if self._may_call(form) else 0
            if not (keep or form.mark or is_last):
                self._state = "plain"
        if is_last:
            for end in self._ends:
                held = held.removesuffix(end)
            keep = 0
        certain, self._held = held[: len(held) - keep], held[len(held) - keep :]
        return certain

    def _whole_call(self, form: CallFormat) -> int:
        """0 where a call without a mark has begun, else -1."""
        return 0 if (form.lead and self._held.startswith(form.lead)) or self._call.match(self._held) else -1

    def _may_call(self, form: CallFormat) -> bool:
        """Whether what came may be the beginning of a call without a mark."""
        held = self._held
        begins = held.startswith(form.before) and len(held) < self._longest
        return begins or form.before.startswith(held) or form.lead.startswith(held)

    def _arguments(self) -> str:
        """What came of the arguments, up to their end."""
        for at, one in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = one == "\\", one != '"'
            elif one == '"':
                self._in_string = True
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if not self._depth:
                    self._state = "calls"
                    told, self._held = self._held[: at + 1], self._held[at + 1 :]
                    return told
        told, self._held = self._held, ""
        return told


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def told_of_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], template: str) -> list[Json]:
    """A conversation for a template that knows no tools: they, their calls and results are texts, in Hermes' format.

    Args:
        tools: as templates take them; none: there is nothing to tell.
        template: where it knows calls and results, these are left to it.
    """
    made = [dict(message) if "tool" in template else _as_text(message) for message in messages]
    if not tools:
        return made
    signatures = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    text = SYSTEM.format(signatures=signatures)
    if made and made[0].get("role") == "system":
        return [made[0] | {"content": f"{made[0].get('content') or ''}\n\n{text}"}, *made[1:]]
    return [{"role": "system", "content": text}, *made]


def _as_text(message: Mapping[str, Any]) -> Json:
    """A message, its calls as texts; a tool's result as the user's message."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not calls:
        return dict(message)
    parts = [str(message["content"])] if message.get("content") else []
    for call in calls:
        own = call.get("function") if isinstance(call, Mapping) else None
        own = own if isinstance(own, Mapping) else {}
        arguments = own.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        name = json.dumps(own.get("name"))
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {text or "{}"}}}\n</tool_call>')
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(parts)}


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The same, with ids of calls as Mistral's templates want them: nine letters and digits."""

    def short(given: Any) -> Any:
        if not isinstance(given, str) or re.fullmatch("[A-Za-z0-9]{9}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]

    made = [dict(message) for message in messages]
    for message in made:
        if isinstance(calls := message.get("tool_calls"), Sequence):
            given = [one for one in calls if isinstance(one, Mapping)]
            message["tool_calls"] = [{**one, "id": short(one.get("id"))} for one in given]
        if "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])
    return made
