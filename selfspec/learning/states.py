"""What exit heads learn from, by position: hidden states at the exits, and the whole model's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.executors.final_states import before_each
from selfspec.learning.written import Sample, count_positions
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel, Taps

TOKENS_PER_CALL = 2048
CUDA_PAGE_SIZE = 64
LOGITS_AT_ONCE = 1 << 24  # logits in memory at once
MIN_PROB = 2e-9  # of all other tokens together
MIN_LOG_PROB = -1e4  # of a token, so that masked ones give no NaN


class States(NamedTuple):
    """What the model computes at N positions, on its device, in the split model's `hidden_dtype`."""

    hidden: Tensor  # [exits, N, hidden_size], before the final norm
    final: Tensor  # [N, hidden_size], after the last layer and the final norm
    last: Tensor  # [N, hidden_size], the same of the token before; zeros at the first token of a text


class Positions(NamedTuple):
    """What heads learn from at N positions: those of whole answers, in order."""

    hidden: Tensor  # [exits, N, hidden_size], before the final norm
    last: Tensor  # [N, hidden_size], final states one token before
    is_first: Tensor  # bool [N]: whether the position is the first of its answer
    ids: Tensor  # [N, k], the most probable next tokens, the most probable one first
    log_probs: Tensor  # [N, k + 1] of these tokens and, last, of all others together

    @property
    def number(self) -> int:
        return len(self.ids)

    def pick(self, index: int, at: Tensor | slice, device: torch.device) -> Positions:
        """Some positions of one exit, `hidden` `[N, hidden_size]`: float32 and int64, on the model's device."""
        return Positions(
            self.hidden[index, at].to(device, torch.float32),
            self.last[at].to(device, torch.float32),
            self.is_first[at].to(device),
            self.ids[at].to(device, torch.int64),
            self.log_probs[at].to(device, torch.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        """All positions of several parts, in their order."""
        hidden, *others = zip(*parts, strict=True)
        return cls(torch.cat(hidden, 1), *(torch.cat(one) for one in others))


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
        pages = sum(-(-len(texts[i].tokens) // page) for i in group)
        cache = PagedCache(pages, page, split.num_layers, rounds=split.rounds)
        spans = [Span(cache.reserve(len(texts[i].tokens)) or [], 0, len(texts[i].tokens)) for i in group]
        taps: Taps = dict.fromkeys(exits)
        with torch.no_grad():  # no inference mode, since the results are used in training
            rows = PackedRows(cache, spans, split.device)
            final = split.run(rows, 0, split.num_layers, torch.tensor(tokens, device=split.device), taps)
            before = before_each(final.new_zeros(len(group), final.shape[1]), final, [span.length for span in spans])
            at = torch.tensor(kept, device=split.device)
            hidden = torch.stack([taps[layer][at] for layer in exits])  # type: ignore[index]
            yield States(hidden, final[at], before[at])


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


def collect(split: SplitModel, texts: Sequence[Sample], exits: Sequence[int], top_k: int) -> Positions:
    """What heads learn from in texts, on the host: 16-bit hidden states, int32 tokens, float16 log-probabilities.

    Args:
        top_k: number of most probable tokens to keep per position.
    """
    num, width, k = count_positions(texts), hidden_size_of(split), min(top_k, split.vocab_size - 1)
    half = half_of(split)
    kept = Positions(
        torch.empty(len(exits), num, width, dtype=half),
        torch.empty(num, width, dtype=half),
        torch.tensor([place == 0 for text in texts for place in range(len(text.positions))]),
        torch.empty(num, k, dtype=torch.int32),
        torch.empty(num, k + 1, dtype=torch.float16),
    )
    at = 0
    for part in run_texts(split, texts, exits):
        size = len(part.final)
        kept.hidden[:, at : at + size] = part.hidden.to("cpu", half)
        kept.last[at : at + size] = part.last.to("cpu", half)
        for chunk in chunks(split, size):
            with torch.no_grad():
                top, ids = split.logits(part.final[chunk]).log_softmax(-1).topk(k, sorted=True)
            where = slice(at + chunk.start, at + chunk.start + len(ids))
            kept.ids[where], kept.log_probs[where] = ids.cpu().int(), with_rest(top).cpu().half()
        at += size
    return kept


def half_of(split: SplitModel) -> torch.dtype:
    """The 16-bit type in which states are kept."""
    return split.dtype if split.dtype.itemsize < 4 else torch.bfloat16


def with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: `[N, k]` -> `[N, k + 1]`."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=MIN_PROB).log()
    return torch.cat((log_probs.clamp(min=MIN_LOG_PROB), rest), -1)
