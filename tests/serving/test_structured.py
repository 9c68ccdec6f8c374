"""Structured outputs over HTTP, in the words of OpenAI, vLLM and llama-server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import validate

from tests.serving.test_protocol import events, refused

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["red", "green"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
NAMED = {"name": "facts", "schema": SCHEMA, "strict": True}
WAYS = [
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
]


@pytest.mark.parametrize("given", WAYS)
def test_every_way_to_ask_for_a_schema_gives_json_that_validates(served, given):
    [choice] = served.chat(max_tokens=300, temperature=1.0, seed=3, **given).json()["choices"]
    if choice["finish_reason"] == "stop":
        validate(json.loads(choice["message"]["content"]), SCHEMA)
    [choice] = served.complete(max_tokens=300, seed=3, **given).json()["choices"]
    assert choice["finish_reason"] == "length" or validate(json.loads(choice["text"]), SCHEMA) is None


def test_choices_expressions_and_grammars_hold(served):
    assert served.text(max_tokens=40, guided_choice=["yes it is", "no"]) in ("yes it is", "no")
    assert served.text(max_tokens=40, guided_regex="(ab){3}c") == "abababc"
    assert served.text(max_tokens=40, guided_grammar='start: "x" "y"') == "xy"
    assert served.text(max_tokens=40, grammar='root ::= "x" "z"') == "xz"
    assert served.text(max_tokens=40, structured_outputs={"choice": ["one way"]}) == "one way"
    assert served.text(max_tokens=9, response_format={"type": "text"}) == served.text(max_tokens=9)


def test_a_stream_and_a_response_have_the_same_text(served):
    given = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "max_tokens": 60, "temperature": 0}
    [choice] = served.chat(**given).json()["choices"]
    chunks = [chunk["choices"][0]["delta"] for chunk in events(served.chat(**given, stream=True)) if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in chunks) == choice["message"]["content"]
    validate(json.loads(choice["message"]["content"]), SCHEMA)
    kind = {"type": "json_schema", **NAMED}
    body = {"input": "Hi", "text": {"format": kind}, "max_output_tokens": 300, "temperature": 1.0, "seed": 3}
    answer = served.http.post("/v1/responses", json=body).json()
    if answer["status"] == "completed":
        validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer["text"]["format"] == kind


WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format", "must have a type, text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must have a schema, an object"),
    ({"guided_json": "{"}, "guided_json", "it is no JSON"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be sent with guided_regex"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "must be an object with some of"),
]


@pytest.mark.parametrize(("given", "name", "said"), WRONG)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(served, given, name, said):
    refused(served.complete(**given), 400, said, param=name)
    refused(served.chat(**given), 400, said, param=name)


ENDLESS = {  # it goes on by '{"a":', which llguidance finds when the row is there
    "type": "object",
    "properties": {"b": {"type": "string", "pattern": "^[a-z]{20}$"}, "a": {"$ref": "#/$defs/a"}},
    "required": ["b", "a"],
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}


def fails_alone(served, field, stream, **asked):
    """A request whose grammar fails is told so, and another beside it goes on."""
    free = {"max_tokens": 100, "temperature": 0}
    alone = served.text(**free)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(served.text, **free)
        answer = served.chat(**asked, stream=stream, max_tokens=200, temperature=0)
        assert beside.result() == alone
    assert answer.status_code == (200 if stream else 400)
    error = (events(answer)[-1] if stream else answer.json())["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == field
    assert error["message"].startswith(
        f"{field}: the grammar of structured_outputs or tools cannot be followed further"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_while_decoding_is_the_fault_of_its_request_alone(served, stream):
    name = "structured_outputs"
    fails_alone(served, name, stream, structured_outputs={"json": ENDLESS, "disable_any_whitespace": True})
