"""Drafts whose tokens were written in one call.

What is left of those by early exit is to feed the last ones, all rows together.

Row by row, the draft is what `drafting.exit.draft_by_exit` writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.drafting.exit import Brancher, Draft, DraftRow
from selfspec.target.cache import PackedRows, PagedCache, Span, Tree, tensor_of
from selfspec.target.compiled_draft import Written, joined
from selfspec.target.stack import Stack, Taps


def draft_at_once(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[DraftRow],
    last: Sequence[int],
    exit_layer: int,
    written: Written,
    tapped: Sequence[int] = (),
    branches: Brancher | None = None,
) -> Draft:
    """The draft of rows that end with the tokens `last` and go on with what was written.

    Args:
        tapped: layers below the exit to look in at, those that `written` has.
        branches: what is drafted beside it.
    """
    lengths = [len(tokens) for tokens in written.tokens]
    fed, spans, trees = list[list[int]](), list[Span](), list[Tree | None]()
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        more = () if branches is None else branches(i, length)
        trees.append(Tree((-1, *range(length), *(branch.parent for branch in more))) if more else None)
        spans.append(Span(row.pages, row.position + length, 1 + len(more), trees[-1]))
        fed.append([[last[i], *written.tokens[i]][-1], *(branch.token for branch in more)])
    taps: Taps | None = dict.fromkeys(tapped) if tapped else None
    tokens = torch.tensor([token for each in fed for token in each])
    hidden = stack.run(PackedRows(cache, spans), 0, exit_layer, tokens, taps)
    widths = [len(each) for each in fed]
    seen = [h for h in (taps or {}).values() if h is not None]
    parts = [joined(one, lengths, h, widths) for one, h in zip(written.taps, seen, strict=True)]
    whole = [[first, *own, *each[1:]] for first, own, each in zip(last, written.tokens, fed, strict=True)]
    return Draft(
        torch.tensor([token for each in whole for token in each]),
        joined(written.hidden, lengths, hidden, widths),
        [length + width - 1 for length, width in zip(lengths, widths, strict=True)],
        torch.stack(parts) if parts else None,
        trees if any(trees) else None,
        lengths if any(trees) else None,
    )


def draft_unread(last: Sequence[int], written: Written, branches: Brancher | None = None) -> Draft:
    """The draft of rows that end with the tokens `last` and go on with what copies of the layers wrote.

    The layers themselves have read none of it.
    """
    lengths, nodes, trees = [len(tokens) for tokens in written.tokens], list[int](), list[Tree | None]()
    for i, (first, length) in enumerate(zip(last, lengths, strict=True)):
        more = () if branches is None else branches(i, length)
        trees.append(Tree((-1, *range(length), *(branch.parent for branch in more))) if more else None)
        nodes += [first, *written.tokens[i], *(branch.token for branch in more)]
    tokens = tensor_of(nodes, torch.device("cpu"))
    sizes = [n if tree is None else len(tree.parents) - 1 for n, tree in zip(lengths, trees, strict=True)]
    has_trees = any(trees)
    return Draft(tokens, tokens, sizes, trees=trees if has_trees else None, chains=lengths if has_trees else None)
