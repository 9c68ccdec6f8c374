"""transformers' own `generate` on the same weights, timed token by token: what reads the prompt does not count."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from eval.gpu.ours import SLICES, Rate
from eval.methods import greedy_without_end
from eval.targets import Synthetic, random_prompts
from eval.timing import quiet, synchronize

WARM_CALLS = {"hf": 4, "hf static": 6, "hf early exit": 4}
"""Tokens, or rounds, before the clock counts: a static cache is compiled meanwhile, on CUDA."""
MOST_TOKENS = 512


class Watch(StoppingCriteria):
    """Notes the time of every token, and ends the text once the window is over."""

    def __init__(self, device: torch.device, warm_calls: int, window: float) -> None:
        self.device, self.warm_calls, self.window = device, warm_calls, window
        self.marks: list[tuple[float, int]] = []  # (time, length)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(self.device)
        self.marks.append((perf_counter(), input_ids.shape[1]))
        counted = self.marks[self.warm_calls :]
        over = len(counted) > SLICES and counted[-1][0] - counted[0][0] >= self.window
        return torch.full((input_ids.shape[0],), over, device=input_ids.device)


def peer_rate(target: Synthetic, kind: str, batch: int, context: int, window: float, draft_tokens: int = 4) -> Rate:
    """Tokens per second of `hf` (eager), `hf static` (a static cache; compiled on CUDA) or `hf early exit`.

    Raises:
        ValueError: early exit of several rows, which transformers does not have; or too few tokens to time.
    """
    if kind == "hf early exit" and batch > 1:
        raise ValueError("transformers' early exit decodes one row only")
    model, where = target.stack.model, target.stack.device
    given = torch.tensor(random_prompts(target.stack.vocab_size, batch, context, seed=3), device=where)
    options: dict[str, Any] = {"hf static": {"cache_implementation": "static"}}.get(kind, {})
    if kind == "hf early exit":
        options = {"assistant_early_exit": target.made.exit_layer}
    watch = Watch(where, WARM_CALLS[kind], window)
    with quiet(), greedy_without_end(model, draft_tokens if "exit" in kind else None):
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=MOST_TOKENS,
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
        )
    return _rate(watch.marks[watch.warm_calls :], batch)


def _rate(marks: list[tuple[float, int]], batch: int) -> Rate:
    if len(marks) <= SLICES:
        raise ValueError(f"only {len(marks)} tokens were timed; a longer window is needed")
    cuts = [round(i * (len(marks) - 1) / SLICES) for i in range(SLICES + 1)]
    slices = [batch * (marks[b][1] - marks[a][1]) / (marks[b][0] - marks[a][0]) for a, b in pairwise(cuts)]
    seconds = marks[-1][0] - marks[0][0]
    total = batch * (marks[-1][1] - marks[0][1]) / seconds
    return Rate(total, min(slices), max(slices), len(marks) - 1, seconds)
