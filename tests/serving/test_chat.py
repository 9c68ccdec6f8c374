"""Conversations: what reaches the template, what is refused, and the options of a chat."""

from __future__ import annotations

import json

import pytest

from selfspec import SamplingParams
from selfspec.serving.bodies import in_order
from selfspec.serving.server import template_of
from tests.serving.server import serving, speaker
from tests.serving.test_protocol import events, refused

SHOW = (
    "{# tools #}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{{ reasoning_effort }}{% if add_generation_prompt %}bot:{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture
def shown(llm, served, monkeypatch):
    """Asks by a template that writes messages as JSON; what it wrote."""

    def call(messages, **fields):
        rendered, own = [], llm.chat_prompt
        monkeypatch.setattr(llm.tokenizer, "chat_template", SHOW)
        monkeypatch.setattr(
            llm, "chat_prompt", lambda *args, **more: rendered.append(own(*args, **more)) or rendered[-1]
        )
        answer = served.chat(messages=messages, max_tokens=1, **fields)
        monkeypatch.undo()
        assert answer.status_code == 200, answer.text
        *lines, last = llm.tokenizer.decode(rendered[-1]).split("\n")
        return [json.loads(line) for line in lines], last

    return call


def test_a_history_of_tools_reaches_the_template(shown):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": ["Weather in ", {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    told, _ = shown(messages)
    assert told == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
    ]


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"', 3, None])
def test_arguments_that_are_no_object_stay_as_they_are(shown, arguments):
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    [told], _ = shown([{"role": "assistant", "tool_calls": [call]}])
    assert told["tool_calls"] == [call]


def test_options_of_the_template(shown):
    user = {"role": "user", "content": "Hi"}
    assert shown([user])[1] == "bot:"
    assert shown([user], reasoning_effort="low")[1] == "lowbot:"
    assert shown([user], add_generation_prompt=False)[1] == ""
    assert shown([user], chat_template_kwargs={"reasoning_effort": "high"})[1] == "highbot:"


def test_a_final_message_is_continued(llm, served):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    [wanted] = llm.generate("user: Hi\nassistant: Well", SamplingParams(max_tokens=8))
    told = served.chat(messages=messages, continue_final_message=True, max_tokens=8).json()
    assert told["choices"][0]["message"]["content"] == wanted.outputs[0].text
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(served.chat(messages=messages, **both), 400, "must be false", param="continue_final_message")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused_by_their_name(served, kind):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:,"}}]}]
    refused(served.chat(messages=messages), 400, "messages[0].content[1]", repr(kind), param="messages")
    refused(served.chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "lacks", param="messages")


def test_a_prompt_is_cut_where_asked(llm, served):
    text = "abcdefgh" * 80
    refused(served.complete(text), 400, "maximum context length", code="context_length_exceeded", param="prompt")
    for most, side, cut in ((5, None, text[-5:]), (5, "right", text[:5]), (-1, None, text[-511:])):
        told = served.text(text, max_tokens=4, truncate_prompt_tokens=most, truncation_side=side, echo=True)
        assert told == cut + llm.generate(cut, SamplingParams(max_tokens=min(4, 512 - len(cut))))[0].outputs[0].text


def test_log_probabilities_of_prompts_are_told_by_token_id(llm, served):
    [wanted] = llm.generate("abc", SamplingParams(max_tokens=1, prompt_logprobs=2))
    told = served.complete("abc", max_tokens=1, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert told[0] is None and len(told) == 3
    for own, other in zip(told[1:], wanted.prompt_logprobs[1:], strict=True):
        assert {int(token): one["rank"] for token, one in own.items()} == {t: one.rank for t, one in other.items()}
    assert len(served.chat("abc", max_tokens=1, prompt_logprobs=0).json()["prompt_logprobs"]) == len("user: abc\nbot:")
    refused(served.complete("abc", prompt_logprobs=0, stream=True), 400, "stream", param="prompt_logprobs")


def test_every_chunk_tells_usage_where_asked(served):
    """As guidellm and vLLM's benchmark ask."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(served.chat(max_tokens=20, ignore_eos=True, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 20


def test_bias_and_stops_are_the_librarys(served):
    assert served.text(max_tokens=4, logit_bias={"65": 100}) == "bbbb"
    told = served.complete(max_tokens=9, logit_bias={"65": 100}, stop="bb", include_stop_str_in_output=True).json()
    assert (told["choices"][0]["text"], told["choices"][0]["stop_reason"]) == ("bb", "bb")
    assert served.text(max_tokens=1, logit_bias={"256": 100}, skip_special_tokens=False) == "<|end|>"
    refused(served.complete(logit_bias={"x": 1}), 400, "'x'", param="logit_bias")
    refused(served.complete(logit_bias={"300": 1}), 400, "0..256", param="logit_bias")
    refused(served.complete(logit_bias={"5": 200}), 400, "[-100, 100]", param="logit_bias")


def test_without_a_temperature_requests_sample_at_one_or_as_the_model_says(llm, served, monkeypatch):
    asked = {"max_tokens": 8, "seed": 5, "temperature": None}
    for settings, params in (
        ({}, {"temperature": 1.0}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.3, "top_k": 7}, {"temperature": 0.3, "top_k": 7}),
    ):
        [wanted] = llm.generate("abc", SamplingParams(max_tokens=8, seed=5, **params))
        for name, value in settings.items():
            monkeypatch.setattr(llm.target.model.generation_config, name, value)
        assert served.text("abc", **asked) == wanted.outputs[0].text
        monkeypatch.undo()


def test_a_chat_template_of_the_server_takes_the_place_of_the_models(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1].content }}!")
    llm = speaker()
    [wanted] = llm.generate("Hi!", SamplingParams(max_tokens=5))
    for given in (str(file), file.read_text()):
        with serving(llm, chat_template=given) as served:
            told = served.chat("Hi", max_tokens=5).json()["choices"][0]["message"]["content"]
            assert told == wanted.outputs[0].text
    with pytest.raises(ValueError, match="chat_template must be a Jinja template or a file"):
        template_of("no")


def test_a_prediction_changes_no_answer_and_its_tokens_are_counted(llm, served):
    answer = served.chat(max_tokens=20, ignore_eos=True).json()
    text = answer["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in answer["usage"]
    for given in (text, [{"type": "text", "text": text}], "something else"):
        told = served.chat(max_tokens=20, ignore_eos=True, prediction={"type": "content", "content": given}).json()
        assert told["choices"][0]["message"]["content"] == text
        counts = told["usage"]["completion_tokens_details"]
        expected = len(llm.tokenizer(text if given != "something else" else given)["input_ids"])
        assert counts["accepted_prediction_tokens"] + counts["rejected_prediction_tokens"] == expected
    refused(served.chat(prediction={"type": "x", "content": ""}), 400, "prediction", param="prediction")


def test_tokens_of_a_prediction_are_counted_in_their_order():
    expected = [1, 2, 3, 4, 5, 6, 7, 8]
    assert in_order(expected, expected) == 8
    assert in_order(expected, [1, 2, 9, 9, 4, 5, 6, 7, 8]) == 7
    assert in_order(expected, [9, 9]) == in_order(expected, []) == in_order([], expected) == 0
