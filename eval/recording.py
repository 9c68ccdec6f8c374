"""Record a `Trace`: a teacher-forced pass over a finished output, and drafts continued after a wrong token.

A drafted token is accepted only if all tokens before it are the target's own. So one teacher-forced pass gives every
layer's hit and confidence at every position. After its first wrong token only a draft's length matters, which depends
on the confidences there; these are recorded layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.traces import WRONG_STEPS, Bools, Floats, Trace
from selfspec.control.acceptance import is_prior
from selfspec.control.drafters import deepest_copy
from selfspec.control.plan import SEED_POSITIONS
from selfspec.drafting.early_exit import DraftRow, draft_by_exit
from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.cpu.buffers import Drafter, ProgramLimits, StopRule
from selfspec.executors.cpu.executor import CompiledRounds
from selfspec.executors.picker import Picker, packed_params
from selfspec.executors.shadow import shadow_picks
from selfspec.kernels.pick import num_accepted
from selfspec.loading.target import Target
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams

PAGE = 32
CHUNK = 256  # tokens per forward and per head product
ROWS = 64  # drafts decoded together


def record(
    split: SplitModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams | None = None,
    task: str = "",
    wrong_steps: int = WRONG_STEPS,
) -> Trace:
    """Record the trace of `tokens`, the output of `split` after `prompt` with `params` (default: greedy).

    Args:
        wrong_steps: number of confidences recorded after a wrong token.
    """
    with torch.inference_mode():
        return _Recorder(split, prompt, tokens, params or SamplingParams(), wrong_steps).trace(task)


# By layer and position: hits, confidences, divergences, and hits and confidences over the shortlist.
_Judged = tuple[Bools, Floats, Floats, Bools, Floats]


class _Recorder:
    """Records one trace; pages beyond those of the output hold drafts."""

    def __init__(
        self, split: SplitModel, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, wrong_steps: int
    ) -> None:
        self.split, self.params, self.wrong_steps = split, params, wrong_steps
        self.picker = Picker(split)
        self.prompt, self.tokens = tuple(prompt), list(tokens)
        self.prompt_length = len(prompt)
        self.content = [*prompt, *tokens]
        self.exits = range(1, split.num_layers)
        spare = ROWS * (2 + -(-wrong_steps // PAGE))
        self.cache = PagedCache(-(-len(self.content) // PAGE) + spare, PAGE)
        self.pages = self.cache.reserve(len(self.content)) or []
        self.first = max(0, self.prompt_length - 1 - SEED_POSITIONS)  # index in `content` of the first judged position
        self.picks: list[Tensor] = []  # per chunk [L - 1, positions]

    def trace(self, task: str) -> Trace:
        parts = list(self.forward())
        judged = [np.concatenate([part[i] for part in parts], 1) for i in range(5)]
        at = self.prompt_length - 1 - self.first
        own = torch.cat(self.picks, 1)[:, at:]
        hits, confidences, divergences, short_hits, short_confidences = (each[:, at:] for each in judged)
        wrong = np.full((*hits.shape, self.wrong_steps), np.nan, np.float32)
        for e in self.exits:
            self.continue_wrong(e, hits[e - 1], own[e - 1], wrong[e - 1])
        copied = [self.draft_by_copies(e) for e in range(1, self.deepest_copy + 1)]
        return Trace(
            task,
            self.prompt,
            tuple(self.tokens),
            hits,
            confidences,
            divergences,
            wrong,
            short_hits,
            short_confidences,
            *(each[:, :at] for each in judged[3:]),
            *([np.stack([one[i] for one in copied]) for i in (0, 1)] if copied else ()),
            is_sampled=not self.params.is_greedy,
        )

    @property
    def deepest_copy(self) -> int:
        """The deepest exit layer with copies; 0 where there are none."""
        split, deepest = self.split, deepest_copy(self.split.num_layers)
        return deepest if split.has_copies and self.picker.is_compiled else 0

    def draft_by_copies(self, exit_layer: int) -> tuple[NDArray[np.int16], Floats]:
        """Draft by copies of the layers from every position; returns accepted tokens and all confidences."""
        body = self.split.compiled
        assert isinstance(body, CompiledBody)
        head = body.draft_head(None, rounded=True)
        rounds, drafter = (
            CompiledRounds(body),
            Drafter(exit_layer, head, StopRule(), with_confidence=True, rounded=True),
        )
        accepted = np.zeros(len(self.tokens), np.int16)
        confidences = np.full((len(self.tokens), 1 + self.wrong_steps), np.nan, np.float32)
        for start in range(0, len(accepted), ROWS):
            members = range(start, min(start + ROWS, len(accepted)))
            rows, owned = self.branch([self.prompt_length - 1 + i for i in members], 1 + self.wrong_steps)
            last, packed = [self.content[row.position] for row in rows], packed_params([self.params] * len(rows))
            spans = [Span(*row) for row in rows]
            lengths, limits = [row.length for row in rows], ProgramLimits(1, 0.0, [()] * len(rows))
            [done] = rounds.run(self.cache, spans, last, packed, lengths, drafter, limits)
            for i, row in zip(members, done.rows, strict=True):
                accepted[i] = num_accepted(row.drafted, self.tokens[i:])
                confidences[i, : len(row.confidences)] = row.confidences
            self.cache.release(owned)
        return accepted, confidences

    def branch(self, positions: Sequence[int], steps: int) -> tuple[list[DraftRow], list[int]]:
        """Rows that continue the content from these positions by `steps` tokens, and the pages to release later."""
        rows, owned = [], list[int]()
        for at in positions:
            length = min(steps, self.split.context_limit - at - 1)
            shared, inside = at // PAGE, at % PAGE
            own = self.cache.reserve(inside + length + 1)
            assert own is not None  # the cache has spare pages for ROWS rows
            if inside:
                self.cache.copy(self.pages[shared], own[0])
            rows.append(DraftRow([*self.pages[:shared], *own], at, max(0, length)))
            owned += own
        return rows, owned

    def forward(self) -> Iterator[_Judged]:
        """Run the model over the content, chunk by chunk, and judge the positions from `first` on."""
        inputs = self.content[:-1]
        for start in range(0, len(inputs), CHUNK):
            part = inputs[start : start + CHUNK]
            taps: dict[int, Tensor | None] = dict.fromkeys(self.exits)
            packed = PackedRows(self.cache, [Span(self.pages, start, len(part))], self.split.device)
            given = torch.tensor(part, device=self.split.device)
            last = self.split.run(packed, 0, self.split.num_layers, given, taps)
            skip = max(0, self.first - start)
            if skip < len(part):
                yield self.judge(last[skip:], {e: h[skip:] for e, h in taps.items() if h is not None}, start + skip)

    def judge(self, last: Tensor, taps: dict[int, Tensor], first: int) -> _Judged:
        """Compare every layer's picks with the output.

        Args:
            last, taps: hidden states `[positions, hidden]` of the last layer and of every exit layer.
            first: index in `content` of the first position.
        """
        positions = range(first + 1, first + 1 + len(last))
        several = [self.params] * len(last)
        target = self.split.logits(last)
        judged = self.picker(target, several, positions).tokens
        own = torch.tensor(self.tokens, device=last.device)
        skip = max(0, min(len(last), self.prompt_length - 1 - first))  # positions of the prompt
        judged[skip:] = own[first + 1 + skip - self.prompt_length :][: len(last) - skip]
        log_p = target.log_softmax(-1)
        picks, rows = [], []
        for e in self.exits:
            logits = self.split.logits(taps[e], e)
            log_q = logits.log_softmax(-1)
            chosen, confidences = self.picker(logits, several, positions, with_confidence=True)
            assert confidences is not None
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
            rows.append([x.numpy(force=True) for x in (chosen == judged, confidences, divergence)])
            picks.append(chosen)
        self.picks.append(torch.stack(picks))
        hits, sure, divergences = (np.stack([row[i] for row in rows]) for i in range(3))
        hidden = torch.stack([taps[e] for e in self.exits])
        short = shadow_picks(self.split, self.picker, self.exits, hidden, several, positions, target, judged)
        shadow = np.array(short.hits, bool), np.array(short.confidences, np.float32)
        return hits, sure.astype(np.float32), divergences.astype(np.float32), *shadow

    def continue_wrong(self, exit_layer: int, hits: Bools, picks: Tensor, into: Floats) -> None:
        """Write to `into[i]` the confidences of the draft after the wrong pick at position i."""
        misses = np.flatnonzero(~hits)
        for start in range(0, len(misses), ROWS):
            members = misses[start : start + ROWS]
            rows, owned = self.branch([self.prompt_length + int(i) for i in members], self.wrong_steps)
            self.draft(exit_layer, members, rows, picks[torch.from_numpy(members).to(picks.device)], into)
            self.cache.release(owned)

    def draft(self, exit_layer: int, members: Any, rows: list[DraftRow], tokens: Tensor, into: Floats) -> None:
        def choose(hidden: Tensor, live: list[int], step: int) -> tuple[Tensor, list[int], list[int]]:
            logits = self.split.logits(hidden, exit_layer)
            positions = [rows[r].position + step + 1 for r in live]
            picks = self.picker(logits, [self.params] * len(live), positions, with_confidence=True)
            assert picks.confidences is not None
            into[members[live], step] = picks.confidences.numpy(force=True)
            return picks.tokens, live, []

        draft_by_exit(self.split, self.cache, rows, tokens, exit_layer, choose)


def prior_of(target: Target) -> Any:
    """The acceptance statistics stored with a model; None where there are none that fit it."""
    stored = target.policies.stored_prior
    return stored if is_prior(stored, target.split.num_layers) else None
