"""One call of transformers' `model.generate`: its rows without padding as requests, and what `generate` returns."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as lp
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.core import Request, Sequence
from selfspec.decoding.defaults import peel
from selfspec.params import SamplingParams


class Call:
    """One call of `generate` as rows without padding; processors and criteria are shown the padding all the same."""

    def __init__(self, input_ids: Tensor, limit: int, given: dict[str, Any]) -> None:
        config, criteria = given["generation_config"], given["stopping_criteria"]
        self.input_ids, self.config = input_ids, config
        self.starts = _starts(input_ids, given.get("attention_mask"), given.get("position_ids"))
        length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=config.max_length)
        self.max_new_tokens = max(1, length - input_ids.shape[1])
        self.longest = input_ids.shape[1] - min(self.starts) + self.max_new_tokens
        if (over := self.longest - limit) > 0:
            problem = f"prompt and new tokens must fit the model's context of {limit} tokens, got {self.longest}"
            raise ValueError(f"{problem}; lower max_new_tokens by {over} or shorten the prompt")
        padded = enumerate(self.starts)
        self.peeled = [peel(given["logits_processor"], config.do_sample, row, padding) for row, padding in padded]
        eos = [t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten().tolist()]
        self.eos = frozenset(eos)
        self.pad: int | None = None  # every row then runs on, as generate() lets it, until all have ended
        if any(hasattr(c, "eos_token_id") for c in criteria):
            self.pad = next(iter(eos), None) if config.pad_token_id is None else config.pad_token_id
        self.criteria = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.ends: list[int | None] = [None] * len(input_ids)  # lengths at which criteria have ended rows

    def requests(self) -> list[Request]:
        count, config = len(self.starts), self.config
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (count,)).tolist() if config.do_sample else [0] * count
        return [
            Request(
                self.input_ids[row, start:].tolist(),
                SamplingParams(
                    **self.peeled[row][1],
                    max_tokens=self.max_new_tokens,
                    seed=seeds[row],
                    logits_processors=partial(self._process, row) if self.peeled[row][0] else None,
                ),
                self.eos,
                stopping_criteria=(partial(self._ends, row),) if self.criteria else (),
                keep_logits=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
            )
            for row, start in enumerate(self.starts)
        ]

    def _padded(self, row: int, ids: Tensor) -> Tensor:
        return torch.cat([self.input_ids[row : row + 1, : self.starts[row]], ids.to(self.input_ids.device)], 1)

    def _process(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Ask about one row `[1, ...]`; about a batch of its copies where a processor tells rows apart, or might."""
        count, ids, out = len(self.starts), self._padded(row, ids), scores.to(self.input_ids.device)
        for process in self.peeled[row][0]:
            if type(process) is lp.PrefixConstrainedLogitsProcessor:
                allowed = partial(lambda ask, _, one: ask(row, one), process._prefix_allowed_tokens_fn)
                process = lp.PrefixConstrainedLogitsProcessor(allowed, 1)
            by_row = type(process).__name__.startswith(("Encoder", "RepetitionPenalty"))
            if count == 1 or (type(process).__module__ == lp.__name__ and not by_row):
                out = process(ids, out)
            else:
                out = process(ids.repeat(count, 1), out.repeat(count, 1))[row : row + 1]
        return out.to(scores.device)

    def _ends(self, row: int, ids: Tensor, scores: None) -> bool:
        padded = self._padded(row, ids)
        answers = [bool(torch.as_tensor(criterion(padded, None)).all()) for criterion in self.criteria]
        if self.ends[row] is None and any(answers):
            self.ends[row] = padded.shape[1]
        ends = self.ends if self.pad is None else [self.ends[row]]
        return all(end is not None and end <= padded.shape[1] for end in ends)

    def columns(self, tokens: abc.Sequence[list[int]], ended: Iterable[int], first: int = 0) -> Tensor:
        """New tokens `[B, n]` on the CPU, as far as every row has come; rows that have ended are padded."""
        lengths = [len(row) for row in tokens]
        going = lengths if self.pad is None else [n for row, n in enumerate(lengths) if row not in set(ended)]
        width = min(going, default=max(lengths))
        padded = [[*row[first:width], *[self.pad] * (width - max(first, len(row)))] for row in tokens]
        return torch.tensor(padded, dtype=torch.int64)

    def output(self, rows: abc.Sequence[Sequence]) -> Any:
        new = self.columns([c.completion_token_ids for c in rows], range(len(rows))).to(self.input_ids)
        made: dict[str, Any] = {"sequences": torch.cat([self.input_ids, new], 1)}
        for name in ("scores", "logits"):
            if self.config.return_dict_in_generate and getattr(self.config, f"output_{name}"):
                padded = pad_sequence([torch.stack(getattr(c, name)) for c in rows], batch_first=True)
                made[name] = padded[:, : new.shape[1]].to(self.input_ids.device).unbind(1)
        return GenerateDecoderOnlyOutput(**made) if self.config.return_dict_in_generate else made["sequences"]


def _starts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Where each row's prompt begins, after its padding."""
    mask = torch.ones_like(input_ids) if mask is None else mask
    starts = (mask == 0).sum(-1, keepdim=True)
    at = torch.arange(input_ids.shape[1], device=input_ids.device) - starts  # [B, S]
    if mask.shape != input_ids.shape or not torch.equal(mask != 0, at >= 0) or not mask[:, -1].all():
        raise ValueError("attention_mask must be zeros, then ones, in every row; pad with padding_side='left'")
    if position_ids is not None:
        given = position_ids if len(position_ids) == len(input_ids) else position_ids[:1]
        if given.shape[1:] != at.shape[1:] or not ((given == at) | (at < 0)).all():
            raise ValueError("position_ids must count each row's tokens from 0, got others; leave them out")
    return starts[:, 0].tolist()
