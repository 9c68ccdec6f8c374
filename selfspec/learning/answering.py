"""The model's answers and, in the same pass, what heads learn from at their positions."""

from __future__ import annotations

from collections.abc import Sequence, Set
from zlib import crc32

import torch
from torch import Tensor

from selfspec.executors.final_states import before_each
from selfspec.learning.states import (
    CUDA_PAGE_SIZE,
    TOKENS_PER_CALL,
    Positions,
    States,
    chunks,
    half_of,
    with_rest,
)
from selfspec.learning.written import Sample, Task
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel, Taps


def answer_and_collect(
    split: SplitModel, tasks: Sequence[Task], ends: Set[int], exits: Sequence[int], top_k: int
) -> tuple[list[Sample], Positions]:
    """Answer tasks together by plain decoding. A task's answer depends on the task alone.

    Args:
        tasks: at least one.
        ends: token ids that end an answer, which has them.
        top_k: number of most probable tokens to keep per position.

    Returns:
        The answers, and the positions of all of them as `collect` gives them, answer by answer.
    """
    batch = _Batch(split, tasks, exits)
    seeds = [crc32(repr((task.seed, task.prompt)).encode()) for task in tasks]
    noise = [torch.Generator(split.device).manual_seed(seed) for seed in seeds]
    outputs, at = [list[int]() for _ in tasks], list[list[int]]([] for _ in tasks)
    parts, number, live = list[Positions](), 0, list(range(len(tasks)))
    with torch.no_grad():  # no inference mode, since the results are used in training
        states = batch.read()
        while live:
            kept, logits = _kept(split, states, top_k, is_first=not parts)
            parts.append(kept)
            goes_on = []
            for place, row in enumerate(live):
                at[row].append(number + place)
                outputs[row].append(_pick(logits[place], kept.ids[place], tasks[row].temperature, noise[row]))
                if outputs[row][-1] not in ends and len(outputs[row]) < tasks[row].limit:
                    goes_on.append(row)
            number, live = number + len(live), goes_on
            if live:
                states = batch.step(live, [outputs[row] for row in live])
    order, joined = torch.tensor([place for own in at for place in own]), Positions.joined(parts)
    seen = Positions(joined.hidden[:, order], *(part[order] for part in joined[1:]))
    samples = zip(tasks, outputs, strict=True)
    return [Sample([*task.prompt, *output], len(task.prompt)) for task, output in samples], seen


def _kept(split: SplitModel, states: States, top_k: int, is_first: bool) -> tuple[Positions, Tensor]:
    """What is learned from, on the host; logits `[N, vocab]`."""
    logits = torch.cat([split.logits(states.final[chunk]) for chunk in chunks(split, len(states.final))])
    top, ids = logits.topk(min(top_k, split.vocab_size - 1), sorted=True)
    log_probs = with_rest(top - logits.logsumexp(-1, keepdim=True))
    hidden, last = (one.to("cpu", half_of(split)) for one in (states.hidden, states.last))
    firsts = torch.full((len(ids),), is_first)
    return Positions(hidden, last, firsts, ids.cpu().int(), log_probs.cpu().half()), logits


def _pick(logits: Tensor, ids: Tensor, temperature: float, noise: torch.Generator) -> int:
    if temperature == 0:
        return int(ids[0])
    return int((logits / temperature).softmax(-1).multinomial(1, generator=noise))


class _Batch:
    """Rows of a cache of their own: prompts are read, then every step takes a token per row."""

    def __init__(self, split: SplitModel, tasks: Sequence[Task], exits: Sequence[int]) -> None:
        self.split, self.tasks, self.exits = split, tasks, exits
        lengths = [len(task.prompt) + task.limit for task in tasks]
        page = max(lengths) if split.device.type == "cpu" else CUDA_PAGE_SIZE
        self.cache = PagedCache(
            sum(-(-length // page) for length in lengths), page, split.num_layers, rounds=split.rounds
        )
        self.pages = [self.cache.reserve(length) or [] for length in lengths]

    def read(self) -> States:
        """Read all prompts, some in each call; the states at their last tokens."""
        parts, group = list[States](), list[int]()
        for row in range(len(self.tasks)):
            group.append(row)
            size = sum(len(self.tasks[one].prompt) for one in group)
            if row + 1 == len(self.tasks) or size + len(self.tasks[row + 1].prompt) > TOKENS_PER_CALL:
                prompts = [self.tasks[one].prompt for one in group]
                ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
                spans = [Span(self.pages[one], 0, len(self.tasks[one].prompt)) for one in group]
                parts.append(self._run(spans, [token for prompt in prompts for token in prompt], ends))
                group = []
        hidden, *others = zip(*parts, strict=True)
        states = States(torch.cat(hidden, 1), *(torch.cat(one) for one in others))
        self.finals = states.final.clone()
        return states

    def step(self, rows: Sequence[int], outputs: Sequence[Sequence[int]]) -> States:
        """Run the last token of some rows."""
        starts = [len(self.tasks[row].prompt) + len(own) - 1 for row, own in zip(rows, outputs, strict=True)]
        spans = [Span(self.pages[row], start, 1) for row, start in zip(rows, starts, strict=True)]
        last, states = self.finals[rows], self._run(spans, [own[-1] for own in outputs], None)
        self.finals[rows] = states.final
        return states._replace(last=last)

    def _run(self, spans: Sequence[Span], tokens: Sequence[int], at: Tensor | None) -> States:
        split, taps = self.split, Taps(dict.fromkeys(self.exits))
        rows = PackedRows(self.cache, spans, split.device)
        final = split.run(rows, 0, split.num_layers, torch.tensor(tokens, device=split.device), taps)
        where = slice(None) if at is None else at.to(split.device)
        before = before_each(final.new_zeros(len(spans), final.shape[1]), final, [span.length for span in spans])
        hidden = torch.stack([taps[layer][where] for layer in self.exits])  # type: ignore[index]
        return States(hidden, final[where], before[where])
