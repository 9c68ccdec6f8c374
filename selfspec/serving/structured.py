"""What an answer must look like, in the words of OpenAI, vLLM and llama-server, as `StructuredOutputs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from selfspec.serving.refusal import Refusal, shown
from selfspec.structured.outputs import StructuredOutputs

# Fields of a request, and the fields of `StructuredOutputs` that they stand for.
NAMED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
FORMATS = "text, json_object or json_schema"


def structured_outputs(given: Mapping[str, Any]) -> StructuredOutputs | None:
    """What a request asks for; None: any text.

    Args:
        given: by name, the fields of `NAMED`, "response_format" and "structured_outputs".

    Raises:
        Refusal: a field is wrong, or several ask for something.
    """
    asked = {name: value for name, value in given.items() if value not in (None, "", {}, [])}
    found = [(name, settings) for name, value in asked.items() if (settings := _settings(name, value))]
    if not found:
        return None
    if len(found) > 1:
        raise Refusal(f"{found[1][0]} cannot be sent with {found[0][0]}; leave one out", param=found[1][0])
    name, settings = found[0]
    try:
        return StructuredOutputs(**settings)
    except ValueError as problem:
        raise refusal(str(problem), name) from problem


def refusal(problem: str, name: str) -> Refusal:
    """The refusal of structured outputs that a field asked for."""
    return Refusal(f"{name}: {problem}", param=name)


def asking(given: Mapping[str, Any]) -> str:
    """The name of the field that asks for something."""
    return next(name for name, value in given.items() if value not in (None, "", {}, []) and _settings(name, value))


def _settings(name: str, value: Any) -> dict[str, Any]:
    """The fields of `StructuredOutputs` that a field stands for; none where it asks for nothing."""
    if name == "response_format":
        return _format(value)
    if name != "structured_outputs":
        return {NAMED[name]: value}
    known = {one.name for one in fields(StructuredOutputs)}
    if not isinstance(value, dict) or not value.keys() <= known:
        raise Refusal(
            f"{name} must be an object with some of {', '.join(sorted(known))}, got {shown(value)}", param=name
        )
    return {key: own for key, own in value.items() if own is not None}


def _format(value: Any) -> dict[str, Any]:
    """Those of OpenAI's `response_format`; llama-server's `schema` beside a type is read, too."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    wrapped = value.get("json_schema") if kind == "json_schema" else value
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if kind == "json_object" and schema is None:
        return {"json_object": True}
    if kind not in ("json_object", "json_schema"):
        raise Refusal(f"response_format must have a type, {FORMATS}, got {shown(value)}", param="response_format")
    if not isinstance(schema, dict):
        message = f"response_format.json_schema must have a schema, an object, got {shown(wrapped)}"
        raise Refusal(message, param="response_format")
    return {"json": schema}
