"""`Picker`: who picks for the rows of a stack. Drafts, verification and plain decoding all ask the same one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.executors.pick import Sampling
from selfspec.kernels.compiled_pick import Picks, compiled_pick, sampling_bytes
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.kernels.pick import Subset, alternatives, best_of, sampling_tensors, scored, to_token_ids
from selfspec.kernels.suite import pick_for
from selfspec.model.kv_cache import tensor_of
from selfspec.model.stack import Stack

_log = logging.getLogger("selfspec")


class Picker:
    """Picks in one compiled call where the stack's engine is compiled, else by the device's fused kernel, or by torch.

    Which of them is decided when it is made: they pick the same but for rounding, which must not differ between picks
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
        with_confidence: bool = False,
        with_alternatives: bool = False,
    ) -> Picks:
        """Picks at N positions; see `kernels.pick.scored` for the arguments, and `best_of` for confidences."""
        tokens = None if subset is None else subset.tokens
        if self.is_compiled:
            return compiled_pick(
                logits, packed_samplings(samplings), positions, tokens, with_confidence, with_alternatives
            )
        at, fused = tensor_of(positions, logits.device), pick_for(logits.device)
        if fused is not None and not with_alternatives:
            return Picks(*fused(logits, sampling_tensors(samplings, at), tokens), None)
        scores = scored(logits, samplings, at, self._noise, subset)
        if not (with_confidence or with_alternatives):
            return Picks(to_token_ids(scores.argmax(-1), subset), None, None)
        best, confidences = best_of(scores)
        others = to_token_ids(alternatives(scores, best), subset) if with_alternatives else None
        return Picks(to_token_ids(best, subset), confidences, others)


def packed_samplings(samplings: Sequence[Sampling]) -> bytes:
    """How rows pick, for compiled functions: `sampling_bytes` of each, joined."""
    return b"".join([_packed(sampling) for sampling in samplings])


@lru_cache(maxsize=64)
def _packed(sampling: Sampling) -> bytes:
    return sampling_bytes(*sampling.filters, sampling.seed, *sampling.penalties)


@lru_cache(maxsize=1)
def _agrees() -> bool:
    """Whether the compiled pick is torch's here, asked once."""
    filters = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.5, 40, 0.9, 0.0), (0.7, 0, 0.8, 0.1)]
    samplings = [Sampling(*one, seed=seed) for one in filters for seed in (0, -7)]
    logits = 3 * torch.randn(len(samplings), 999, generator=torch.Generator().manual_seed(0))
    positions = [i << 30 for i in range(len(samplings))]
    scores = scored(logits, samplings, torch.tensor(positions))
    wanted, confidences = best_of(scores)
    how = packed_samplings(samplings)
    picks, found, others = compiled_pick(logits, how, positions, with_confidence=True, with_alternatives=True)
    assert found is not None and others is not None
    same = torch.equal(picks, wanted) and torch.equal(others, alternatives(scores, wanted))
    same = same and torch.allclose(found, confidences, atol=1e-4)
    if not same:
        _log.warning("the compiled pick is wrong on this machine, so torch's operations pick")
    return same
