"""A target that decodes from recordings on the processor: `tests.cuda.tape` in place of CUDA graphs."""

from __future__ import annotations

from functools import cached_property

from selfspec.executors.cuda.exact import exact_split
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.runner import Runner
from selfspec.kernels import reference
from selfspec.kernels.suite import REFERENCE
from tests.cuda.tape import Tape
from tests.target import Target

MOST_TOKENS = 128  # of a row in tests of exact mode


def attend(queries, keys, values, layout, *options, tile_rows=None, split=None):
    """The twin; if tiles and splits are fixed, over a constant number of keys: then its bits depend on no shape."""
    if tile_rows and split:
        layout = layout._replace(most_tokens=MOST_TOKENS)
    return reference.attend(queries, keys, values, layout, *options)


EXACT = REFERENCE._replace(attend=attend)


def runner_of(split, kernels=REFERENCE, tape=None, budget=1 << 40, max_rows=8):
    """A runner of a split on a tape."""
    tape = tape or Tape()
    return Runner(split, tape.kernels(kernels), tape, budget, max_rows)


class ShortBlocks(Target):
    """A target whose exact mode has blocks so small that short prompts are read by wide ones too."""

    @cached_property
    def exact_split(self):
        return exact_split(self.split, rows=8, wide=16, checked=(37, 21, 6))


def with_runner(target, budget=1 << 40, max_rows=8, num_bytes=None, kernels=REFERENCE, packing=None):
    """The same target, run from recordings by the reference kernels, or by others.

    `packing`: how fused layers, which the recordings then run, have their weights; None: they run the views.
    """
    if target.split.backend == "compiled":  # it reads rows where no recording has them: on the host
        target.split.compiled = None
    runner = target.split.runner = runner_of(target.split, kernels, Tape(num_bytes), budget, max_rows)
    target.split.recorded = None if packing is None else FusedBody(target.split.llama, runner.kernels, packing)
    return target
