"""The real `openai` package as client: texts are `LLM.generate`'s, whole, streamed, sampled, stopped, many at once."""

from __future__ import annotations

import asyncio

import openai
import pytest

from selfspec import SamplingParams
from tests.serving.server import MODEL, PATIENCE, serving

GREEDY = {"temperature": 0}
MESSAGES = [{"role": "user", "content": "Who are you?"}]
PROMPTS = ["def mean(values):", "Hä?", "\N{GRINNING FACE}", "abcabcabcabc"]


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_num_seqs=64) as made:
        yield made


def generated(llm, prompt, **params):
    [output] = llm.generate(prompt, SamplingParams(**params))
    return output.outputs


@pytest.mark.parametrize("way", [GREEDY, {"temperature": 1.2, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5}])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_the_library_generates_whole_and_streamed(llm, client, prompt, way):
    [wanted] = generated(llm, prompt, max_tokens=40, **way)
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 40, **way}
    done = client.completions.create(**asked)
    assert done.choices[0].text == wanted.text and done.choices[0].finish_reason == wanted.finish_reason
    num_tokens = len(wanted.token_ids)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt.encode()), num_tokens)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        wanted.finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == num_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_chat_is_what_the_library_answers_whole_and_streamed(llm, client):
    [wanted] = llm.chat(MESSAGES, SamplingParams(max_tokens=30))
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 30, **GREEDY}
    [choice] = client.chat.completions.create(**asked).choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.outputs[0].text)
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]}]
    [choice] = client.chat.completions.create(**asked | {"messages": in_parts}).choices
    assert choice.message.content == wanted.outputs[0].text
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(piece.delta.content for piece in pieces) == wanted.outputs[0].text
    assert [piece.delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)


def test_without_a_length_an_answer_goes_as_far_as_the_context(llm, client):
    prompt_tokens = len(llm.chat_prompt(MESSAGES))
    done = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert done.usage.completion_tokens == 512 - prompt_tokens
    assert client.completions.create(model=MODEL, prompt="x", extra_body={"ignore_eos": True}).usage.total_tokens == 17


def test_stop_strings_end_it_and_no_part_of_one_is_streamed(llm, client):
    [whole] = generated(llm, "abcabc", max_tokens=60)
    stop = whole.text[20:23]
    [wanted] = generated(llm, "abcabc", max_tokens=60, stop=stop)
    assert wanted.finish_reason == "stop" and stop not in wanted.text
    asked = {"model": MODEL, "prompt": "abcabc", "max_tokens": 60, "stop": [stop, "never"], **GREEDY}
    [choice] = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (wanted.text, "stop", stop)
    assert "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True)) == wanted.text


def test_several_outputs_have_seeds_of_their_own_and_several_prompts_keep_their_order(llm, client):
    way = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 3}
    outputs = [one for prompt in PROMPTS for one in generated(llm, prompt, **way)]
    wanted = [one.text for one in outputs]
    done = client.completions.create(model=MODEL, prompt=PROMPTS, **way)
    assert [choice.text for choice in done.choices] == wanted and len(set(wanted)) > len(PROMPTS)
    assert done.usage.completion_tokens == sum(len(one.token_ids) for one in outputs)
    streamed = [""] * len(wanted)
    for chunk in client.completions.create(model=MODEL, prompt=PROMPTS, stream=True, **way):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == wanted


def test_without_a_seed_samples_differ(client):
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 20, "temperature": 1.5}
    assert len({client.completions.create(**asked).choices[0].text for _ in range(4)}) > 1


def test_log_probabilities_are_the_librarys(llm, client):
    [wanted] = generated(llm, "abc", max_tokens=9, logprobs=3)
    own = [told[token].logprob for token, told in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    told = client.completions.create(model=MODEL, prompt="abc", max_tokens=9, logprobs=3, **GREEDY).choices[0].logprobs
    assert told.token_logprobs == pytest.approx(own, abs=1e-4) and len(told.top_logprobs) == 9
    assert told.text_offset == [sum(map(len, told.tokens[:i])) for i in range(9)]
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **GREEDY}
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    assert len(content) == 6
    for one in content:
        assert one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 2
        assert one.top_logprobs[0].bytes == one.bytes and bytes(one.bytes).decode("utf-8", "replace") == one.token
    streamed = [c.choices[0].logprobs.content for c in client.chat.completions.create(**chat, stream=True)]
    assert [one.logprob for part in streamed for one in part] == pytest.approx([one.logprob for one in content])


def test_offsets_of_tokens_lie_in_the_text(client):
    """A token that is a part of a character has that character's offset."""
    asked = {"model": MODEL, "prompt": "a\u00e9\N{GRINNING FACE}b", "max_tokens": 1, "echo": True, "logprobs": 0}
    told = client.completions.create(**asked, **GREEDY).choices[0].logprobs
    assert told.text_offset[:8] == [0, 1, 1, 2, 2, 2, 2, 3] and told.text_offset[8] == 4


def test_a_request_without_speculation_has_the_same_text_and_no_drafts(llm, client):
    asked = {"model": MODEL, "prompt": "abcabc", "max_tokens": 30, **GREEDY}
    drafted = client.completions.create(**asked, extra_body={"return_acceptance": True})
    plain = client.completions.create(**asked, extra_body={"return_acceptance": True, "speculative": False})
    assert drafted.choices[0].text == plain.choices[0].text
    [told], [none] = drafted.selfspec["acceptance"], plain.selfspec["acceptance"]
    assert told["num_draft_tokens"] > 0 and told["num_generated_tokens"] == 30
    assert none["num_draft_tokens"] == 0 and none["num_plain_steps"] == 30
    last = list(client.completions.create(**asked, stream=True, extra_body={"return_acceptance": True}))[-1]
    assert last.selfspec["acceptance"][0]["num_generated_tokens"] == 30
    assert not hasattr(client.completions.create(**asked), "selfspec")


def test_errors_are_openais(served, client):
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="audio is not supported") as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, audio={"voice": "alloy", "format": "wav"})
    assert caught.value.param == "audio" and caught.value.type == "invalid_request_error"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_64_streams_at_once_are_each_what_the_library_generates(llm, served):
    prompts = [f"{PROMPTS[i % 4]} {i}" for i in range(64)]
    ways = [{"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 10 + i % 20} for i in range(64)]
    wanted = [output.outputs[0].text for output in llm.generate(prompts, [SamplingParams(**way) for way in ways])]

    async def streamed(client, prompt, way):
        text = ""
        async for chunk in await client.completions.create(model=MODEL, prompt=prompt, stream=True, **way):
            text += chunk.choices[0].text
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE) as client:
            return await asyncio.gather(*map(streamed, [client] * 64, prompts, ways))

    assert asyncio.run(all_of_them()) == wanted
