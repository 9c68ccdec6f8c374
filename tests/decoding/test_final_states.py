"""Exit heads read the model's final state of the token before; a wrong one changes drafts and no token."""

from __future__ import annotations

import pytest
import torch

from selfspec.control.plan import SEED_POSITIONS, Plain
from selfspec.core import Request, Sequence, ShadowPicks
from selfspec.executors import final_states, prefill
from selfspec.executors.picker import Picker
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.params import SamplingParams
from tests.helpers import make_prompts, tokens_of
from tests.models import build, some_heads
from tests.target import Target

EXIT, NUM_NEW = 2, 24


def rounds_of(target, prompt, length, **params):
    """Per round: the number of tokens before it, and what it drafted; and all tokens."""
    found, tokens = [], list(prompt)

    def note(done):
        for row in done.rows:
            found.append((len(tokens), list(row.drafted[: row.num_drafted])))
            tokens.extend(row.token_ids)

    options = {"exit_layer": EXIT, "num_speculative_tokens": length, "on_round": note, **params}
    [done] = target.generate([prompt], max_tokens=NUM_NEW, **options)
    assert tokens == [*prompt, *done.token_ids]
    return found, tokens


@torch.inference_mode()
def expected(split, tokens, length, known):
    """What a row of these tokens drafts; `known`: the final state of the last but one, else zeros."""
    drafted, last = [], None
    for _ in range(length):
        row = [*tokens, *drafted]
        taps = {EXIT: None}
        finals = split.run(whole_text(split, row), 0, split.num_layers, torch.tensor(row), taps)
        if not drafted:
            last = finals[-2:-1] if known else torch.zeros_like(finals[-1:])
        changed = split.through_heads(taps[EXIT][None, -1:], (EXIT,), last)[0]
        drafted.append(int(split.head_logits(changed, True).argmax()))
        last = split.normed(changed)
    return drafted


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("backend", ["compiled", "views"])
def test_drafts_read_the_final_state_of_the_token_before_and_then_the_heads_own(backend, length):
    target = Target(build("llama"), exit_heads=some_heads((EXIT,), inner=64), backend=backend)
    found, tokens = rounds_of(target, make_prompts([9], seed=1)[0], length)
    same = [drafted == expected(target.split, tokens[:at], len(drafted), True) for at, drafted in found]
    blind = [drafted == expected(target.split, tokens[:at], len(drafted), False) for at, drafted in found]
    assert sum(same) >= len(same) - 1 and sum(blind) < sum(same) - 1, "a near-tie may be rounded"


@pytest.mark.parametrize("backend", ["compiled", "views"])
def test_a_wrong_state_changes_no_token(backend, monkeypatch):
    target = Target(build("llama"), exit_heads=some_heads((EXIT,), inner=64), backend=backend)
    prompts = make_prompts([9, 4, 12], seed=3)
    params = {"max_tokens": NUM_NEW, "temperature": 0.7}
    plain = target.generate(prompts, policy="plain", **params)
    monkeypatch.setattr(final_states, "own_state", lambda row, unknown: torch.randn_like(unknown) * 9)
    drafted = target.generate(prompts, exit_layer=EXIT, num_speculative_tokens=3, **params)
    assert tokens_of(drafted) == tokens_of(plain)


def test_a_state_of_another_token_counts_as_unknown():
    class Row:
        final_state, final_at, num_cached = torch.ones(4), 7, 8

    row, zeros = Row(), torch.zeros(4)
    assert final_states.own_state(row, zeros) is row.final_state
    row.num_cached = 9
    assert final_states.own_state(row, zeros) is zeros
    row.final_state, row.num_cached = None, 8
    assert final_states.own_state(row, zeros) is zeros


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_probes_of_a_prompt_read_the_state_of_every_token_before(chunk, monkeypatch):
    split, [prompt] = Target(build("llama"), exit_heads=some_heads((EXIT,), inner=64)).split, make_prompts([30], seed=5)
    cache, seen = split.new_cache(1, 64), []
    row = Sequence(0, Request(prompt), prompt, 40, pages=tuple(cache.reserve(40)))
    picks = ShadowPicks((EXIT,), None, None)
    monkeypatch.setattr(prefill, "shadow_picks", lambda *given, last, **more: (seen.append(last), picks)[1])

    class Seeded(Plain):
        def seed_layers(self, row):
            return (EXIT,)

    with torch.inference_mode():
        while not row.is_prefilled:
            prefill.prefill(split, cache, Picker(split), [row], chunk, Seeded())
        finals = split.run(whole_text(split, prompt), 0, split.num_layers, torch.tensor(prompt))
    torch.testing.assert_close(torch.cat(seen), finals[len(prompt) - 2 - SEED_POSITIONS : -2], rtol=1e-4, atol=1e-4)


def whole_text(split, tokens):
    cache = PagedCache(1, len(tokens), split.num_layers, rounds=split.rounds)
    return PackedRows(cache, [Span(cache.reserve(len(tokens)), 0, len(tokens))], split.device)


def test_without_exit_heads_no_state_is_kept():
    target = Target(build("llama"))
    engine = target.llm(policy="plain").engine()
    engine.add_request("a", make_prompts([5])[0], SamplingParams(max_tokens=4))
    rows = []
    while engine.has_unfinished_requests():
        engine.step()
        rows += engine.running
    assert rows and all(row.final_state is None for row in rows)
