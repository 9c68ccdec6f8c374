"""Batches of token windows. Batch i depends on the seed and i only, so that a run can be resumed."""

from __future__ import annotations

from collections.abc import Sequence

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
