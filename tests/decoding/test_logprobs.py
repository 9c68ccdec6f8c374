"""Log-probabilities of emitted tokens are those of a plain forward, whatever the plan and the executor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.decoding.engine import Engine
from selfspec.executors.logprobs import TokenLogprobs, token_logprobs
from tests.helpers import Adversary, Always, Schedule, decode, make_prompts
from tests.models import build, tiny
from tests.target import Target

RAGGED = (12, 1, 20)
WAYS = {"temperature": [0.0, 0.9, 1.3], "top_k": [0, 9, 0], "seed": [0, 1, 2], "repetition_penalty": [1.4, 1.0, 1.2]}


def check_told(model, prompt, done, num_likely):
    """Against one plain forward, from which ranks and likeliest tokens are read by sorting."""
    content = [*prompt, *done.tokens]
    with torch.inference_mode():
        wanted = model(torch.tensor([content])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert [one.token for one in done.logprobs] == done.tokens
    for one, line in zip(done.logprobs, wanted, strict=True):
        order = line.sort(descending=True, stable=True).indices.tolist()
        assert one.logprob == pytest.approx(float(line[one.token]), abs=1e-4)
        assert one.rank == 1 + order.index(one.token)
        assert [token for token, _ in one.top] == order[:num_likely]
        assert [logprob for _, logprob in one.top] == pytest.approx(line[order[:num_likely]].tolist(), abs=1e-4)


@pytest.mark.parametrize("engine", ["compiled", "views"])
@pytest.mark.parametrize("num_likely", [0, 1, 5, 20])
def test_they_are_those_of_a_plain_forward(engine, num_likely):
    target, prompts = tiny("llama", engine=engine), make_prompts(RAGGED, seed=1)
    for policy in ("plain", Schedule(0, 4), Adversary(1, 4), Always(2, 4, num_rounds=9)):
        for prompt, done in zip(
            prompts, decode(target, prompts, policy, max_new_tokens=16, logprobs=num_likely, **WAYS), strict=True
        ):
            check_told(target.model, prompt, done, num_likely)


def test_only_rows_that_ask_are_told_and_each_as_much_as_it_asks_for():
    prompts, asked = make_prompts(RAGGED, seed=1), [None, 3, 0]
    for engine in ("compiled", "views"):
        done = decode(
            tiny("llama", engine=engine), prompts, Always(2, 4, num_rounds=5), logprobs=asked, max_new_tokens=9
        )
        assert done[0].logprobs is None
        assert [[len(one.top) for one in c.logprobs] for c in done[1:]] == [[3] * 9, [0] * 9]


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_rounds_hand_out_those_of_their_tokens_and_no_more(engine):
    made = Engine(tiny("llama", engine=engine), policy=Always(3, 4, num_rounds=3), max_cached_tokens=512)
    made.submit(make_prompts([9], seed=1)[0], max_new_tokens=17, logprobs=2)
    rows = [row for round_ in made.run() for row in round_.rows]
    for row in rows:
        assert [one.token for one in row.logprobs] == row.tokens
    [done] = [row.completion for row in rows if row.completion is not None]
    assert [one for row in rows for one in row.logprobs] == done.logprobs and len(done.logprobs) == 17


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_of_equal_logits_the_lowest_token_comes_first(engine, threads):
    model = build("llama", vocab_size=9000)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[:90].repeat(100, 1))  # each logit stands there a hundred times
    target, [prompt], before = Target(model, engine=engine), make_prompts([9], seed=1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"temperature": 5.0, "logprobs": 20, "ignore_eos": True}
        [done] = decode(target, [prompt], Always(2, 6, num_rounds=9), max_new_tokens=12, **options)
    finally:
        torch.set_num_threads(before)
    for one in done.logprobs:
        tokens = [token for token, _ in one.top]
        assert tokens == [tokens[0] + 90 * i for i in range(20)] and tokens[0] < 90
        assert one.rank % 100 == (1 + one.token // 90) % 100
    assert max(one.rank for one in done.logprobs) > 100


@given(vocab=st.integers(1, 40), levels=st.integers(1, 9), wanted=st.integers(0, 20), seed=st.integers(0, 999))
def test_ties_are_told_as_a_stable_sort_tells_them(vocab, levels, wanted, seed):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, vocab), generator=source).float()
    logits[0, : vocab // 2] = float("-inf")
    tokens = torch.randint(vocab // 2, vocab, (3,), generator=source).tolist()
    for i, one in enumerate(token_logprobs(logits, tokens, wanted)):
        order = logits[i].sort(descending=True, stable=True).indices.tolist()
        assert (one.token, one.rank) == (tokens[i], 1 + order.index(tokens[i]))
        assert [token for token, _ in one.top] == order[:wanted]


def test_a_vocabulary_smaller_than_what_is_asked_for_is_told_whole():
    for engine in ("compiled", "views"):
        target = Target(build("llama", vocab_size=7), engine=engine)
        [done] = target.generate([[3, 1]], policy="plain", max_new_tokens=4, logprobs=20, ignore_eos=True)
        assert all(sorted(token for token, _ in one.top) == [*range(7)] for one in done.logprobs)
        assert isinstance(done.logprobs[0], TokenLogprobs)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (21, "logprobs must be at most 20 likeliest tokens, got 21"),
        (-1, "logprobs must be a whole number of at least 0, got -1"),
        (1.5, "logprobs must be a whole number of at least 0, got 1.5"),
    ],
)
def test_numbers_that_cannot_be_asked_for_are_refused(value, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny("llama").generate([[3]], logprobs=value)


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_those_of_a_prompt_are_a_plain_forwards_however_it_is_read(engine):
    """In chunks, beside rows that do not ask, and after a row whose prefix the cache still holds."""
    target, prompts = tiny("llama", engine=engine), make_prompts([40, 1, 23, 40], seed=1)
    prompts[3] = prompts[0][:30] + prompts[2][:10]
    asked = [2, 0, None, 5]
    made = Engine(target, policy=Adversary(1, 4), prefill_chunk=7, prefix_cache=True, max_batch_size=2)
    for prompt, wanted in zip(prompts, asked, strict=True):
        made.submit(prompt, max_new_tokens=3, prompt_logprobs=wanted)
    done = {row.completion.request_id: row.completion for r in made.run() for row in r.rows if row.completion}
    assert done[2].prompt_logprobs is None and done[1].prompt_logprobs == []
    for i in (0, 3):
        with torch.inference_mode():
            lines = target.model(torch.tensor([prompts[i]])).logits[0, :-1].float().log_softmax(-1)
        assert [one.token for one in done[i].prompt_logprobs] == prompts[i][1:]
        for one, line in zip(done[i].prompt_logprobs, lines, strict=True):
            order = line.sort(descending=True, stable=True).indices.tolist()
            assert one.logprob == pytest.approx(float(line[one.token]), abs=1e-4)
            assert one.rank == 1 + order.index(one.token) and [token for token, _ in one.top] == order[: asked[i]]


def test_more_positions_than_are_scored_at_once_are_all_scored():
    target = Target(build("llama", max_position_embeddings=512))
    [prompt] = make_prompts([300], seed=2)
    made = Engine(target, policy="plain", max_batch_size=1)
    made.submit(prompt, max_new_tokens=1, prompt_logprobs=0)
    [done] = [row.completion for round_ in made.run() for row in round_.rows if row.completion]
    with torch.inference_mode():
        lines = target.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    wanted = lines.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert [one.logprob for one in done.prompt_logprobs] == pytest.approx(wanted, abs=1e-4)
