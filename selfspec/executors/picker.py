"""`Picker`: who picks for the rows of a stack. Drafts, verification and plain decoding all ask the same one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.executors.pick import Sampling, Subset, among, pick, pick_surely, scored, second_choices, surely
from selfspec.kernels.compiled_pick import Picks, compiled_pick, sampling_bytes
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.model.stack import Stack

_log = logging.getLogger("selfspec")


class Picker:
    """Picks in one compiled call where the stack's engine is compiled, else by torch or the device's fused kernel.

    Which of them is settled when it is made: both pick the same but for rounding, which must not differ between those
    that are compared.
    """

    def __init__(self, stack: Stack) -> None:
        self.is_compiled = stack.engine == "compiled" and _agrees()
        self._noise = NoiseAhead()

    def __call__(
        self,
        logits: Tensor,
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        subset: Subset | None = None,
        with_sure: bool = False,
        with_seconds: bool = False,
    ) -> Picks:
        """Picks at N positions; see `executors.pick.scored` for the arguments, and `surely` for how sure they are."""
        if self.is_compiled:
            tokens = None if subset is None else subset.tokens
            return compiled_pick(logits, told_of(samplings), positions, tokens, with_sure, with_seconds)
        at = torch.tensor(positions)
        at = at.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else at.to(logits.device)
        if with_seconds:
            scores = scored(logits, samplings, at, self._noise, subset)
            best, sure = surely(scores)
            return Picks(among(best, subset), sure, among(second_choices(scores, best), subset))
        if with_sure:
            return Picks(*pick_surely(logits, samplings, at, self._noise, subset), None)
        return Picks(pick(logits, samplings, at, self._noise, subset), None, None)


def told_of(samplings: Sequence[Sampling]) -> bytes:
    """How rows pick, as compiled functions are told."""
    return b"".join([_told(sampling) for sampling in samplings])


@lru_cache(maxsize=64)
def _told(sampling: Sampling) -> bytes:
    return sampling_bytes(*sampling.filters, sampling.seed, *sampling.penalties)


@lru_cache(maxsize=1)
def _agrees() -> bool:
    """Whether the compiled pick is torch's here, asked once."""
    filters = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.5, 40, 0.9, 0.0), (0.7, 0, 0.8, 0.1)]
    samplings = [Sampling(*one, seed=seed) for one in filters for seed in (0, -7)]
    logits = 3 * torch.randn(len(samplings), 999, generator=torch.Generator().manual_seed(0))
    positions = [i << 30 for i in range(len(samplings))]
    scores = scored(logits, samplings, torch.tensor(positions))
    wanted, sure = surely(scores)
    how = told_of(samplings)
    picks, found, seconds = compiled_pick(logits, how, positions, with_sure=True, with_seconds=True)
    assert found is not None and seconds is not None
    same = torch.equal(picks, wanted) and torch.equal(seconds, second_choices(scores, wanted))
    same = same and torch.allclose(found, sure, atol=1e-4)
    if not same:
        _log.warning("the compiled pick is wrong on this machine, so torch's operations pick")
    return same
