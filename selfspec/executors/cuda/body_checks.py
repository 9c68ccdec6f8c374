"""Checks of fused layers on the device itself: against the model's own modules, and of a row's bits among others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.kernels.layout import SPLIT, padded
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span

# One rounding to the dtype, relative to a number. Float32 has room for products that are summed in another order.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MAX_ROUNDINGS = 4.0  # products summed in another order differ by up to about 1.5
PAGE = 16
CALLS = (  # two ragged rows, then what follows them
    (Span([2, 0], 0, 7), Span([1, 3], 0, 14)),
    (Span([2, 0], 7, 1), Span([1, 3], 14, 5)),
)
PAGES = range(SPLIT // PAGE + 1)
LATE = (Span(PAGES, SPLIT - 2, 5),)  # after random keys and values; attention combines splits
PLACES = 24  # more than the calls have tokens
COMPARED = (1, 2, 5, 16, 17, 33)  # rows of calls whose bits are compared with those of 64
NUM_NEW = 5  # tokens of a row in one call, compared with as many calls


@torch.inference_mode()
def layers_error(split: Any, body: FusedBody) -> float:
    """How far the hidden states of fused layers are from the views', in roundings; `MAX_ROUNDINGS` are allowed.

    Ragged rows, padding, rows that go on, and one of more than a split of attention. Each layer starts from the views'
    hidden states, scaled down to about the norm of what the layer adds: the rounding of a larger hidden state would
    hide it. Of a difference, one rounding of the hidden state itself is left out; the rest is relative, in norm, to
    what the layer adds.
    """
    caches = [PagedCache(len(PAGES), PAGE) for _ in range(3)]
    vocab, rng = split.vocab_size, torch.Generator().manual_seed(0)
    errors = []
    for spans in (*CALLS, LATE):
        for cache in caches if spans is LATE else ():
            fill_randomly(cache)
        count = sum(span.length for span in spans)
        tokens = torch.randint(0, vocab, (count,), generator=rng).to(split.device)
        given = torch.cat([tokens, tokens.new_zeros(PLACES - count)])
        layout = padded(layout_of(PackedRows(caches[0], spans, split.device)), PLACES)
        whole, views, fused = (StaticRows(cache, layout, body.kernels) for cache in caches)
        states: dict[int, Tensor | None] = dict.fromkeys(range(1, split.num_layers + 1))
        split.run_views(whole, 0, split.num_layers, given, states)
        for depth in range(split.num_layers):
            if depth:
                before, hidden = states[depth], states[depth + 1]
                assert before is not None and hidden is not None
                added = (hidden - before)[:count].float().norm() / before[:count].float().norm()
                given = before * added.clamp(max=1).to(before.dtype)
            wanted, last = _one_layer(split.run_views, views, depth, given, count)
            got, done = _one_layer(body.run, fused, depth, given, count)
            errors.append(_excess(got, wanted, wanted - given[:count] if depth else wanted))
        errors.append(_excess(done, last, last))
    return float(torch.stack(errors).max()) / ROUNDING[split.dtype]


def _one_layer(run: Any, rows: StaticRows, depth: int, given: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The hidden states of the first `count` tokens after a layer, and what `run` returns, the last layer's normed."""
    taps: dict[int, Tensor | None] = {depth + 1: None}
    done = run(rows, depth, depth + 1, given, taps)[:count]
    hidden = taps[depth + 1]
    return (done if hidden is None else hidden[:count]), done


def _excess(got: Tensor, wanted: Tensor, change: Tensor) -> Tensor:
    """The norm of the differences beyond one rounding of each number, relative to the norm of `change`."""
    rounding = ROUNDING[got.dtype]
    got, wanted, change = got.float(), wanted.float(), change.float()
    beyond = (got - wanted).abs() - rounding * wanted.abs()
    return beyond.clamp(min=0).norm() / change.norm()


@torch.inference_mode()
def differing_rows(split: Any, body: FusedBody) -> str:
    """Which calls give a row other bits than a call of 64 rows, or several tokens others than one by one; "": none.

    Rows hold about `SPLIT` tokens, so that some calls have one split of attention and others combine two. They share
    the pages of all but the last tokens.
    """
    page, begin = 8, SPLIT - NUM_NEW // 2  # the tokens that are fed; those before are random
    shared, own = range(begin // page), -(-(begin % page + NUM_NEW) // page)
    cache = PagedCache(len(shared) + SKINNY_ROWS * own, page)
    shape, rng = (SKINNY_ROWS, NUM_NEW), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, split.vocab_size, shape, generator=rng).to(split.device)

    def run(rows: int, at: int, count: int = 1) -> Tensor:
        pages = [range(first, first + own) for first in range(len(shared), cache.num_pages, own)]
        spans = [Span([*shared, *pages[row]], begin + at, count) for row in range(rows)]
        static = StaticRows(cache, layout_of(PackedRows(cache, spans, split.device)), body.kernels)
        return body.run(static, 0, split.num_layers, tokens[:rows, at : at + count].flatten())

    run(1, 0)  # allocates the pages
    fill_randomly(cache)
    for at in range(NUM_NEW):
        whole = run(SKINNY_ROWS, at)
        for rows in COMPARED if at in (0, NUM_NEW - 1) else ():
            if not torch.equal(run(rows, at), whole[:rows]):
                return f"a row has other bits among {rows} rows than among {SKINNY_ROWS}"
    rows = SKINNY_ROWS // NUM_NEW
    alone = [run(rows, at) for at in range(NUM_NEW)]
    fill_randomly(cache)  # the same numbers, without the keys and values of the tokens
    if not torch.equal(torch.stack(alone, 1).flatten(0, 1), run(rows, 0, NUM_NEW)):
        return f"{NUM_NEW} tokens of a row have other bits than one by one"
    return ""


def fill_randomly(cache: PagedCache) -> None:
    """Fill the storage of every layer that has written with random keys and values, the same ones every time."""
    for pair in cache.storages:
        for one in pair:
            one.normal_(generator=torch.Generator(one.device).manual_seed(0))
