"""Training data of exit heads by position: hidden states at the exits, and the whole model's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel, Taps
from train.heads_config import TrainingConfig
from train.samples import Sample, count_positions

TOKENS_PER_CALL = 4096
CUDA_PAGE_SIZE = 64
LOGITS_AT_ONCE = 1 << 24  # logits in memory at once
MIN_PROB = 2e-9  # of all other tokens together
MIN_LOG_PROB = -1e4  # of a token, so that masked ones give no NaN


class States(NamedTuple):
    """What the model computes at N positions, on its device, in the split model's `hidden_dtype`."""

    hidden: Tensor  # [exits, N, hidden_size], before the final norm
    final: Tensor  # [N, hidden_size], after the last layer and the final norm


class Batch(NamedTuple):
    """What heads learn from at N positions."""

    hidden: Tensor  # [exits, N, hidden_size], before the final norm
    ids: Tensor  # int64 [N, k], the most probable next tokens, the most probable one first
    log_probs: Tensor  # float32 [N, k + 1] of these tokens and, last, of all others together


def run_texts(split: SplitModel, texts: Sequence[Sample], exits: Sequence[int]) -> Iterator[States]:
    """Run the model over texts, several per call, and yield the states at each text's `positions`, in order."""
    for group in _groups([len(text.tokens) for text in texts]):
        tokens = [token for i in group for token in texts[i].tokens]
        starts = torch.tensor([0, *(len(texts[i].tokens) for i in group)]).cumsum(0).tolist()
        kept = [start + p for start, i in zip(starts, group, strict=False) for p in texts[i].positions]
        if not kept:
            continue
        longest = max(len(texts[i].tokens) for i in group)
        page = longest if split.device.type == "cpu" else CUDA_PAGE_SIZE
        cache = PagedCache(sum(-(-len(texts[i].tokens) // page) for i in group), page)
        spans = [Span(cache.reserve(len(texts[i].tokens)) or [], 0, len(texts[i].tokens)) for i in group]
        taps: Taps = dict.fromkeys(exits)
        with torch.no_grad():  # no inference mode, since the results are used in training
            rows = PackedRows(cache, spans, split.device)
            last = split.run(rows, 0, split.num_layers, torch.tensor(tokens, device=split.device), taps)
            at = torch.tensor(kept, device=split.device)
            hidden = torch.stack([taps[layer][at] for layer in exits])  # type: ignore[index]
            yield States(hidden, last[at])


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group neighbouring texts, up to `TOKENS_PER_CALL` tokens each."""
    group: list[int] = []
    for index, length in enumerate(lengths):
        if group and sum(lengths[i] for i in group) + length > TOKENS_PER_CALL:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def chunks(split: SplitModel, num: int) -> Iterator[slice]:
    """Slices of N positions with at most `LOGITS_AT_ONCE` logits each."""
    size = max(1, LOGITS_AT_ONCE // split.vocab_size)
    return (slice(at, at + size) for at in range(0, num, size))


def collect(split: SplitModel, texts: Sequence[Sample], exits: Sequence[int], top_k: int) -> Batch:
    """Collect what heads learn from in one batch on the host, with 16-bit hidden states and float16 log-probabilities.

    Args:
        top_k: number of most probable tokens to keep per position.
    """
    num, width, k = count_positions(texts), hidden_size_of(split), min(top_k, split.vocab_size - 1)
    half = split.dtype if split.dtype.itemsize < 4 else torch.bfloat16
    kept = Batch(
        torch.empty(len(exits), num, width, dtype=half),
        torch.empty(num, k, dtype=torch.int32),
        torch.empty(num, k + 1, dtype=torch.float16),
    )
    at = 0
    for part in run_texts(split, texts, exits):
        size = len(part.final)
        kept.hidden[:, at : at + size] = part.hidden.to("cpu", half)
        for chunk in chunks(split, size):
            with torch.no_grad():
                top, ids = split.logits(part.final[chunk]).log_softmax(-1).topk(k, sorted=True)
            where = slice(at + chunk.start, at + chunk.start + len(ids))
            kept.ids[where], kept.log_probs[where] = ids.cpu().int(), with_rest(top).cpu().half()
        at += size
    return kept


def with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: `[N, k]` -> `[N, k + 1]`."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=MIN_PROB).log()
    return torch.cat((log_probs.clamp(min=MIN_LOG_PROB), rest), -1)


class Stream:
    """The batches of a run, reproducible from any step on. States that do not fit into memory are made per shard.

    Raises:
        ValueError: the texts hold fewer positions than one batch.
    """

    def __init__(
        self, split: SplitModel, texts: Sequence[Sample], exits: Sequence[int], training: TrainingConfig
    ) -> None:
        self.split, self.texts, self.exits, self.config = split, texts, tuple(exits), training
        self.num_positions, size = count_positions(texts), training.tokens_per_batch
        if self.num_positions < size:
            raise ValueError(
                f"text gives {self.num_positions} tokens to learn from, less than training.tokens_per_batch = {size}; "
                "raise text.num_texts or text.max_new_tokens, or lower tokens_per_batch"
            )
        self.shards = self._cut()
        self.sizes = [count_positions([texts[i] for i in shard]) // size for shard in self.shards]
        self._held: tuple[int, Batch] | None = None  # the shard in memory

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield batches from step `first` on, without end. Every epoch has another order of shards and positions."""
        step = 0
        for epoch in count():
            for shard in self._order(len(self.shards), epoch, 0):
                if step + self.sizes[shard] <= first:
                    step += self.sizes[shard]
                    continue
                states = self._states(shard)
                order = torch.tensor(self._order(states.hidden.shape[1], epoch, shard + 1))
                for at in order.split(self.config.tokens_per_batch)[: self.sizes[shard]]:
                    if step >= first:
                        yield self._pick(states, at)
                    step += 1

    def _order(self, length: int, *what: int) -> list[int]:
        seed = hash((self.config.seed, *what)) & (2**62 - 1)  # hashes of integers are equal in all processes
        return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()

    def _cut(self) -> list[list[int]]:
        """Indices of texts in shards of about equal size, each of which fits into memory."""
        number = -(-self.num_positions // self.config.max_cached_tokens)
        shards: list[list[int]] = [[] for _ in range(number)]
        before = 0
        for index, text in enumerate(self.texts):
            shards[min(number - 1, before * number // self.num_positions)].append(index)
            before += len(text.positions)
        least = self.config.tokens_per_batch
        full = [shard for shard in shards if count_positions([self.texts[i] for i in shard]) >= least]
        return full or [list(range(len(self.texts)))]

    def _states(self, shard: int) -> Batch:
        if self._held is None or self._held[0] != shard:
            self._held = None  # free memory before the next shard
            texts = [self.texts[i] for i in self.shards[shard]]
            self._held = shard, collect(self.split, texts, self.exits, self.config.top_k)
        return self._held[1]

    def _pick(self, states: Batch, at: Tensor) -> Batch:
        device = self.split.device
        return Batch(
            states.hidden[:, at].to(device, torch.float32),
            states.ids[at].to(device, torch.int64),
            states.log_probs[at].to(device, torch.float32),
        )
