"""Drafts by early exit over free guesses: one early pass checks several guessed tokens instead of writing one.

A draft that goes as the guesses went is as long after one pass as it would be after several. What the exit itself would
have written is all that is drafted, token for token; the guesses decide how many passes that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec.drafting.exit import Branch, Draft, DraftRow
from selfspec.target.cache import PackedRows, PagedCache, Span, Tree
from selfspec.target.stack import Stack, Taps

# (hidden states [1 + guesses, hidden_size], guesses, tokens drafted so far) -> (what is drafted, whether to go on)
BlockChooser = Callable[[Tensor, Sequence[int], int], tuple[list[int], bool]]


def guesses_at(guess: Sequence[int], drafted: Sequence[int], most: int, length: int) -> list[int]:
    """What to feed after a row's last drafted token: what the guess goes on with, as long as the draft went with it.

    Args:
        most: guesses of a pass.
        length: tokens to be drafted; the last of them is the exit's own.
    """
    at = len(drafted)
    return list(guess[at : min(at + most, length - 1)]) if list(guess[:at]) == list(drafted) else []


def draft_by_cascade(
    stack: Stack,
    cache: PagedCache,
    row: DraftRow,
    token: int,  # the row's last
    exit_layer: int,
    choose: BlockChooser,
    guess: Sequence[int],
    most: int,
    tapped: Sequence[int] = (),
    branches: Callable[[int, int], Sequence[Branch]] | None = None,
) -> Draft:
    """Draft one row's tokens as `draft_by_exit` does, in fewer passes.

    Args:
        most: guesses fed with each token.
    """
    inner = [layer for layer in tapped if layer < exit_layer]
    fed, drafted, length, widths = [token], list[int](), row.length, list[int]()
    hidden, taps, tree = list[Tensor](), list[Tensor](), None
    while True:
        at = len(drafted)
        is_last = at == length
        some = [] if is_last else guesses_at(guess, drafted, most, length)
        span = Span(row.pages, row.position + at, 1 + len(some))
        beside = branches(0, at) if is_last and branches is not None else ()
        if beside:
            tree = Tree((-1, *range(at), *(branch.parent for branch in beside)))
            some = [branch.token for branch in beside]
            span = span._replace(length=1 + len(some), tree=tree)
        seen: Taps | None = dict.fromkeys(inner) if inner else None
        tokens = torch.tensor([fed[-1], *some], device=stack.device)
        out = stack.run(PackedRows(cache, [span], stack.device), 0, exit_layer, tokens, seen)
        picks, goes_on = ([], False) if is_last else choose(out, some, at)
        count = len(tokens) if is_last else len(picks)
        hidden.append(out[:count])
        if seen:
            taps.append(torch.stack([h[:count] for h in seen.values() if h is not None]))
        if is_last:
            fed += some
            break
        widths.append(len(tokens))
        drafted += picks
        fed += picks
        length = length if goes_on else len(drafted)
    together = torch.cat(taps, 1) if taps else None
    packed = torch.tensor(fed, device=stack.device)
    draft = Draft(packed, torch.cat(hidden), [len(fed) - 1], together, widths=tuple(widths))
    return draft if tree is None else draft._replace(trees=[tree], chains=[len(drafted)])
