"""Token windows in a fixed order: what step i sees depends on the seed and on i alone, so a run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from train.corpus import SourceFile


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> list[np.ndarray]:
    """Encode each file, followed by the end-of-text token; int64 arrays."""
    encoded = tokenizer([file.text for file in files], verbose=False)["input_ids"]
    return [np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in encoded]


def pack(documents: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Lay documents end to end in a shuffled order, each behind an end-of-text token.

    Documents are tokens `[T]`, or tokens and labels `[2, T]`; the stream is alike.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    end = documents[0][..., -1:]
    return np.concatenate([end, *(documents[index] for index in order)], axis=-1)


class Windows(Dataset[Tensor]):
    """Batches `[rows, length]` cut from one stream of tokens; every length walks through its own shuffled epochs.

    From a stream of tokens and labels `[2, N]` the batches are `[2, rows, length]`. Batch i has windows of length
    `lengths[i // repeat % len(lengths)]`, and `tokens_per_batch` tokens.
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
        """Where the `number`-th window of this length begins; a new epoch has a new order and a new offset."""
        per_epoch = self.length // length - 1
        epoch, place = divmod(number, per_epoch)
        rng = np.random.default_rng((self.seed, length, epoch))
        if (length, epoch) not in self._orders:
            self._orders[length, epoch] = np.append(rng.permutation(per_epoch), rng.integers(length))
        order = self._orders[length, epoch]
        return int(order[place] * length + order[-1])


class StreamedWindows(Dataset[Tensor]):
    """Batches `[2, rows, length]` cut from documents as they come, for data too large to hold.

    Batch i has windows of length `lengths[i // repeat % len(lengths)]`, and `tokens_per_batch` tokens. Batches are
    asked for in order; one further on, as when a run is resumed, reads over what lies between, an earlier one starts
    again.

    Args:
        read: starts the documents of an epoch, given its number: tokens and labels `[2, T]`, int64.
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
        """Yield `[2, tokens_per_batch]` again and again; what an epoch leaves over begins the next."""
        held: list[np.ndarray] = []
        count, epoch = 0, 0
        while True:
            before = count
            for document in self.read(epoch):
                if not held:
                    held, count = [document[:, -1:]], 1  # the first text too stands behind an end of text
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
    """Yield all items, each drawn from the next `buffer` ones; the order depends on `seed` alone."""
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
