"""The routes that clients use by default: each says what the library answers, in its API's shape."""

from __future__ import annotations

import json
import re

import openai
import pytest

from selfspec import SamplingParams
from selfspec.serving.refusal import Refusal
from selfspec.serving.store import ResponseStore
from selfspec.serving.tokens import Reader
from tests.serving.server import MODEL, eventually, serving
from tests.serving.test_protocol import refused

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
KEYS = ("correct horse", "second-key")


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_num_seqs=8, aliases=("other/name",)) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(llm):
    [output] = llm.chat(MESSAGES, SamplingParams(max_tokens=12))
    return output.outputs[0].text


def named_events(answer):
    """Names and data of an event stream."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return [(name, json.loads(data)) for name, data in re.findall(r"event: (\S+)\ndata: (.*)\n\n", answer.text)]


def test_responses_are_chats(client, wanted):
    asked = {"model": MODEL, "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0}
    done = client.responses.create(**asked, input="Hi")
    assert (done.output_text, done.status, done.incomplete_details.reason) == (
        wanted,
        "incomplete",
        "max_output_tokens",
    )
    assert done.usage.output_tokens == 12 and done.usage.total_tokens == 12 + done.usage.input_tokens
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    assert client.responses.create(**asked, input=items).output_text == wanted
    with client.responses.stream(**asked, input="Hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == wanted
    with client.responses.stream(model=MODEL, input="Hi", extra_body={"logit_bias": {"256": 100}}) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status, final.incomplete_details) == ("", "completed", None)


def test_a_conversation_goes_on_from_a_stored_response(llm, client):
    asked = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}
    first = client.responses.create(**asked, input="Hi", instructions="not kept")
    *_, last = client.responses.create(**asked, input="Go on", previous_response_id=first.id, stream=True)
    second = last.response
    history = [("user", "Hi"), ("assistant", first.output_text), ("user", "Go on")]
    [output] = llm.chat([{"role": role, "content": text} for role, text in history], SamplingParams(max_tokens=6))
    assert (second.output_text, second.previous_response_id) == (output.outputs[0].text, first.id)
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict() and second.store
    client.responses.delete(first.id)
    third = client.responses.create(**asked, input="x", previous_response_id=second.id, store=False)
    assert third.usage.input_tokens > second.usage.input_tokens
    for gone in (first.id, third.id):
        with pytest.raises(openai.NotFoundError, match="there is no response 'resp_"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as told:
            client.responses.create(**asked, input="x", previous_response_id=gone)
        assert told.value.code == "previous_response_not_found"


def test_stored_responses_take_no_more_memory_than_they_may():
    def response(name):
        return {"id": name, "output": [{"role": "assistant", "content": name}]}

    store = ResponseStore(300)
    for name in ("a", "b"):
        store.keep(response(name), [{"role": "user", "content": "x" * 60}])
    assert store.conversation("a")[-1] == {"role": "assistant", "content": "a"}
    store.keep(response("c"), [])  # b was used before a
    assert [one["content"] for one in store.conversation("c")] == ["c"] and store.get("a")
    with pytest.raises(Refusal, match="max-stored-bytes"):
        store.get("b")
    store.keep(response("d"), [{"content": "x" * 300}])  # too large: nothing is left
    for name in "acd":
        with pytest.raises(Refusal):
            store.get(name)
    with pytest.raises(Refusal, match="stores none"):
        ResponseStore(0).conversation("a")


def test_events_of_a_response_are_in_order_and_numbered(served):
    asked = {"input": "Hi", "max_output_tokens": 5, "temperature": 0, "top_logprobs": 1, "stream": True}
    told = named_events(served.http.post("/v1/responses", json=asked))
    names = [name for name, _ in told if name != "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names == [f"response.{name}" for name in begin + end]
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert all(data["type"] == name for name, data in told)
    assert len(told[-1][1]["response"]["output"][0]["content"][0]["logprobs"]) == 5


def test_calls_of_tools_in_an_input_are_messages(llm, served, monkeypatch):
    rendered, own = [], llm.chat_prompt
    monkeypatch.setattr(llm, "chat_prompt", lambda *args, **more: rendered.append(args[0]) or own(*args, **more))
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
    items = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": []}, call, call | {"call_id": "2"}]
    items += [{"type": "function_call_output", "call_id": "1", "output": "one"}]
    assert served.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).status_code == 200
    user, said, told = rendered[-1]
    assert user["content"] == "Hi" and told == {"role": "tool", "content": "one", "tool_call_id": "1"}
    assert [(one["id"], one["function"]["arguments"]) for one in said["tool_calls"]] == [
        ("1", {"x": 1}),
        ("2", {"x": 1}),
    ]


WRONG_RESPONSES = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is not stored here"),
    ({"text": {"format": {"type": "yaml"}}}, "response_format", "yaml"),
    ({"input": [{"type": "image_generation_call"}]}, "input", "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages", "'input_image'"),
    ({"input": [{"role": "user", "content": 5}]}, "messages", "got 5"),
    ({"background": True}, "background", "got True"),
    ({"n": 2}, "n", "send several requests"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] must be of type function"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_RESPONSES)
def test_what_a_response_cannot_be_is_refused(served, fields, param, words):
    refused(served.http.post("/v1/responses", json={"input": "Hi", **fields}), 400, words, param=param)


ASKED = {"model": MODEL, "system": "Be brief.", "max_tokens": 12, "temperature": 0}


def test_messages_are_chats(served, wanted):
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]
    told = served.http.post("/v1/messages", json={**ASKED, "messages": turns}).json()
    assert told["content"] == [{"type": "text", "text": wanted}] and told["stop_reason"] == "max_tokens"
    usage = told["usage"]
    counted = served.http.post("/v1/messages/count_tokens", json={**ASKED, "messages": turns}).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted and usage["output_tokens"] == 12
    events = named_events(served.http.post("/v1/messages", json={**ASKED, "messages": turns, "stream": True}))
    names = [name for name, _ in events if name != "content_block_delta"]
    assert names == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == wanted
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_message_ends_at_a_stop_sequence_or_by_itself(served):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0}
    told = served.http.post("/v1/messages", json=asked | {"logit_bias": {"65": 100}, "stop_sequences": ["bb"]}).json()
    assert (told["stop_reason"], told["stop_sequence"], told["content"][0]["text"]) == ("stop_sequence", "bb", "")
    told = served.http.post("/v1/messages", json=asked | {"logit_bias": {"256": 100}}).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)


def test_blocks_of_tools_are_messages_and_a_final_turn_is_continued(llm, served, monkeypatch):
    rendered, own = [], llm.chat_prompt
    monkeypatch.setattr(
        llm, "chat_prompt", lambda *args, **more: rendered.append((args[0], more)) or own(*args, **more)
    )
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "So"}, use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "1"}]}],
        },
        {"role": "assistant", "content": "Well"},
    ]
    assert served.http.post("/v1/messages", json={"messages": turns, "max_tokens": 1}).status_code == 200
    [(messages, options)] = rendered
    assert [one["content"] for one in messages] == ["Hi", "So", "1", "Well"] and messages[2]["role"] == "tool"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert options == {"add_generation_prompt": False, "continue_final_message": True}


def test_errors_of_messages_have_anthropics_shape(served):
    def told(status, **fields):
        answer = served.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "Hi"}], **fields})
        body = answer.json()
        assert answer.status_code == status and body["type"] == "error"
        return body["error"]

    assert told(404, model="none")["type"] == "not_found_error"
    assert "image" in told(400, messages=[{"role": "user", "content": [{"type": "image"}]}])["message"]
    assert told(400, thinking={"type": "enabled"})["type"] == "invalid_request_error"
    assert "messages" in told(400, messages=[])["message"]


def test_tokens_go_to_and_fro(llm, served):
    ids = llm.tokenizer("H\u00e4?")["input_ids"]
    told = served.http.post("/tokenize", json={"prompt": "H\u00e4?", "return_token_strs": True}).json()
    assert (told["tokens"], told["count"], told["max_model_len"], len(told["token_strs"])) == (ids, 4, 512, 4)
    assert served.http.post("/tokenize", json={"content": "H\u00e4?"}).json()["tokens"] == ids
    chat = served.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == llm.chat_prompt(MESSAGES)
    assert served.http.post("/tokenize", json={"prompt": "x" * 600}).json()["count"] == 600
    assert served.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    back = served.http.post("/detokenize", json={"tokens": ids}).json()
    assert back["prompt"] == back["content"] == "H\u00e4?"
    refused(served.http.post("/tokenize", json={}), 400, "prompt must be a text", param="prompt")
    refused(served.http.post("/detokenize", json={"tokens": [257]}), 400, "0..256", param="tokens")
    info = served.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", 512) and "messages" in info["chat_template"]


def test_models_are_told_by_any_of_their_names(served, client):
    assert [one.id for one in client.models.list()] == [MODEL, "other/name"]
    assert client.models.retrieve("other/name").max_model_len == 512
    assert served.complete(model="other/name", max_tokens=1).json()["model"] == "other/name"
    with pytest.raises(openai.NotFoundError, match="there is no model 'else' here"):
        client.models.retrieve("else")
    assert served.http.get("/ping").status_code == served.http.post("/ping").status_code == 200


def test_operators_tools_of_other_servers_find_what_they_ask_for(llm, served):
    props = served.http.get("/props").json()
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (512, 8)
    assert props["chat_template"] == llm.tokenizer.chat_template
    slots = served.http.get("/slots").json()
    assert [one["id"] for one in slots] == list(range(8)) and not any(one["is_processing"] for one in slots)
    assert served.http.get("/load").json() == {"server_load": 0}
    for path in ("/health", "/v1/models", "/metrics"):
        head = served.http.head(path)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("path", ["/completions", "//v1/completions", "/v1//completions/", "/v1/completions/"])
def test_paths_that_clients_make_of_other_base_urls_are_known(served, path):
    assert served.http.post(served.url + path, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    told = served.http.post(served.url + path.replace("completions", "messages"), json={"messages": []}).json()
    assert told["type"] == "error"  # Anthropic's shape
    assert [one["id"] for one in served.http.get(served.url + path.replace("completions", "models")).json()["data"]]


def test_an_answer_may_go_to_the_end_of_the_context(served):
    asked = {"max_tokens": -1, "ignore_eos": True}
    for usage in (served.complete(**asked).json()["usage"], served.chat(**asked).json()["usage"]):
        assert usage["total_tokens"] == 512


def test_any_of_the_keys_opens_the_server_in_any_apis_way(llm):
    with serving(llm, api_key=KEYS) as served:
        for key in KEYS:
            for way in ("Bearer", "bearer", "BEARER"):
                assert served.http.get("/v1/models", headers={"Authorization": f"{way} {key}"}).status_code == 200
            count = {"messages": [{"role": "user", "content": "Hi"}]}
            answer = served.http.post("/v1/messages/count_tokens", json=count, headers={"x-api-key": key})
            assert answer.status_code == 200
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": KEYS[0]}, {"x-api-key": KEYS[0]}):
            refused(served.http.get("/v1/models", headers=headers), 401, "API key", code="invalid_api_key")
        assert served.http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        told = served.http.post("/v1/messages", json={}).json()
        assert told["error"]["type"] == "authentication_error"
        assert served.http.get("/health").status_code == served.http.get("/metrics").status_code == 200


def test_pages_of_allowed_sites_may_call(llm):
    site = {"Origin": "https://example.org"}
    ask = site | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(llm, allowed_origins=["https://example.org"], api_key="k") as served:
        answer = served.http.options("/v1/chat/completions", headers=ask)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.org")
        other = served.http.get("/v1/models", headers=site | {"Authorization": "Bearer k"})
        assert other.headers["access-control-allow-origin"] == "https://example.org"
        assert served.http.options("/v1/models", headers=ask | {"Origin": "https://else.org"}).status_code == 400
    with serving(llm) as served:
        assert "access-control-allow-origin" not in served.http.get("/v1/models", headers=site).headers


def test_a_route_that_raises_is_answered_in_the_apis_shape_and_logged(llm, caplog, monkeypatch):
    monkeypatch.setattr(Reader, "prompts", lambda *arguments: 1 / 0)
    with caplog.at_level("ERROR"), serving(llm) as served:
        answer = served.complete()
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the server failed")
        assert len(answer.headers["x-request-id"]) == 32
        assert served.metric("http_requests_total", handler="/v1/completions", status="500") == 1
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.getMessage() == "POST /v1/completions failed" and record.exc_info[0] is ZeroDivisionError


def test_answers_are_logged_with_their_ids_and_counted(llm, caplog):
    with caplog.at_level("INFO"), serving(llm) as served:
        served.http.get("/health")
        given = served.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
        made = served.complete(model="none")
        served.http.get("/no/such/route")
        assert given.headers["x-request-id"] == "mine" and len(made.headers["x-request-id"]) == 32

        def told():
            return [record.getMessage() for record in caplog.records if record.name == "selfspec.serving.access"]

        eventually(lambda: len(told()) == 3)  # a line is written once the answer has gone
        lines = told()
        assert [re.sub(r"\d+\.\d+s", "s", line) for line in lines] == [
            "127.0.0.1 POST /v1/completions 200 s mine",
            f"127.0.0.1 POST /v1/completions 404 s {made.headers['x-request-id']}",
            f"127.0.0.1 GET /no/such/route 404 s {lines[-1].split()[-1]}",
        ]
        for handler, status, count in (("/v1/completions", 200, 1), ("/v1/completions", 404, 1), ("none", 404, 1)):
            assert served.metric("http_requests_total", handler=handler, status=status) == count
        assert served.metric("http_request_duration_seconds_count", handler="/health", method="GET") == 1
        caplog.clear()
    with caplog.at_level("INFO"), serving(llm, access_log=False) as served:
        served.complete(max_tokens=1)
    assert not [record for record in caplog.records if record.name == "selfspec.serving.access"]
