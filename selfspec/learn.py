"""`Learner`: online training of exit heads from finished answers (online speculative decoding, arXiv 2310.07177).

Answers are kept when they end. Every few requests the model reads some of them again, as `selfspec tune` does, and the
heads are trained on its states there for some steps, within a share of the time. Exit heads change drafts only, so the
output stays the same, token for token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from selfspec.core import Sequence
from selfspec.errors import whole
from selfspec.learning.agreement import with_own_states
from selfspec.learning.heads import extended, first_layers
from selfspec.learning.states import Positions, collect
from selfspec.learning.student import Student
from selfspec.learning.written import Sample
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel

if TYPE_CHECKING:
    from selfspec.loading.target import Target

REUSE = 8  # how often a position is used for training, on average
MOST_STEPS = 32  # maximum steps per update, during which decoding waits; reading an answer counts as one
LONGEST = 1024  # tokens of a prompt and answer that are read, as decoding waits


class Learner:
    """Keeps finished answers, trains exit heads on them between rounds, and drafts with the heads' running average.

    The target drafts with the learner's heads from now on. The model does not change. Used as a context manager, the
    learner saves into its folder at the end.

    Args:
        target: an opened model, see `selfspec.loading.target.Target`.
        layers: exit layers that get heads in addition to those of the target's heads; default, where the target has no
            heads: a fifteenth, an eighth and a quarter of the layers, and the model's own exit layer.
        share: maximum time of reading and training as a share of the decoding time; a single step may exceed it.
        every: requests between two updates.
        inner_size: inner width of new heads, where the target has none; default: half of that of the model's own MLPs.
        top_k: number of the target's most probable tokens to keep per position; all others are one bucket.
        buffer: maximum number of positions to train on, and of those that wait to be read; new ones replace the oldest.
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
        self.num_positions = self.num_updates = self.num_steps = 0
        self.seconds, self.decoding_seconds = 0.0, 0.0  # time of training and of decoding
        self._inner_size, self._top_k, self._buffer, self._batch_size = inner_size, top_k, buffer, batch_size
        self._lr, self._decay, self._seed, self._clock = lr, decay, seed, clock
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = Lock()  # a target may serve several threads
        self._num_ended = 0
        self._waiting: deque[Sample] = deque()  # answers that were not read yet
        self._num_waiting = 0  # their positions
        self._last = {"read": 0.0, "step": 0.0}  # seconds of the last of each
        if layers is None:
            split, own = target.split, target.default_exit_layer
            layers = () if target.exit_heads is not None else first_layers(split.num_layers, own)
        self._open(target.exit_heads, layers)

    def _open(self, heads: ExitHeads | None, layers: Iterable[int] = ()) -> None:
        """Make the target draft with these heads, extended by new ones for `layers`, and start training them."""
        self._split = split = self.target.split
        self._seen: Positions | None = None  # of the layers of `heads`, on the host
        self._remaining = Counter[int]()  # by layer: positions that may still be used for training
        counts = {} if heads is None else heads.counts
        with torch.inference_mode(False), torch.no_grad():
            heads = extended(heads, layers, split, self._inner_size, self._seed)
            prior = self.target.prior
            self.target.exit_heads = heads  # copied to the model's device and dtype
            self.target.prior = prior
            assert split.exit_heads is not None
            self._student = Student(heads.to(split.device), self._lr, self._decay)
        self._counts = Counter(counts)  # of tokens in all answers that the heads learned from
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

    def after(self, ended: Iterable[Sequence], seconds: float) -> None:
        """Count a round of `seconds`, and keep the answers that ended in it; update where one is due."""
        self.decoding_seconds += max(0.0, seconds)
        for sequence in ended:
            self.take(Sample(list(sequence.token_ids), sequence.num_prompt_tokens))
            self._num_ended += 1
        if self._num_ended >= self.every:
            self._num_ended = 0
            self.update()

    def take(self, answer: Sample) -> None:
        """Keep an answer, to be read when there is time. The oldest ones make room; long ones are left out."""
        number = len(answer.positions)
        if self.share == 0 or number == 0 or len(answer.tokens) > LONGEST:
            return
        with self._lock:
            self._waiting.append(answer)
            self._num_waiting += number
            while self._num_waiting > self._buffer and len(self._waiting) > 1:
                self._num_waiting -= len(self._waiting.popleft().positions)

    def update(self) -> None:
        """Read answers and train while there is time, then copy the new average into the target's heads."""
        if not self._has_time(0.0, "read"):
            return
        begun = now = self._clock()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            num_before = self.num_steps
            for _ in range(MOST_STEPS):
                is_due = self._remaining and max(self._remaining.values()) > 0
                part, name = (self._step, "step") if is_due else (self._read, "read")
                if not (is_due or self._waiting) or not self._has_time(now - begun, name):
                    break
                try:
                    good = part()
                except torch.OutOfMemoryError:
                    good = False
                if not good:  # a bad position would spoil every batch that has it
                    self._seen, self._remaining = None, Counter()
                    break
                before, now = now, self._clock()
                self._last[name] = max(0.0, now - before)
            if self.num_steps > num_before:
                self.num_updates += 1
                for mine, average in zip(self.heads.parameters(), self._student.average.parameters(), strict=True):
                    mine.copy_(average)
        self.seconds += max(0.0, self._clock() - begun)

    def _has_time(self, seconds: float, name: str) -> bool:
        """Whether there is time for another one of these, after so many seconds of this update."""
        spent = self.seconds + max(0.0, seconds)
        return spent + self._last[name] < self.share * self.decoding_seconds

    def _read(self) -> bool:
        """Collect the model's states and probable tokens at the positions of the newest answer."""
        answer = self._waiting.pop()
        self._num_waiting -= len(answer.positions)
        new = collect(self._split, [answer], self.heads.layers, self._top_k)
        self._seen = new if self._seen is None else Positions.joined([self._seen, new])
        first = max(0, self._seen.number - self._buffer)
        self._seen = Positions(self._seen.hidden[:, first:], *(part[first:] for part in self._seen[1:]))
        for layer in self.heads.layers:
            self._remaining[layer] += REUSE * new.number
        self._counts.update(answer.tokens[answer.num_prompt :])
        self.num_positions += new.number
        return True

    def _step(self) -> bool:
        layer = max(self._remaining, key=self._remaining.__getitem__)
        self._remaining[layer] -= self._batch_size
        assert self._seen is not None
        at = torch.randint(self._seen.number, (self._batch_size,), generator=self._generator)
        index, heads = self.heads.layers.index(layer), self._student.average
        batch = with_own_states(self._split, heads, layer, index, self._seen, at, self._generator)
        subset = self._split.draft_subset(self._split.default_draft_vocab)
        good = self._student.step(self._split, layer, batch, subset)
        self.num_steps += good
        return good

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
        self.heads.counts = dict(self._counts)
        return self.heads.save(folder)

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None:
            self.save()
