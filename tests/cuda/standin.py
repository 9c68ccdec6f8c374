"""A target that decodes from recordings on the processor: `tests.cuda.tape` in place of CUDA graphs."""

from __future__ import annotations

from functools import cached_property

import torch

from selfspec.executors.cuda.exact import exact_split
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.runner import Runner
from selfspec.executors.cuda.skinny_body import SkinnyBody
from selfspec.kernels import reference
from selfspec.kernels.checks import check_rotate_attend
from selfspec.kernels.suite import REFERENCE
from tests.cuda.tape import Tape
from tests.target import Target

MOST_TOKENS = 128  # of a row in tests of exact mode
MOST_KEYS = 320  # of a row in the self-check of five launches


def attend(queries, keys, values, layout, *options, tile_rows=None, split=None):
    """The twin; if tiles and splits are fixed, over a constant number of keys: then its bits depend on no shape."""
    if tile_rows and split:
        layout = layout._replace(most_tokens=max(MOST_TOKENS, layout.most_tokens))
    return reference.attend(queries, keys, values, layout, *options)


def rotate_attend(qkv, keys, values, layout, rotation, scale, counters, window=None):
    """The twin over a constant number of keys and two tokens or more: torch's products of one may have other bits."""
    check_rotate_attend(qkv, keys, values, layout, rotation, counters)
    queries = reference.rotate(qkv, keys, values, layout, rotation)
    at = torch.arange(max(2, len(queries))) % len(queries)
    padded = layout._replace(most_tokens=MOST_KEYS, rows=layout.rows[at], positions=layout.positions[at])
    return reference.attend(queries[at], keys, values, padded, scale, window)[: len(queries)]


def by_row(kernel, num_given):
    """A twin whose bits for a row depend on no other row. `num_given`: its first arguments that have a line a row."""

    def run(*args):
        lines = zip(*(one.split(1) for one in args[:num_given]), strict=True)
        done = [kernel(*line, *args[num_given:]) for line in lines]
        return torch.cat(done) if isinstance(done[0], torch.Tensor) else tuple(map(torch.cat, zip(*done, strict=True)))

    return run


def product_add(x, weight, bias, hidden):
    return by_row(lambda x, hidden: reference.product_add(x, weight, bias, hidden), 2)(x, hidden)


EXACT = REFERENCE._replace(attend=attend)
INVARIANT = EXACT._replace(
    norm_product=by_row(reference.norm_product, 2), gate_product=by_row(reference.gate_product, 2),
    product_add=product_add, squares_of=by_row(reference.squares_of, 1), rotate_attend=rotate_attend,
)  # fmt: skip


def runner_of(split, kernels=REFERENCE, tape=None, budget=1 << 40, max_rows=8):
    """A runner of a split on a tape."""
    tape = tape or Tape()
    return Runner(split, tape.kernels(kernels), tape, budget, max_rows)


class ShortBlocks(Target):
    """A target whose exact mode has blocks so small that short prompts are read by wide ones too."""

    @cached_property
    def exact_split(self):
        return exact_split(self.split, rows=8, wide=16, checked=(37, 21, 6))


def with_runner(target, budget=1 << 40, max_rows=8, num_bytes=None, kernels=REFERENCE, packing=None, skinny_rows=0):
    """The same target, run from recordings by the reference kernels, or by others.

    `packing`: how fused layers, which the recordings then run, have their weights; None: they run the views.
    `skinny_rows`: the most tokens of a call whose fused layers take five launches.
    """
    if target.split.backend == "compiled":  # it reads rows where no recording has them: on the host
        target.split.compiled = None
    runner = target.split.runner = runner_of(target.split, kernels, Tape(num_bytes), budget, max_rows)
    body = None if packing is None else FusedBody(target.split.llama, runner.kernels, packing)
    target.split.recorded = SkinnyBody(body, skinny_rows) if skinny_rows else body
    return target
