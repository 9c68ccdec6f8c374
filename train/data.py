"""Batches of token windows. Batch i depends on the seed and i only, so that a run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from train.corpus import SourceFile


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> list[np.ndarray]:
    """Encode each file with an end-of-text token at its end; int64 arrays."""
    encoded = tokenizer([file.text for file in files], verbose=False)["input_ids"]
    return [np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in encoded]


def pack(documents: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Concatenate documents in a shuffled order, each after an end-of-text token.

    Documents are tokens `[T]`, or tokens and labels `[2, T]`; so is the result.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    end = documents[0][..., -1:]
    return np.concatenate([end, *(documents[index] for index in order)], axis=-1)


class Windows(Dataset[Tensor]):
    """Batches `[rows, length]` of windows of a stream of tokens; every length has its own shuffled epochs.

    From a stream of tokens and labels `[2, N]`, batches are `[2, rows, length]`. Batch i has `tokens_per_batch` tokens
    in windows of length `lengths[i // repeat % len(lengths)]`.
    """

    def __init__(
        self,
        stream: np.ndarray,
        lengths: Sequence[int],
        tokens_per_batch: int,
        num_batches: int,
        repeat: int = 1,
        seed: int = 0,
    ) -> None:
        longest, self.length = max(lengths), stream.shape[-1]
        if self.length < 2 * longest:
            raise ValueError(
                f"the text to train on has {self.length} tokens, fewer than two windows of {longest}; "
                "shorten run.windows or add text"
            )
        self.stream, self.lengths, self.seed = stream, tuple(lengths), seed
        self.tokens_per_batch, self.num_batches, self.repeat = tokens_per_batch, num_batches, repeat
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        step, part = divmod(index, self.repeat)
        cycle, place = divmod(step, len(self.lengths))
        length = self.lengths[place]
        steps_before = cycle * self.lengths.count(length) + self.lengths[:place].count(length)
        rows = self.tokens_per_batch // length
        first = (steps_before * self.repeat + part) * rows
        starts = [self._start(length, first + row) for row in range(rows)]
        return torch.from_numpy(np.stack([self.stream[..., start : start + length] for start in starts], axis=-2))

    def _start(self, length: int, number: int) -> int:
        """The start of the `number`-th window of this length; every epoch has its own order and offset."""
        per_epoch = self.length // length - 1
        epoch, place = divmod(number, per_epoch)
        rng = np.random.default_rng((self.seed, length, epoch))
        if (length, epoch) not in self._orders:
            self._orders[length, epoch] = np.append(rng.permutation(per_epoch), rng.integers(length))
        order = self._orders[length, epoch]
        return int(order[place] * length + order[-1])


class StreamedWindows(Dataset[Tensor]):
    """Batches `[2, rows, length]` of streamed documents, for data that do not fit into memory.

    Batch i has `tokens_per_batch` tokens in windows of length `lengths[i // repeat % len(lengths)]`. Batches are read
    in order. A later batch skips those between, as when a run is resumed; an earlier one restarts the stream.

    Args:
        read: returns the documents of an epoch, given its number: tokens and labels `[2, T]`, int64.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[np.ndarray]],
        lengths: Sequence[int],
        tokens_per_batch: int,
        num_batches: int,
        repeat: int = 1,
    ) -> None:
        self.read, self.lengths, self.repeat = read, tuple(lengths), repeat
        self.tokens_per_batch, self.num_batches = tokens_per_batch, num_batches
        self._next, self._pieces = 0, self._batches()

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        if index < self._next:
            self._next, self._pieces = 0, self._batches()
        while self._next < index:
            next(self._pieces)
            self._next += 1
        self._next += 1
        tokens = next(self._pieces)
        length = self.lengths[index // self.repeat % len(self.lengths)]
        return torch.from_numpy(tokens.reshape(2, -1, length))

    def _batches(self) -> Iterator[np.ndarray]:
        """Yield `[2, tokens_per_batch]` without end; the remainder of an epoch begins the next one."""
        held: list[np.ndarray] = []
        count, epoch = 0, 0
        while True:
            before = count
            for document in self.read(epoch):
                if not held:
                    held, count = [document[:, -1:]], 1  # an end-of-text token before the first document
                held.append(document)
                count += document.shape[1]
                while count >= self.tokens_per_batch:
                    joined = np.concatenate(held, axis=1)
                    yield joined[:, : self.tokens_per_batch].copy()
                    held, count = [joined[:, self.tokens_per_batch :]], count - self.tokens_per_batch
                    before = -1
            if count == before:
                raise ValueError("data.path holds no text to train on; choose another file or data set")
            epoch += 1


def shuffled(items: Iterator[np.ndarray], buffer: int, seed: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield all items, each drawn from a buffer of `buffer` items; the order depends on `seed` only."""
    held: list[np.ndarray] = []
    rng = np.random.default_rng(seed)
    for item in items:
        if len(held) < buffer:
            held.append(item)
            continue
        place = int(rng.integers(buffer))
        held[place], item = item, held[place]
        yield item
    yield from (held[place] for place in rng.permutation(len(held)))
