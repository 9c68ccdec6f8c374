"""`Learner`: online training of exit heads from rejected drafts (online speculative decoding, arXiv 2310.07177).

Verification computes the target's logits. Where a drafted token is rejected, these logits are kept with the hidden
state of the draft. Every few requests the heads are trained on them for some steps, within a share of the time. Exit
heads change drafts only, so the output stays the same, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.errors import whole
from selfspec.learning.examples import ExampleBuffer
from selfspec.learning.heads import extended, first_layers
from selfspec.learning.student import Student
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel

if TYPE_CHECKING:
    from selfspec.loading.target import Target

REUSE = 8  # how often a position is used for training, on average
MOST_STEPS = 32  # maximum steps per update, during which decoding waits


class Learner:
    """Collects training examples, updates exit heads between rounds, and drafts with their running average.

    The target drafts with the learner's heads from now on. The model does not change. Used as a context manager, the
    learner saves into its folder at the end.

    Args:
        target: an opened model, see `selfspec.loading.target.Target`.
        layers: exit layers that get heads in addition to those of the target's heads; default, where the target has no
            heads: an eighth, a quarter, three eighths and a half of the layers, and the model's own exit layer.
        share: maximum training time as a share of the decoding time; a single step may exceed it.
        every: requests between two updates.
        inner_size: inner width of new heads, where the target has none; default: that of the model's own MLPs.
        top_k: number of the target's most probable tokens to keep per position; all others are one bucket.
        buffer: maximum number of positions per layer; new ones replace the oldest.
        batch_size: positions per step.
        lr: learning rate of AdamW.
        decay: decay of the running average per step.
        folder: default folder of `save`.
        seed: of new heads and of the sampling of positions.
        clock: returns the time in seconds.

    Raises:
        ValueError: a number or a layer is out of range, or the model's weights cannot take part in autograd.
    """

    def __init__(
        self,
        target: Target,
        *,
        layers: Iterable[int] | None = None,
        share: float = 0.05,
        every: int = 8,
        inner_size: int | None = None,
        top_k: int = 64,
        buffer: int = 4096,
        batch_size: int = 64,
        lr: float = 3e-3,
        decay: float = 0.9,
        folder: str | Path | None = None,
        seed: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        counts = {"every": every, "top_k": top_k, "buffer": buffer, "batch_size": batch_size}
        for name, value in counts.items():
            whole(name, value, 1)
        for name, number, allowed in (
            ("share", share, 0 <= share <= 1),
            ("lr", lr, 0 < lr < 1),
            ("decay", decay, 0 <= decay < 1),
        ):
            if not allowed:
                raise ValueError(f"{name} must lie between 0 and 1, got {number}")
        if target.split.num_layers < 2:
            raise ValueError(f"learn needs a model of at least 2 layers, got {target.split.num_layers}")
        if any(parameter.is_inference() for parameter in target.split.model.parameters()):
            raise ValueError("learn needs a model that was loaded outside of torch.inference_mode(); load it again")
        self.target, self.folder = target, folder
        self.share, self.every = share, every
        self.num_examples = self.num_updates = self.num_steps = 0
        self.seconds, self.decoding_seconds = 0.0, 0.0  # time of training and of decoding
        self._inner_size, self._top_k, self._buffer, self._batch_size = inner_size, top_k, buffer, batch_size
        self._lr, self._decay, self._seed, self._clock = lr, decay, seed, clock
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = Lock()  # a target may serve several threads
        self._num_ended = 0
        self._take_seconds = 0.0  # time of `take` in the current round
        self._step_seconds = 0.0  # time of the last step
        if layers is None:
            split, own = target.split, target.default_exit_layer
            layers = () if target.exit_heads is not None else first_layers(split.num_layers, own)
        self._open(target.exit_heads, layers)

    def _open(self, heads: ExitHeads | None, layers: Iterable[int] = ()) -> None:
        """Make the target draft with these heads, extended by new ones for `layers`, and start training them."""
        self._split = split = self.target.split
        self._examples: dict[int, ExampleBuffer] = {}
        self._remaining: dict[int, float] = {}  # by layer: positions that may still be used for training
        with torch.inference_mode(False), torch.no_grad():
            heads = extended(heads, layers, split, self._inner_size, self._seed)
            prior = self.target.prior
            self.target.exit_heads = heads  # copied to the model's device and dtype
            self.target.prior = prior
            assert split.exit_heads is not None
            self._student = Student(heads.to(split.device), self._lr, self._decay)
        self.heads = split.exit_heads
        """The heads that the target drafts with: the running average, in the model's dtype."""

    def cover(self, layers: Iterable[int]) -> None:
        """Add heads for exit layers that have none. No decoding may be in progress."""
        wanted = set(layers) - set(self.heads.layers)
        if wanted:
            with self._lock:
                self._open(self._student.average, wanted)

    def follow(self, split: SplitModel) -> None:
        """Continue with the target's present `split` and exit heads; examples of an earlier split are dropped.

        Raises:
            ValueError: `split` belongs to another target.
        """
        if split is not self.target.split:
            raise ValueError("learn must be a Learner of the target that decodes; make one with Learner(target)")
        if split is not self._split:
            with self._lock:
                self._open(self._student.average)
        elif split.exit_heads is not self.heads:  # replaced by the caller: train these
            with self._lock:
                self._open(split.exit_heads)

    def take(self, layer: int, hidden: Tensor, logits: Tensor) -> None:
        """Add positions of rejected drafts.

        Args:
            layer: the exit layer of `hidden`; layers without a head are ignored.
            hidden: `[n, hidden_size]`, before the final norm; the learner keeps it.
            logits: the target's logits, fp32 `[n, vocab]`; the learner keeps them.
        """
        if layer not in self.heads.layers or self.share == 0 or self.seconds > self.share * self.decoding_seconds:
            return
        begun = self._clock()
        with self._lock:
            examples = self._examples.setdefault(layer, ExampleBuffer(self._buffer, self._top_k))
            examples.add(hidden, logits)
            self._remaining[layer] = min(self._remaining.get(layer, 0) + REUSE * len(hidden), REUSE * self._buffer)
            self.num_examples += len(hidden)
        self._take_seconds += self._add_seconds(begun)

    def after(self, num_ended: int, seconds: float) -> None:
        """Count a round of `seconds` in which `num_ended` requests ended; update where one is due."""
        self.decoding_seconds += max(0.0, seconds - self._take_seconds)
        self._take_seconds = 0.0
        self._num_ended += num_ended
        if self._num_ended >= self.every:
            self._num_ended = 0
            self.update()

    def update(self) -> None:
        """Train while there are positions and time is left, then copy the new average into the target's heads."""
        if not self._has_time(0.0):
            return
        begun = now = self._clock()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            num_before = self.num_steps
            for _ in range(MOST_STEPS):
                layer = max(self._remaining, key=self._remaining.__getitem__, default=None)
                if layer is None or self._remaining[layer] <= 0 or not self._has_time(now - begun):
                    break
                if not self._step(layer):
                    break
                before, now = now, self._clock()
                self._step_seconds = max(0.0, now - before)
            if self.num_steps > num_before:
                self.num_updates += 1
                for mine, average in zip(self.heads.parameters(), self._student.average.parameters(), strict=True):
                    mine.copy_(average)
        self._add_seconds(begun)

    def _has_time(self, seconds: float) -> bool:
        """Whether there is time for another step, after so many seconds of this update."""
        spent = self.seconds + max(0.0, seconds)
        return spent + self._step_seconds < self.share * self.decoding_seconds

    def _step(self, layer: int) -> bool:
        batch = self._examples[layer].sample(self._batch_size, self._generator)
        self._remaining[layer] -= self._batch_size
        try:
            good = self._student.step(self._split, layer, batch)
        except torch.OutOfMemoryError:
            good = False
        if good:
            self.num_steps += 1
        else:  # drop all positions, since a bad one would spoil every batch that contains it
            self._examples.pop(layer)
            self._remaining.pop(layer)
        return good

    def _add_seconds(self, begun: float) -> float:
        spent = max(0.0, self._clock() - begun)
        self.seconds += spent
        return spent

    def save(self, folder: str | Path | None = None) -> Path:
        """Train while time is left, write the averaged heads, and return the file.

        Raises:
            ValueError: no folder is given, here or at construction.
            OSError: the file cannot be written; an earlier one is unchanged.
        """
        folder = self.folder if folder is None else folder
        if folder is None:
            raise ValueError("folder must be a path, here or in Learner(folder=...), got None")
        self.update()
        return self.heads.save(folder)

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:
            self.save()
