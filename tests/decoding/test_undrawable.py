"""Where no token can be sampled, its row ends with a clear error, as `generate` ends; nothing is drawn from nothing."""

from __future__ import annotations

import pytest
import torch

from selfspec.control.plan import LOOKUP
from selfspec.decoding.engine import Engine
from selfspec.drafting.prompt_lookup import Guess
from selfspec.drafting.row_lookup import RowLookup
from selfspec.hf import SelfSpeculative
from tests.helpers import Always, make_prompts
from tests.models import tiny

NEW, AT = 10, 12  # a prompt of 9 tokens: its 4th new one cannot be drawn
SENTENCE = r"^no token can be sampled at position 12, where all logits are -inf or one of them is no number; let "


def emptied(value, at=AT):
    """Leaves no token after a prefix of `at` tokens or more."""

    def process(ids, scores):
        return torch.full_like(scores, value) if ids.shape[1] >= at else scores

    return process


def engine_of(policy):
    return Engine(tiny("llama"), policy=policy, max_batch_size=4, max_cached_tokens=512)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
@pytest.mark.parametrize("policy", ["plain", Always(3, 5), Always(0, 5)], ids=["plain", "exit", "lookup"])
def test_a_row_without_a_token_to_sample_is_cancelled_and_no_other_suffers(policy, value):
    prompts = make_prompts([9, 7])
    options = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 3}
    [wanted] = tiny("llama").generate([prompts[1]], **options)
    engine, done = engine_of(policy), {}
    engine.submit(prompts[0], logits_processor=[emptied(value)], **options)
    engine.submit(prompts[1], **options)
    with pytest.raises(ValueError, match=SENTENCE):
        while True:
            done |= ended(engine.step())
    while engine.has_work:
        done |= ended(engine.step())
    assert done[1].tokens == wanted.tokens
    assert done[0].finish_reason == "cancelled" and len(done[0].tokens) == AT - 9
    assert engine.cache.num_free_pages == engine.cache.num_pages


def ended(rounds):
    return {row.request_id: row.completion for one in rounds for row in one.rows if row.completion is not None}


@pytest.mark.parametrize("policy", ["plain", Always(3, 5)], ids=["plain", "exit"])
def test_positions_that_are_drafted_beyond_the_end_raise_nothing(policy):
    [prompt], options = make_prompts([9]), {"max_new_tokens": AT - 9, "temperature": 0.8}
    [wanted] = tiny("llama").generate([prompt], **options)
    engine, done = engine_of(policy), {}
    engine.submit(prompt, logits_processor=[emptied(float("-inf"))], **options)
    while engine.has_work:
        done |= ended(engine.step())
    assert done[0].tokens == wanted.tokens


def test_a_row_that_ends_before_raises_nothing(monkeypatch):
    """Its end lies in the same block as the position where nothing is left."""
    [prompt], options = make_prompts([9]), {"temperature": 0.8, "seed": 3}
    [wanted] = tiny("llama").generate([prompt], max_new_tokens=AT - 9, **options)
    text = [*prompt, *wanted.tokens, 5, 5]
    monkeypatch.setattr(RowLookup, "match", 1)
    monkeypatch.setattr(RowLookup, "guess", lambda self, n: Guess(text[len(self._content) :][:n], 1))
    engine, done, content = engine_of(Always(LOOKUP, 5)), {}, []
    stop = [lambda ids, scores: content.append(ids.shape[1]) or ids.shape[1] == AT]
    engine.submit(prompt, logits_processor=[emptied(float("-inf"))], stopping_criteria=stop, **options)
    while engine.has_work:
        done |= ended(engine.step())
    assert done[0].tokens == wanted.tokens and done[0].finish_reason == "stop"
    assert done[0].stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_generate_and_the_loop_in_its_place_do_the_same(value):
    model, ids = tiny("llama").model, torch.tensor(make_prompts([9]))
    asked = {"max_new_tokens": NEW, "eos_token_id": None, "logits_processor": [emptied(value)]}
    loop = SelfSpeculative(2, 3)
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(ids, do_sample=True, top_k=0, **asked)
    with pytest.raises(ValueError, match=SENTENCE):
        model.generate(ids, do_sample=True, top_k=0, custom_generate=loop, **asked)
    greedy = model.generate(ids, do_sample=False, **asked)  # which takes the first token then
    assert model.generate(ids, do_sample=False, custom_generate=loop, **asked).tolist() == greedy.tolist()
