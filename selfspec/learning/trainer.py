"""`ExitTrainer`: trains the head of one exit on stored positions, for a given time."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from selfspec.learning.agreement import agreement, exit_loss, with_own_states
from selfspec.learning.heads import inner_size_of
from selfspec.learning.states import Positions
from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.split_model import SplitModel

BATCH = 512  # positions of a step
LR, WEIGHT_DECAY, WARM_UP, MOST_GRADIENT = 1e-3, 0.01, 10, 1.0  # of AdamW; steps of warm-up; norm of gradients
KL_SHARE = 0.3  # of the training, the first part, with the loss KL


class ExitTrainer:
    """Trains the head of one exit of a model, which does not change.

    Args:
        index: the exit's place in the `hidden` of positions.
        subset: the draft vocabulary; None: the whole one.
    """

    def __init__(
        self, split: SplitModel, layer: int, index: int, subset: Subset | None, weights: str, seed: int
    ) -> None:
        self.split, self.layer, self.index, self.subset = split, layer, index, subset
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = ExitHeads((layer,), hidden_size_of(split), inner_size_of(split), weights)
        self.heads = heads.to(split.device)
        self._optimizer = torch.optim.AdamW(self.heads.parameters(), LR, weight_decay=WEIGHT_DECAY, fused=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._order: Iterator[torch.Tensor] = iter(())
        self.steps = 0
        self.best, self.best_agreement = copy.deepcopy(self.heads), -1.0
        """The weights of the measurement with the highest agreement, and that agreement."""

    def step(self, seen: Positions, progress: float) -> float:
        """Train on the next batch, and return its loss.

        Args:
            progress: in 0..1, the part of the training before this step: the learning rate falls by a cosine.

        Raises:
            FloatingPointError: the loss is not finite; the head is as it was.
        """
        at = self._next(seen.number)
        batch = with_own_states(self.split, self.heads, self.layer, self.index, seen, at, self._generator)
        with torch.inference_mode(False), torch.enable_grad():
            loss = exit_loss(self.split, self.heads, self.layer, batch, self.subset, progress < KL_SHARE)
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss of exit {self.layer} is {value} at step {self.steps + 1}")
            self._optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), MOST_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = LR * min(1.0, (self.steps + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        self._optimizer.step()
        self.steps += 1
        return value

    def _next(self, count: int) -> torch.Tensor:
        """The next positions; every epoch has an order of its own."""
        at = next(self._order, None)
        if at is None:
            self._order = iter(torch.randperm(count, generator=self._generator).split(BATCH))
            at = next(self._order)
        return at

    def measure(self, held_out: Positions) -> float:
        """Agreement on held-out positions now. The best weights so far are kept in `best`."""
        found = agreement(self.split, self.heads, self.layer, self.index, held_out, self.subset)
        if found >= self.best_agreement:
            self.best, self.best_agreement = copy.deepcopy(self.heads), found
        return found

    def state(self) -> dict[str, Any]:
        """What a later trainer goes on from, for `torch.save`."""
        return {
            "layer": self.layer,
            "steps": self.steps,
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "best": self.best.state_dict(),
            "best_agreement": self.best_agreement,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of an earlier trainer of the same exit."""
        self.heads.load_state_dict(state["heads"])
        self.best.load_state_dict(state["best"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.best_agreement = state["steps"], state["best_agreement"]
