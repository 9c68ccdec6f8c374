"""What may be sent: the payloads of lm-eval, neutral values, and refusals by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from selfspec import LLM, SamplingParams
from selfspec.serving.fields import NAMES, NEUTRAL, REFUSED
from selfspec.serving.messages import MessagesRequest
from selfspec.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from selfspec.serving.responses import ResponsesRequest
from tests.models import build
from tests.serving.server import MODEL, serving

KEY = "correct horse"
BODIES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def refused(answer, status, *words, param=None, code=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert code in (None, error["code"])
    for word in words:
        assert word in error["message"]


def events(answer):
    """The JSON of an event stream, whose last event is [DONE]."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_log_likelihoods_as_lm_eval_asks_for_them_are_those_of_a_plain_forward(llm, served):
    """A batch of token ids, echo, one new token; the context's tokens and the new one are cut off."""
    texts = ["Once upon a time", "abc", "Once upon a time, and another"]
    prompts = [llm.tokenizer(text)["input_ids"] for text in texts]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "stop": None}
    choices = served.complete(prompts, model=MODEL, **asked).json()["choices"]
    none = served.complete(prompts, model=MODEL, **asked | {"max_tokens": 0}).json()
    assert none["usage"]["completion_tokens"] == 0
    for text, prompt, choice, without in zip(texts, prompts, choices, none["choices"], strict=True):
        told = choice["logprobs"]
        with torch.inference_mode():
            logits = llm.target.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        wanted = [float(logits[i, token]) for i, token in enumerate(prompt[1:])]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)
        for likely, line in zip(told["top_logprobs"][1:-1], logits, strict=False):
            assert max(likely.values()) == pytest.approx(float(line.max()), abs=1e-4)
        assert len(told["tokens"]) == len(prompt) + 1
        assert choice["text"].startswith(text) and without["text"] == text
        assert without["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]


def test_an_echo_precedes_the_text_streamed_too(llm, served):
    [wanted] = llm.generate("Hä", SamplingParams(max_tokens=8))
    assert served.text("Hä", max_tokens=8, echo=True) == "Hä" + wanted.outputs[0].text
    assert served.text(llm.tokenizer("Hä")["input_ids"], max_tokens=8, echo=True) == "Hä" + wanted.outputs[0].text
    chunks = events(served.complete("Hä", max_tokens=8, echo=True, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hä" + wanted.outputs[0].text
    refused(served.complete("Hä", echo=True, logprobs=1, stream=True), 400, "cannot be streamed", param="stream")


def test_token_ids_come_where_asked_and_are_the_librarys(llm, served):
    [wanted] = llm.generate("abc", SamplingParams(max_tokens=15))
    [choice] = served.complete("abc", max_tokens=15, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == wanted.outputs[0].token_ids
    chunks = events(served.complete("abc", max_tokens=15, return_token_ids=True, stream=True))
    assert [token for c in chunks for token in c["choices"][0]["token_ids"]] == wanted.outputs[0].token_ids


def documented(kind, where=None):
    """The fields of a class in the table of docs/serving.md."""
    rows = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if line.startswith(f"| {kind} |")]
    return [name for row in rows if where in (None, row[1].strip()) for name in re.findall(r"`(\w+)`", row[2])]


def test_the_documented_classes_of_fields_are_those_of_the_code():
    assert documented("neutral") == NAMES.split() and sorted(documented("refused")) == sorted(REFUSED)
    shared = GenerationRequest.model_fields.keys()
    assert {*documented("honoured", "all")} == shared
    for route, body in BODIES.items():
        assert shared | {*documented("honoured", route)} == body.model_fields.keys(), route
        assert not (NEUTRAL | REFUSED.keys()) & shared
    assert not NEUTRAL & REFUSED.keys()


ODD = "an odd value"


def test_every_documented_field_is_treated_as_its_class_says(served):
    """Neutral and refused fields, at an odd value, at null, and at the values that ask for nothing."""
    text, answer = served.text(max_tokens=4), served.chat(max_tokens=4).json()["choices"]
    for name in documented("neutral"):
        assert served.text(max_tokens=4, **{name: ODD}) == text, name
        assert served.chat(max_tokens=4, **{name: ODD}).json()["choices"] == answer, name
    for name in documented("refused"):
        refused(served.complete(**{name: ODD}), 400, name, ODD, param=name, code="unsupported_parameter")
        refused(served.chat(**{name: ODD}), 400, name, ODD, param=name, code="unsupported_parameter")
        for value in (None, *REFUSED[name]):
            assert served.text(max_tokens=4, **{name: value}) == text, name
            assert served.chat(max_tokens=4, **{name: value}).json()["choices"] == answer, name
    for name, value in (("best_of", True), ("unheard_of", 0)):
        refused(served.complete(**{name: value}), 400, name, param=name, code="unsupported_parameter")


def test_values_that_ask_for_nothing_change_nothing(served):
    text = served.text(max_tokens=8)
    nothing = {"min_tokens": 0, "logit_bias": {}, "skip_special_tokens": True, "include_stop_str_in_output": False}
    nothing |= {"top_k": -1, "unheard_of": None, "stop": [], "stop_token_ids": [], "add_special_tokens": True}
    assert served.text(max_tokens=8, **nothing) == text


def test_min_tokens_gives_way_to_a_length_that_the_server_chose(served):
    """16 tokens, as OpenAI has it; all that the context holds in conversations."""
    assert served.complete(min_tokens=600).json()["usage"]["completion_tokens"] == 16
    assert served.chat(min_tokens=600).json()["usage"]["total_tokens"] == 512


WRONG = [
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": [1, "a"]}, "prompt", "a list of at most 16384 texts"),
    ({"prompt": [257]}, "prompt", "0..256"),
    ({"prompt": [-1]}, "prompt", "0..256"),
    ({"prompt": [10**30]}, "prompt", "0..256"),
    ({"prompt": "\ud800"}, "prompt", "half a character"),
    ({"prompt": "x" * 513}, "prompt", "maximum context length is 512 tokens"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "0.7"}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "at least 0"),
    ({"top_k": -2}, "top_k", "at least 0"),
    ({"max_tokens": -2}, "max_tokens", "at least 1, got -2"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_tokens, 5, got 6"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 10**6, "temperature": 1}, "n", "at most"),
    ({"seed": (1 << 63) - 1, "n": 2, "temperature": 1}, "seed", "64-bit"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": [1, 2]}, "stop", "a list of at most 64 texts"),
    ({"stop": [f"{i}" for i in range(65)]}, "stop", "at most 64"),
    ({"prompt": "x" * 100_000}, "prompt", "100000 characters"),
    ({"prompt": [5] * 513}, "prompt", "513 tokens"),
    ({"prompt": ["x"] * 1000}, "prompt", "at most 264 outputs"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "0..256"),
    ({"stop_token_ids": [1 << 40]}, "stop_token_ids", "less than or equal"),
    ({"logprobs": 21}, "logprobs", "0..20"),
    ({"stream_options": {"unheard_of": 1}}, "stream_options.unheard_of", "no field"),
    ({"speculative": "no"}, "speculative", "valid boolean"),
    ({"\ud800": 1}, None, "valid JSON"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG)
def test_wrong_values_are_refused_by_name_and_the_next_request_is_served(served, fields, param, words):
    body = json.dumps({"prompt": "Hello", "temperature": 0, **fields})  # httpx refuses some of it
    answer = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    refused(answer, 400, words, param=param)
    assert served.complete(max_tokens=2).status_code == 200


MANY = 10_000


@pytest.mark.parametrize(
    "fields",
    [{"stop": [1] * MANY}, {"stop_token_ids": ["x"] * MANY}, {"prompt": [None] * MANY}, {"prompt": [["x"]] * MANY}],
)
def test_of_a_long_list_one_mistake_is_enough(fields):
    """Millions of them, each with its own message, would hold up every other request."""
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate({"prompt": "x", **fields})
    assert found.value.error_count() <= 4


CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs",
    ),
    ({"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), CHATS)
def test_wrong_conversations_are_refused(served, body, param):
    refused(served.http.post("/v1/chat/completions", json=body), 400, param=param)


def test_of_a_wrong_message_the_part_is_named(served):
    def told(message, *words):
        refused(served.chat(messages=[{"role": "user", "content": "Hi"}, message]), 400, *words, param="messages")

    told({"role": "user", "content": 5}, "messages.1.content: must be a text, null, or a list", "got 5")
    told({"role": "user", "content": ["Hi", 5]}, "messages.1.content: must be", "parts")
    told({"content": "Hi"}, "messages.1.role: Field required")
    told("Hi", "messages: must be a list of 1 to 16384 messages", "got 'Hi'")
    refused(served.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs must lie in 0..20", param="top_logprobs")


@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_request_is_refused(served, body):
    answer = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and set(answer.json()) == {"error"}
    packed = served.http.post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
    refused(packed, 415, "without Content-Encoding, got gzip")
    refused(served.http.get("/v1/nothing"), 404, "Not Found", "GET /v1/nothing", code="unknown_url")
    refused(served.http.get("/v1/completions"), 405, "Method Not Allowed", "GET /v1/completions")


def test_extreme_values_end_well_and_disturb_no_neighbour(llm, served):
    """They are in one batch with requests whose texts are known."""
    text = served.text("neighbour", max_tokens=40)
    extremes = [{"temperature": 1e308}, {"top_k": 10**30, "temperature": 1}, {"max_tokens": 10**30}]
    extremes += [{"repetition_penalty": 1e308}, {"repetition_penalty": 5e-324}, {"seed": -(1 << 63), "temperature": 1}]
    extremes += [{"no_repeat_ngram_size": 1}, {"min_p": 1, "top_p": 1e-300, "temperature": 1e-6}, {"logprobs": 20}]
    for fields in extremes:
        several = served.complete(["neighbour", "other"], **{"max_tokens": 40, **fields})
        assert several.status_code == 200, (fields, several.text)
        assert served.text("neighbour", max_tokens=40) == text


def test_the_key_and_the_bodys_size_are_checked_first(llm):
    with serving(llm, api_key=KEY, max_body_bytes=1000) as served:
        refused(served.complete(), 401, "API key")
        wrong = {"Authorization": "Bearer ä".encode()}
        refused(served.http.get("/v1/models", headers=wrong), 401)
        right = {"Authorization": f"Bearer {KEY}"}
        assert served.http.get("/v1/models", headers=right).json()["data"][0]["id"] == MODEL
        assert served.http.get("/health").status_code == served.http.get("/metrics").status_code == 200
        large = {"prompt": "x" * 1000}
        refused(served.http.post("/v1/completions", json=large, headers=right), 413, "at most 1000 bytes")
        parts = (part for part in [b'{"prompt": "', b"x" * 1000, b'"}'])  # without a length
        json_too = right | {"Content-Type": "application/json"}
        refused(served.http.post("/v1/completions", content=parts, headers=json_too), 413, "at most 1000 bytes")
        assert served.http.post("/v1/completions", json={"prompt": "x"}, headers=right).status_code == 200


def test_a_model_without_a_tokenizer_serves_token_ids():
    llm = LLM(build("llama"))
    with serving(llm, max_num_seqs=2) as served:
        [choice] = served.complete([5, 6, 7], max_tokens=6, return_token_ids=True, logprobs=0).json()["choices"]
        [wanted] = llm.generate([5, 6, 7], SamplingParams(max_tokens=6))
        assert choice["token_ids"] == wanted.outputs[0].token_ids and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        refused(served.complete("text"), 400, "no tokenizer", param="prompt")
        refused(served.complete([5], stop=["x"]), 400, "needs a tokenizer", param="stop")
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        refused(served.http.post("/v1/chat/completions", json=chat), 400, "chat template", param="messages")


def test_prompts_are_logged_only_where_asked(llm, caplog):
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level("DEBUG"), serving(llm, log_prompts=log_prompts) as served:
            served.text("a secret", max_tokens=2)
        assert ("a secret" in caplog.text) == log_prompts
