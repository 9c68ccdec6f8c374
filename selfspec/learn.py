"""`Learner`: exit heads learn from refused drafts while they serve (online speculative decoding, arXiv 2310.07177).

Verification computes the target's logits anyway. Where they refuse a drafted token, they are kept with the hidden state
that the draft was made from, and every few requests the heads take some steps towards them, within a share of the time.
Heads change drafts only: whatever they learn, the output stays the same, token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.errors import whole
from selfspec.learning.heads import extended, first_layers
from selfspec.learning.lessons import Lessons
from selfspec.learning.student import Student
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.stack import Stack

REUSE = 8  # steps see every lesson about so often
MOST_STEPS = 32  # of one update: rows that are half-way through wait for it


class Teaching(Protocol):
    """What a learner needs of a target."""

    exit_heads: ExitHeads | None
    prior: Any

    @property
    def stack(self) -> Stack: ...
    @property
    def default_exit_layer(self) -> int | None: ...


class Learner:
    """Collects lessons, updates exit heads between rounds, and drafts with a running average of them.

    The target drafts with the learner's heads from the moment it is made; the model itself is never changed. As a
    context manager, it saves into its folder at the end.

    Args:
        target: what `selfspec.load` returns.
        layers: exit layers that shall have heads, beside those that the target's heads have; default, where the target
            has none: an eighth, a quarter, three eighths and a half of the layers, and the model's own exit layer.
        share: most time spent learning, as a share of the time spent decoding; a single step may exceed it.
        every: requests between two updates.
        rank: inner width of fresh heads; heads that are there keep theirs. Default: half the hidden size, at most 128.
        top_k: the target's likeliest tokens that are kept of a position; all others are one bucket.
        buffer: positions kept per layer; the oldest make room.
        batch_size: positions of one step.
        lr: learning rate of AdamW.
        decay: how much of the running average stays at each step.
        folder: where `save` writes, by default.
        seed: of fresh heads and of the choice of positions.
        clock: seconds; running backwards does no harm.

    Raises:
        ValueError: a number or a layer out of range, or a model whose weights cannot take part in autograd.
    """

    def __init__(
        self,
        target: Teaching,
        *,
        layers: Iterable[int] | None = None,
        share: float = 0.05,
        every: int = 8,
        rank: int | None = None,
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
        if target.stack.num_layers < 2:
            raise ValueError("learn needs a model of at least two layers; this one has no early layer to leave at")
        if any(parameter.is_inference() for parameter in target.stack.model.parameters()):
            raise ValueError("learn needs a model that was loaded outside of torch.inference_mode(); load it again")
        self.target, self.folder = target, folder
        self.share, self.every = share, every
        self.num_lessons = self.num_updates = self.num_steps = 0
        self.seconds, self.decoding_seconds = 0.0, 0.0  # spent learning, and decoding beside it
        self._rank, self._top_k, self._buffer, self._batch_size = rank, top_k, buffer, batch_size
        self._lr, self._decay, self._seed, self._clock = lr, decay, seed, clock
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = Lock()  # a target may serve several threads
        self._num_ended = 0
        self._taking = 0.0  # seconds of `take` that are part of the round in progress
        self._step_seconds = 0.0  # the last step's
        if layers is None:
            stack, own = target.stack, target.default_exit_layer
            layers = () if target.exit_heads is not None else first_layers(stack.num_layers, own)
        self._open(target.exit_heads, layers)

    def _open(self, heads: ExitHeads | None, layers: Iterable[int] = ()) -> None:
        """Have the target draft with these heads, and with fresh ones, which change nothing yet, for further layers."""
        self._stack = stack = self.target.stack
        self._lessons: dict[int, Lessons] = {}
        self._credit: dict[int, float] = {}  # positions that steps may still look at
        with torch.inference_mode(False), torch.no_grad():
            heads = extended(heads, layers, stack, self._rank, self._seed)
            prior = self.target.prior
            self.target.exit_heads = heads  # a copy of them, on the model's device and in its dtype
            self.target.prior = prior
            assert stack.exit_heads is not None
            self._student = Student(heads.to(stack.device), self._lr, self._decay)
        self.heads = stack.exit_heads
        """What the target drafts with: the running average, in the model's dtype."""

    def cover(self, layers: Iterable[int]) -> None:
        """See to it that these exit layers have heads, at a time when nothing is being decoded."""
        wanted = set(layers) - set(self.heads.layers)
        if wanted:
            with self._lock:
                self._open(self._student.average, wanted)

    def follow(self, stack: Stack) -> None:
        """Begin to teach for `stack`, which must be the target's; lessons of the model as it was before are dropped.

        Raises:
            ValueError: it is another target's.
        """
        if stack is not self.target.stack:
            raise ValueError("learn must be a Learner of the target that decodes; make one with Learner(target)")
        if stack is not self._stack:
            with self._lock:
                self._open(self._student.average)
        elif stack.exit_heads is not self.heads:  # somebody set others: these are gone on with
            with self._lock:
                self._open(stack.exit_heads)

    def take(self, layer: int, hidden: Tensor, logits: Tensor) -> None:
        """Positions where a draft was refused.

        Args:
            layer: the exit layer that `hidden` is of; layers without a head learn nothing.
            hidden: `[n, hidden_size]`, before the final norm; a copy that is ours.
            logits: `[n, vocab]`, the target's, fp32; likewise.
        """
        if layer not in self.heads.layers or self.share == 0 or self.seconds > self.share * self.decoding_seconds:
            return
        begun = self._clock()
        with self._lock:
            lessons = self._lessons.setdefault(layer, Lessons(self._buffer, self._top_k))
            lessons.add(hidden, logits)
            self._credit[layer] = min(self._credit.get(layer, 0) + REUSE * len(hidden), REUSE * self._buffer)
            self.num_lessons += len(hidden)
        self._taking += self._spend(begun)

    def after(self, num_ended: int, seconds: float) -> None:
        """After a round of `seconds` in which `num_ended` requests ended: perhaps an update."""
        self.decoding_seconds += max(0.0, seconds - self._taking)
        self._taking = 0.0
        self._num_ended += num_ended
        if self._num_ended >= self.every:
            self._num_ended = 0
            self.update()

    def update(self) -> None:
        """Take steps while there are lessons to look at and time is left, then draft with the new average."""
        if not self._has_time(0.0):
            return
        begun = now = self._clock()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            num_before = self.num_steps
            for _ in range(MOST_STEPS):
                layer = max(self._credit, key=self._credit.__getitem__, default=None)
                if layer is None or self._credit[layer] <= 0 or not self._has_time(now - begun):
                    break
                if not self._step(layer):
                    break
                before, now = now, self._clock()
                self._step_seconds = max(0.0, now - before)
            if self.num_steps > num_before:
                self.num_updates += 1
                for mine, average in zip(self.heads.parameters(), self._student.average.parameters(), strict=True):
                    mine.copy_(average)
        self._spend(begun)

    def _has_time(self, seconds: float) -> bool:
        """Whether another step fits in, after so many seconds of this update."""
        spent = self.seconds + max(0.0, seconds)
        return spent + self._step_seconds < self.share * self.decoding_seconds

    def _step(self, layer: int) -> bool:
        batch = self._lessons[layer].sample(self._batch_size, self._generator)
        self._credit[layer] -= self._batch_size
        try:
            good = self._student.step(self._stack, layer, batch)
        except torch.OutOfMemoryError:
            good = False
        if good:
            self.num_steps += 1
        else:  # one bad lesson is enough to spoil every batch it is in
            self._lessons.pop(layer)
            self._credit.pop(layer)
        return good

    def _spend(self, begun: float) -> float:
        spent = max(0.0, self._clock() - begun)
        self.seconds += spent
        return spent

    def save(self, folder: str | Path | None = None) -> Path:
        """Learn what time is left for, and write the averaged heads, whole or not at all; returns the file.

        Raises:
            ValueError: no folder was named, here or before.
            OSError: it cannot be written; what was there before is still there.
        """
        folder = self.folder if folder is None else folder
        if folder is None:
            raise ValueError("folder must be named, here or where the Learner is made")
        self.update()
        return self.heads.save(folder)

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:
            self.save()
