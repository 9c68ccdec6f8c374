"""`StructuredOutputs`: what an output must look like, and the JSON schemas that say so."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from selfspec.errors import flag, got, refuse_empty

COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}  # keywords of schemas
OPENING = COMBINING | {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
MAX_SCHEMA, MAX_EXPRESSION = 1 << 18, 1 << 15  # characters of a schema or choices; of expressions and grammars


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an output must look like: one of the first five. Names are those of vLLM.

    The output ends where nothing may follow. Where it may end and may go on, an end-of-text token ends it.

    Args:
        json: a JSON schema, as a mapping or a text; the output is JSON that validates, without properties that the
            outermost object does not name, unless `additionalProperties` says so.
        json_object: True: the output is a JSON object.
        regex: a regular expression that the whole output matches, in the syntax of Rust's crate regex.
        choice: the output is one of these texts.
        grammar: a context-free grammar in the syntax of Lark or of GBNF.
        disable_any_whitespace: JSON without spaces and line breaks between its parts.

    Raises:
        ValueError: none or several of the five, a value of another kind, or one of more than `MAX_SCHEMA` or
            `MAX_EXPRESSION` characters. What a grammar says is checked when a request is made.
    """

    json: str | abc.Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: abc.Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        flag("disable_any_whitespace", self.disable_any_whitespace)
        names = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have one of {', '.join(names)}, got {' and '.join(given) or 'none'}"
            )
        kind, text = self.source
        most = MAX_EXPRESSION if kind in ("regex", "grammar") else MAX_SCHEMA
        if len(text) > most:
            raise ValueError(f"structured_outputs.{given[0]} must have at most {most} characters, got {len(text)}")
        if kind == "json" and (length := _pattern_length(json.loads(text))) > MAX_EXPRESSION:
            raise ValueError(
                f"structured_outputs.json must have patterns of at most {MAX_EXPRESSION} characters, got {length}"
            )

    def refusal(self, reason: str) -> str:
        """A sentence that says why it cannot be honoured."""
        return f"structured_outputs.{self.source[0]} is refused by llguidance: {reason}"

    @property
    def source(self) -> tuple[str, str]:
        """How it is written, "json", "regex", "choice" or "grammar", and the text; choices are a terminal of Lark."""
        if self.json_object:
            flag("structured_outputs.json_object", self.json_object)
            return "json", '{"type": "object"}'
        if self.json is not None:
            return "json", _schema_text(self.json)
        for name in ("regex", "grammar"):
            text: Any = getattr(self, name)
            if text is not None:
                if not isinstance(text, str):
                    raise ValueError(f"structured_outputs.{name} must be a text, {got(text)}")
                return name, text
        choices: Any = self.choice
        if isinstance(choices, str) or not isinstance(choices, Collection) or not choices:
            raise ValueError(f"structured_outputs.choice must be a list of texts, {got(choices)}")
        refuse_empty("structured_outputs.choice", choices)
        return "choice", f"start: CHOICE\nCHOICE: {' | '.join(map(_json, choices))}"  # a terminal may have many


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema_text(schema: Any) -> str:
    """A JSON schema as a text.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        if isinstance(schema, str) and len(schema) <= MAX_SCHEMA:
            schema = json.loads(schema)
        text = schema if isinstance(schema, str) else _json(closed(schema))
    except (ValueError, TypeError, RecursionError) as problem:
        raise ValueError(f"structured_outputs.json must be a JSON schema, and it is no JSON ({problem})") from problem
    if not isinstance(schema, str | abc.Mapping):
        raise ValueError(f"structured_outputs.json must be a JSON schema, a mapping or its text, {got(schema)}")
    return text


def closed(schema: Any) -> Any:
    """An object's schema without properties that it does not name, unless it says or needs them.

    What it allows validates against the schema as it is. A small model would write further properties without end.
    """
    if not isinstance(schema, abc.Mapping) or schema.keys() & OPENING:
        return schema
    named, needed = schema.get("properties"), schema.get("required", ())
    if (
        not isinstance(named, abc.Mapping)
        or not isinstance(needed, list | tuple)
        or not {*map(str, needed)} <= named.keys()
    ):
        return schema
    return {**schema, "additionalProperties": False}


def _pattern_length(schema: Any) -> int:
    """Characters of all regular expressions in a schema."""
    found, rest = 0, [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            pattern, named = one.get("pattern"), one.get("patternProperties")
            found += len(pattern) if isinstance(pattern, str) else 0
            found += sum(map(len, named)) if isinstance(named, dict) else 0
            rest += one.values()
    return found
