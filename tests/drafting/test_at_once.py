"""Drafts that are written in one compiled call are those that are picked token by token, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.api import Target
from selfspec.control.laps import Seconds
from selfspec.control.plan import NUM_BINS, Plan, SecondChoices, ShadowPlan, SurvivalStop
from selfspec.decoding import rounds
from selfspec.decoding.choose import Chooser
from selfspec.decoding.pick import Sampling
from selfspec.decoding.picker import Picker
from selfspec.decoding.request import Request
from selfspec.decoding.row import Row
from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.exit_heads import ExitHeads
from tests.helpers import Always, decode, make_prompts
from tests.models import build

WAYS = [Sampling(), Sampling(0.8, seed=3), Sampling(1.2, top_k=9, seed=4), Sampling(1.0, top_p=0.8, seed=5)]
a_stop = st.builds(
    SurvivalStop, st.lists(st.floats(0.3, 1), min_size=NUM_BINS, max_size=NUM_BINS).map(tuple), st.floats(0, 1)
)
a_rule = st.builds(
    SecondChoices,
    *(st.lists(st.floats(0, 1), min_size=NUM_BINS, max_size=NUM_BINS).map(tuple) for _ in range(2)),
    st.sampled_from([-1.0, 0.05]),
    st.integers(0, 4),
)


class Endless:
    """Stands for the stopper of a row that has room for any draft."""

    max_new_tokens = 1 << 20


@cache
def target():
    return Target(build("llama"), engine="compiled")


def rows_in(cache, prompts, samplings):
    """Rows whose prompts are in the cache but for their last token."""
    stack, rows = target().stack, []
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        pages = cache.reserve(len(prompt) + 20)
        if len(prompt) > 1:
            packed = PackedRows(cache, [Span(pages, 0, len(prompt) - 1)])
            stack.run(packed, 0, stack.num_layers, torch.tensor(prompt[:-1]))
        rows.append(Row(i, Request(prompt, 40, sampling), Endless, pages, list(prompt)))
    return rows


@torch.inference_mode()
def drafted(prompts, samplings, plan):
    """The draft, with the confidences of its tokens and what was drafted beside them; and the seconds it took."""
    stack, seconds = target().stack, Seconds()
    cache = PagedCache(64, 8)
    rows = rows_in(cache, prompts, samplings)
    tapped = plan.shadow.layers if plan.shadow else ()
    draft, chooser = rounds._draft(stack, cache, rows, plan, seconds, Picker(stack), tapped)
    return draft, chooser.confidences, seconds


def check(monkeypatch, prompts, samplings, plan):
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "__call__", lambda *given: asked.append(given))
        got, sure, seconds = drafted(prompts, samplings, plan)
    assert not asked, "tokens were picked one by one"
    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "at_once", lambda *given: None)
        wanted, as_sure, _ = drafted(prompts, samplings, plan)
    for name in ("lengths", "trees", "chains"):
        assert getattr(got, name) == getattr(wanted, name)
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.hidden, wanted.hidden)
    assert sure == as_sure
    assert (got.taps is None) == (wanted.taps is None)
    assert got.taps is None or torch.equal(got.taps, wanted.taps)
    return got, seconds


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    data=st.data(),
    exit_layer=st.integers(1, 3),
    stop=st.none() | a_stop,
    rule=st.none() | a_rule,
    min_confidence=st.sampled_from([0.0, 0.2, 0.9]),
    draft_vocab=st.sampled_from([None, 30]),
    shadow=st.sampled_from([None, (1, 2), (2,)]),
)
def test_one_call_drafts_what_many_do(lengths, data, exit_layer, stop, rule, min_confidence, draft_vocab, shadow):
    count = len(lengths)
    drafts = data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count).filter(any))
    samplings = data.draw(st.lists(st.sampled_from(WAYS), min_size=count, max_size=count))
    layers = tuple(layer for layer in shadow or () if layer < exit_layer)
    plan = Plan(exit_layer, tuple(drafts), min_confidence, stop, second_choices=rule, draft_vocab=draft_vocab)
    if layers:
        plan = replace(plan, shadow=ShadowPlan(layers, (0,), 8))
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(monkeypatch, make_prompts(lengths), samplings, plan)


def test_what_a_step_took_is_told_by_stage(monkeypatch):
    _, seconds = check(monkeypatch, make_prompts([9]), WAYS[1:2], Plan(2, (6,)))
    assert min(seconds.draft, seconds.head, seconds.pick) > 0


def test_time_goes_to_the_stages_it_is_told_of_and_the_rest_to_the_first():
    seconds = Seconds()
    clock = iter([seconds._last + 1.0])
    before = seconds._last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.control.laps.perf_counter", lambda: next(clock))
        seconds.laps([("draft", 0.25), ("head", 0.125), ("pick", 0.0625)])
    assert (seconds.draft, seconds.head, seconds.pick) == (pytest.approx(0.8125), 0.125, 0.0625)
    assert seconds._last == before + 1.0


@pytest.mark.parametrize("layers", [(2,), (1, 3)])
def test_exit_heads_are_asked_where_the_exit_has_one(layers):
    heads = ExitHeads(layers, 32, 4)
    for one in heads.heads.values():
        torch.nn.init.normal_(one.up, std=0.3)
    spoilt, prompts = Target(build("llama"), engine="compiled", exit_heads=heads), make_prompts((12, 7))
    plain = decode(spoilt, prompts, "plain", max_new_tokens=12)
    assert [c.tokens for c in decode(spoilt, prompts, Always(2, 4), max_new_tokens=12)] == [c.tokens for c in plain]
    assert (spoilt.stack.packed_head(2) is None) == (2 in layers)
