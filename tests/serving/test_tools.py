"""Tools over HTTP: calls in the shapes of OpenAI's chats and responses and of Anthropic's messages."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from tests.cli_fixtures import TEMPLATE
from tests.serving.server import MODEL, speaker
from tests.serving.test_protocol import events, refused
from tests.serving.test_routes import named_events
from tests.serving.test_structured import ENDLESS, fails_alone

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
PICK = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}}, "required": ["kind"]}
TOOLS = [ADD, {"type": "function", "function": {"name": "pick.one", "parameters": PICK, "strict": True}}]
SCHEMAS = {"add": SCHEMA, "pick.one": PICK}
NAMED = {"type": "function", "function": {"name": "add"}}
CALLING = {"tools": TOOLS, "max_tokens": 120, "temperature": 1.0, "seed": 5, "parallel_tool_calls": False}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm():
    made = speaker()
    made.tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}" + TEMPLATE  # which says the format
    return made


def is_valid(name, arguments):
    validate(json.loads(arguments), SCHEMAS[name])
    return True


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required_is_made_and_follows_its_schema(served, choice):
    for seed in range(6):
        [choice_made] = served.chat(**CALLING | {"tool_choice": choice, "seed": seed}).json()["choices"]
        message = choice_made["message"]
        assert choice_made["finish_reason"] == "tool_calls" and message["content"] is None
        [call] = message["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_")
        assert is_valid(**call["function"]) and (choice == "required" or call["function"]["name"] == "add")


def test_a_stream_tells_a_call_piece_by_piece(served):
    asked = CALLING | {"tool_choice": "required", "parallel_tool_calls": True, "stream": True, "max_tokens": 200}
    asked["logit_bias"] = {"256": -100}  # no end of text: one call after another
    chunks = events(served.chat(**asked))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and not any(delta.get("content") for delta in deltas)
    calls = {}
    for delta in deltas:
        for one in delta.get("tool_calls", ()):
            assert one["index"] in (len(calls), len(calls) - 1)
            if one["index"] == len(calls):
                assert one["id"] and one["type"] == "function" and one["function"]["arguments"] == ""
                calls[one["index"]] = [one["function"]["name"], ""]
            else:
                assert one.keys() == {"index", "function"} and one["function"].keys() == {"arguments"}
                calls[one["index"]][1] += one["function"]["arguments"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] in ("tool_calls", "length") and set(reasons[:-1]) == {None}
    whole = served.chat(**asked | {"stream": False}).json()["choices"][0]
    told = [(one["function"]["name"], one["function"]["arguments"]) for one in whole["message"]["tool_calls"]]
    assert [tuple(one) for one in calls.values()] == told and len(told) > 1
    assert all(is_valid(*one) for one in told[:-1])


def test_an_end_by_length_says_so_and_keeps_what_came(served):
    asked = CALLING | {"tool_choice": NAMED, "max_tokens": 45}
    [choice] = served.chat(**asked).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n"'}
    told = served.http.post("/v1/responses", json=responses(asked) | {"max_output_tokens": 45}).json()
    assert told["status"] == "incomplete" and told["output"][0]["status"] == "incomplete"


def test_text_without_a_call_is_the_text_of_no_tools(served):
    """The template's line apart, a grammar of free text changes nothing of what is written."""
    bias = {str(token): -100 for token in range(128, 256)}  # only ASCII, since a grammar leaves no broken characters
    asked = {"max_tokens": 30, "temperature": 0, "logit_bias": bias, "messages": MESSAGES}
    plain = served.chat(**asked, tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert plain["message"] == served.chat(**asked).json()["choices"][0]["message"]
    auto = served.chat(**asked, tools=TOOLS).json()["choices"][0]
    assert "tool_calls" not in auto["message"] and auto["finish_reason"] == "length"
    streamed = [chunk["choices"][0]["delta"] for chunk in events(served.chat(**asked, tools=TOOLS, stream=True))]
    assert "".join(delta.get("content") or "" for delta in streamed) == auto["message"]["content"]


def test_openais_client_gathers_the_calls_of_a_stream(client):
    asked = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "seed": 5}
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds and is_valid(call.function.name, call.function.arguments)


def responses(asked):
    """A chat's request as one of /v1/responses."""
    flat = [{"type": "function", **one["function"]} for one in asked["tools"]]
    choice = asked["tool_choice"]
    choice = choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
    kept = {name: asked[name] for name in ("temperature", "seed", "parallel_tool_calls")}
    return {"input": "Hi", "tools": flat, "tool_choice": choice, "max_output_tokens": asked["max_tokens"], **kept}


def test_a_response_has_items_of_calls(served, client):
    asked = responses(CALLING | {"tool_choice": "required"})
    [item] = served.http.post("/v1/responses", json=asked).json()["output"]
    assert item["type"] == "function_call" and item["status"] == "completed" and item["call_id"].startswith("call_")
    assert is_valid(item["name"], item["arguments"])
    told = named_events(served.http.post("/v1/responses", json=asked | {"stream": True}))
    names = [name.removeprefix("response.") for name, _ in told]
    assert [name for name in names if name != "function_call_arguments.delta"] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    parts = [data["delta"] for name, data in told if name.endswith("arguments.delta")]
    assert "".join(parts) == item["arguments"]
    with client.responses.stream(model=MODEL, **asked | {"extra_body": {"seed": asked.pop("seed")}}) as stream:
        [own] = stream.get_final_response().output
    assert own.arguments == item["arguments"]


def test_a_message_has_blocks_of_calls(served):
    tools = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS]
    asked = {"messages": MESSAGES, "max_tokens": 120, "tools": tools, "seed": 5, "temperature": 1.0}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    told = served.http.post("/v1/messages", json=asked | {"tool_choice": choice}).json()
    [block] = told["content"]
    assert told["stop_reason"] == "tool_use" and block["type"] == "tool_use" and block["id"].startswith("toolu_")
    validate(block["input"], SCHEMAS[block["name"]])
    streamed = named_events(served.http.post("/v1/messages", json=asked | {"tool_choice": choice, "stream": True}))
    names = [name for name, _ in streamed if name != "content_block_delta"]
    assert names == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    deltas = [data["delta"] for name, data in streamed if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
    assert streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
    named = {"type": "tool", "name": "add"}
    [block] = served.http.post("/v1/messages", json=asked | {"tool_choice": named}).json()["content"]
    assert block["name"] == "add"
    counted = served.http.post("/v1/messages/count_tokens", json={"messages": MESSAGES, "tools": tools}).json()
    assert counted["input_tokens"] > len("<tool_call>")


def tool(**changes):
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


WRONG = [
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] must be of type function"),
    ({"tools": [{"type": "function"}]}, "tools", "must have a function"),
    (tool(name="two words"), "tools", "tools[0].function.name must have 1 to 128 letters"),
    (tool(name=None), "tools", "got None"),
    (tool(description=3), "tools", "description must be a text"),
    (tool(parameters=[]), "tools", "the JSON schema of an object, got []"),
    (tool(parameters={"type": "string"}), "tools", "the JSON schema of an object"),
    (tool(parameters={"properties": 5}), "tools", "the parameters of 'f' are refused by llguidance: properties must"),
    (tool(parameters={"properties": {"a": {"type": "foo"}}}), "tools", "Invalid type: foo"),
    (tool(parameters={"properties": {"a": {"pattern": "(?=x)"}}}), "tools", "look-around"),
    (tool(parameters={"properties": {"a": {"not": {}}}}, strict=True), "tools", 'Unimplemented keys: ["not"]'),
    (tool(parameters={"required": ["a"], "properties": {"a": False}}), "tools", "unsatisfiable"),
    (tool(parameters={"x": "y" * (1 << 19)}), "tools", "262144 characters"),
    (tool(strict="yes"), "tools", "strict must be"),
    ({"tools": [ADD, ADD]}, "tools", "different names, and several are 'add'"),
    ({"tools": TOOLS * 5000}, "tools", "a list of at most 1024 tools"),
    ({"tools": "all"}, "tools", "a list of at most 1024 tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required, or"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "none, auto, required, or"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names 'g'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "must be none, auto"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "guided_regex": "a"}, "structured_outputs", "cannot be asked for with tools"),
]


WRONG_MESSAGES = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type 'web_search_20250305'"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "the JSON schema of an object"),
    ({"tools": [5]}, "a list of at most 1024 tools"),
    ({"tools": [{"name": "f"}], "tool_choice": {"type": ["any"]}}, "tool_choice must have a type, auto, any, tool"),
    ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "names 'g'"),
]


@pytest.mark.parametrize(("given", "said"), WRONG_MESSAGES)
def test_wrong_tools_of_messages_are_refused_in_their_words(served, given, said):
    answer = served.http.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 5, **given})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("given", "name", "said"), WRONG)
def test_wrong_tools_are_refused_in_a_sentence(served, given, name, said):
    refused(served.chat(**given), 400, said, param=name)
    assert len(served.chat(**given).json()["error"]["message"]) < 400


def test_a_keyword_without_a_grammar_is_left_to_the_model_where_nothing_is_strict(served):
    given = tool(parameters={"properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]})
    [choice] = served.chat(**given, tool_choice=NAMED | {"function": {"name": "f"}}, max_tokens=100).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a": ')


@pytest.mark.parametrize("stream", [False, True])
def test_tools_whose_grammar_fails_while_decoding_are_the_fault_of_their_request_alone(served, stream):
    fails_alone(served, "tools", stream, **tool(parameters=ENDLESS), tool_choice="required")


@pytest.mark.parametrize("field", ["name", "description", "parameters"])
def test_half_of_a_character_in_a_tool_is_refused_at_once(served, field):
    half = {"name": "f\ud800", "description": "\ud800", "parameters": {"properties": {"\ud800": {}}}}[field]
    asked = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **tool(**{field: half})})  # escaped
    answer = served.http.post("/v1/chat/completions", content=asked, headers={"content-type": "application/json"})
    refused(answer, 400, "half a character", param="tools")


def test_a_message_whose_tools_fail_says_so_in_its_own_words(served):
    tool = {"name": "f", "input_schema": ENDLESS}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "tools": [tool]}
    asked |= {"tool_choice": {"type": "any"}}
    answer = served.http.post("/v1/messages", json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    told = named_events(served.http.post("/v1/messages", json=asked | {"stream": True}))
    name, said = told[-1]
    assert name == "error" and said["error"]["type"] == "invalid_request_error"
    # llguidance finds the fault while it goes on or while it goes back: its reason differs by where drafts ended
    start = "tools: the grammar of structured_outputs or tools cannot be followed further: "
    assert all(each["error"]["message"].startswith(start) for each in (answer.json(), said))


def test_a_message_that_length_cuts_keeps_the_properties_that_are_whole(served):
    properties = {"a": {"enum": ["x, y"]}, "b": {"type": "string", "pattern": "^[a-z]{40}$"}}
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": properties, "required": ["a", "b"]}}]
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}}
    for most, whole in ((45, {}), (70, {"a": "x, y"})):
        told = served.http.post("/v1/messages", json=asked | {"max_tokens": most}).json()
        [block] = told["content"]
        assert told["stop_reason"] == "max_tokens"
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", whole)
