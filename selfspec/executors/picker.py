"""`Picker`: who picks for the rows of a split model. Drafts, verification and plain decoding all ask the same one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.kernels.compiled_call import Picks, compiled_pick, sampling_bytes
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.kernels.pick import Subset, best_of, sampling_tensors, scored, to_token_ids
from selfspec.kernels.suite import pick_for
from selfspec.model.kv_cache import tensor_of
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams

_log = logging.getLogger("selfspec")


class Picker:
    """Picks in one compiled call where compiled layers run, else by torch or the device's fused kernel.

    Which of them is settled when it is made: both pick the same but for rounding, which must not differ between those
    that are compared.
    """

    def __init__(self, split: SplitModel) -> None:
        self.is_compiled = split.backend == "compiled" and _agrees()
        self._noise = NoiseAhead()

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        subset: Subset | None = None,
        with_confidence: bool = False,
    ) -> Picks:
        """Picks at N positions; see `kernels.pick.scored` for the arguments, and `best_of` for confidences."""
        tokens = None if subset is None else subset.tokens
        if self.is_compiled:
            return compiled_pick(logits, packed_params(params), positions, tokens, with_confidence)
        at, fused = tensor_of(list(positions), logits.device), pick_for(logits.device)
        if fused is not None:
            return Picks(*fused(logits, sampling_tensors(params, at), tokens))
        scores = scored(logits, params, at, self._noise, subset)
        if not with_confidence:
            return Picks(to_token_ids(scores.argmax(-1), subset))
        picks, confidences = best_of(scores)
        return Picks(to_token_ids(picks, subset), confidences)


def packed_params(params: Sequence[SamplingParams]) -> bytes:
    """How rows pick, for compiled functions."""
    return b"".join([_packed(one.filters, one.seed, one.penalties) for one in params])


@lru_cache(maxsize=64)
def _packed(filters: tuple[float, int, float, float], seed: int, penalties: tuple[float, float, float, int]) -> bytes:
    return sampling_bytes(*filters, seed, *penalties)


@lru_cache(maxsize=1)
def _agrees() -> bool:
    """Whether the compiled pick is torch's here, asked once."""
    filters = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.5, 40, 0.9, 0.0), (0.7, 0, 0.8, 0.1)]
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for temperature, top_k, top_p, min_p in filters
        for seed in (0, -7)
    ]
    logits = 3 * torch.randn(len(params), 999, generator=torch.Generator().manual_seed(0))
    positions = [i << 30 for i in range(len(params))]
    wanted, confidences = best_of(scored(logits, params, torch.tensor(positions)))
    picks, found = compiled_pick(logits, packed_params(params), positions, with_confidence=True)
    assert found is not None
    same = torch.equal(picks, wanted) and torch.allclose(found, confidences, atol=1e-4)
    if not same:
        _log.warning("the compiled pick is wrong on this machine, so torch's operations pick")
    return same
