"""Drafts by early exit: what is fed to the early layers, in which order it comes back, and when rows stop."""

from __future__ import annotations

import pytest
import torch

from selfspec.drafting.early_exit import DraftRow, draft_by_exit
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from tests.helpers import make_prompts
from tests.models import tiny

EXIT = 2


def prefilled(split, prompts):
    """A cache with all but each prompt's last token, one page per row."""
    cache = PagedCache(len(prompts), 64)
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor(prompt[:-1])
        split.run(PackedRows(cache, [Span([row], 0, len(tokens))]), 0, split.num_layers, tokens)
    return cache


@torch.inference_mode()
def drafted(split, prompts, lengths, stop_at=(), withdraw_at=()):
    """Greedy drafts; `stop_at`: (row, step) pairs after which a row stops; `withdraw_at`: those it then withdraws."""
    calls = []

    def choose(hidden, members, step):
        calls.append((members, step))
        going = [r for r in members if (r, step) not in stop_at]
        withdrawn = [r for r in members if (r, step) in withdraw_at]
        return split.logits(hidden, EXIT).argmax(-1), going, withdrawn

    rows = [DraftRow([i], len(prompt) - 1, n) for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]
    last = torch.tensor([prompt[-1] for prompt in prompts])
    return draft_by_exit(split, prefilled(split, prompts), rows, last, EXIT, choose), calls


@torch.inference_mode()
def one_by_one(split, prompt, count):
    """The same draft by running the early layers over the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        packed = PackedRows(PagedCache(1, 64), [Span([0], 0, len(text))])
        hidden = split.run(packed, 0, EXIT, torch.tensor(text))
        text.append(int(split.logits(hidden[-1:], EXIT).argmax()))
    packed = PackedRows(PagedCache(1, 64), [Span([0], 0, len(text))])
    return text[len(prompt) - 1 :], split.run(packed, 0, EXIT, torch.tensor(text))[len(prompt) - 1 :]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("lengths", [(3,), (0,), (2, 5, 0, 3), (4, 4), (0, 0), (0, 1)])
def test_a_draft_is_the_early_layers_own_greedy_text_with_its_hidden_states(family, lengths):
    split = tiny(family).split
    prompts = make_prompts([7, 3, 12, 2][: len(lengths)])
    draft, _ = drafted(split, prompts, lengths)
    expected = [one_by_one(split, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    assert draft.lengths == list(lengths)
    assert draft.tokens.tolist() == [token for tokens, _ in expected for token in tokens]
    torch.testing.assert_close(draft.hidden, torch.cat([hidden for _, hidden in expected]), rtol=1e-3, atol=1e-4)


def test_rows_leave_as_their_lengths_end_and_no_row_is_asked_after_its_last_token():
    _, calls = drafted(tiny("llama").split, make_prompts([7, 3, 12]), (1, 3, 0))
    assert calls == [([0, 1], 0), ([1], 1), ([1], 2)]


def test_a_row_that_stops_keeps_the_token_it_has_just_drafted():
    prompts = make_prompts([7, 3, 12])
    stopped, calls = drafted(tiny("llama").split, prompts, (4, 4, 4), stop_at={(1, 0), (0, 2)})
    whole, _ = drafted(tiny("llama").split, prompts, (3, 1, 4))
    assert calls == [([0, 1, 2], 0), ([0, 2], 1), ([0, 2], 2), ([2], 3)]
    assert stopped.lengths == [3, 1, 4]
    assert torch.equal(stopped.tokens, whole.tokens)


def test_a_row_that_withdraws_its_last_token_drafts_one_token_less():
    prompts, unsure = make_prompts([7, 3, 12]), {(0, 2), (1, 0), (2, 3)}
    withdrawn, calls = drafted(tiny("llama").split, prompts, (4, 4, 4), unsure, unsure)
    whole, _ = drafted(tiny("llama").split, prompts, (2, 0, 3))
    assert calls == [([0, 1, 2], 0), ([0, 2], 1), ([0, 2], 2), ([2], 3)]
    assert withdrawn.lengths == [2, 0, 3] and torch.equal(withdrawn.tokens, whole.tokens)
    torch.testing.assert_close(withdrawn.hidden, whole.hidden)
