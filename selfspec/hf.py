"""`SelfSpeculative`: the decoding loop for transformers' own `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as lp
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.api import Target
from selfspec.control.plan import Policy
from selfspec.decoding.engine import CUDA_PAGE_SIZE, Engine
from selfspec.decoding.pick import Sampling
from selfspec.decoding.request import Completion, Request
from selfspec.decoding.stats import SpecStats
from selfspec.drafting.datastore import Datastore
from selfspec.target.views import copied_state, make_twin

KWARGS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
STATEFUL = re.compile(r"(xgrammar|outlines|outlines_core|llguidance)\.|.*(ClassifierFreeGuidance|SynthID)")
FILTERS = (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper)
FILTER_NAMES = ("temperature", "top_k", "top_p", "min_p")  # of the same in `Sampling`; both are applied in this order


@dataclass(eq=False)
class SelfSpeculative:
    """Speculates in place of `generate`'s decoding loop and returns what `generate` returns; no token changes.

    Sampling draws one seed per row from torch's global generator, so `set_seed` makes it reproducible: tokens follow
    the distribution `generate` samples from, but are other draws. Logits processors are asked about trial prefixes and
    must be pure functions of the prefix; stopping criteria are asked about each row's every kept token.

    Args:
        exit_layer: layers the draft runs; `fixed` defaults to `generation_config.exit_layer`, else a quarter.
        num_draft_tokens: drafted each round; default: `generation_config`'s, else 4.
        policy: a name, or an object with `plan` and `observe`; default: `adaptive`, or `fixed` where an exit layer or a
            draft length is named. `generate` takes these three by name too.
        drafts: where those of `adaptive` may come from, some of `control.plan.DRAFTS`; default: all but
            "recycle".
        datastore: a file that `selfspec datastore build` wrote, or a `selfspec.Datastore`, in which `adaptive` looks
            drafts up too; `Datastore.open(file, tokenizer)` also checks that it belongs to the tokenizer.
        streamer: belongs here, since `generate(streamer=...)` never hands it on. It gets the prompt, then each block
            of kept tokens (of several rows, each complete column), and always its end.
        exact: run every call in constant shapes, so that not even a rounding depends on how tokens were drafted.

    Example:
        >>> speculate = SelfSpeculative(exit_layer=8, streamer=TextStreamer(tokenizer))
        >>> output = model.generate(**inputs, custom_generate=speculate, max_new_tokens=64)
        >>> speculate.stats.mean_acceptance_length
    """

    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    policy: str | Policy | None = None
    drafts: Sequence[str] | None = None
    datastore: str | Path | Datastore | None = None
    streamer: Any = None
    exact: bool = False
    completions: list[Completion] = field(default_factory=list, init=False)  # one per row of the last call
    _targets: WeakKeyDictionary[nn.Module, Any] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    @property
    def stats(self) -> SpecStats:
        """Counts of the last call, all rows together."""
        return sum((completion.stats for completion in self.completions), SpecStats())

    def __call__(
        self,
        model: Any,
        ids: Tensor,
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        policy: str | Policy | None = None,
        **given: Any,
    ) -> Any:
        """What `generate` calls: token ids `[B, S]` in, `[B, S + new]` out, or a `GenerateDecoderOnlyOutput`.
        Beyond a row's end its scores and logits are zeros; `past_key_values` is None.

        Raises:
            ValueError: the call asks for something that this loop does not serve; the sentence says what to do instead.
            UnsupportedModelError: the model cannot be split, with the reason.
        """
        self.completions, config = [], given["generation_config"]
        try:
            _refuse(model, **given)
            target = self._target(model)
            target.stack.model.generation_config = config  # the twin's: the engine's defaults come from there
            call = _Call(ids, target.stack.context_limit, given)
            share = -(-call.longest // CUDA_PAGE_SIZE) * CUDA_PAGE_SIZE  # whole pages, so that all rows fit at once
            engine = Engine(
                target,
                policy=self.policy if policy is None else policy,
                exit_layer=self.exit_layer if exit_layer is None else exit_layer,
                num_draft_tokens=self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
                drafts=self.drafts,
                datastore=Datastore.of(self.datastore),
                max_batch_size=len(ids),
                max_cached_tokens=len(ids) * share,
                prefill_chunk=config.prefill_chunk_size or 512,
                exact=self.exact,
            )
            self.completions = self._decode(engine, call)
            target.remember(engine)
            return call.output(self.completions)
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _decode(self, engine: Engine, call: _Call) -> list[Completion]:
        if self.streamer is not None:
            self.streamer.put(call.input_ids.cpu())
        tokens: list[list[int]] = [[] for _ in map(engine.submit, call.requests())]
        done: dict[int, Completion] = {}
        sent = 0
        for round_ in engine.run():
            for row in round_.rows:
                tokens[row.request_id] += row.tokens
            done |= {row.request_id: row.completion for row in round_.rows if row.completion is not None}
            if self.streamer is not None:
                block = call.columns(tokens, done, sent)
                sent += block.shape[1]
                if block.shape[1]:  # none while the prompt is being read
                    for part in block.T if len(tokens) > 1 else block:
                        self.streamer.put(part)
        return [done[row] for row in range(len(tokens))]

    def _target(self, model: nn.Module) -> Target:
        """The model opened up: once, and again when anything has changed that a twin copies instead of sharing."""
        state = copied_state(model)
        if self._targets.get(model, (None,))[0] != state:
            self._targets[model] = state, Target(make_twin(model))  # a twin, so that the model is not kept alive
        return self._targets[model][1]


class _Call:
    """One call of `generate` as rows without padding; processors and criteria are shown the padding all the same."""

    def __init__(self, input_ids: Tensor, limit: int, given: dict[str, Any]) -> None:
        config, criteria = given["generation_config"], given["stopping_criteria"]
        self.input_ids, self.config = input_ids, config
        self.starts = _starts(input_ids, given.get("attention_mask"), given.get("position_ids"))
        length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=config.max_length)
        self.max_new_tokens = max(1, length - input_ids.shape[1])
        self.longest = input_ids.shape[1] - min(self.starts) + self.max_new_tokens
        if (over := self.longest - limit) > 0:
            told = f"prompt and new tokens must fit the model's context of {limit} tokens, got {self.longest}"
            raise ValueError(f"{told}; lower max_new_tokens by {over} or shorten the prompt")
        self.processors, self.sampling = _peel(given["logits_processor"], config.do_sample)
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
                self.max_new_tokens,
                Sampling(**self.sampling, seed=seeds[row]),
                eos=self.eos,
                logits_processor=[partial(self._process, row)] if self.processors else [],
                stopping_criteria=[partial(self._ends, row)] if self.criteria else [],
                keep_logits=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
            )
            for row, start in enumerate(self.starts)
        ]

    def _padded(self, row: int, ids: Tensor) -> Tensor:
        return torch.cat([self.input_ids[row : row + 1, : self.starts[row]], ids.to(self.input_ids.device)], 1)

    def _process(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Ask about one row `[1, ...]`; about a batch of its copies where a processor tells rows apart, or might."""
        count, ids, out = len(self.starts), self._padded(row, ids), scores.to(self.input_ids.device)
        for process in self.processors:
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

    def columns(self, tokens: Sequence[list[int]], ended: Iterable[int], first: int = 0) -> Tensor:
        """New tokens `[B, n]` on the CPU, as far as every row has come; rows that have ended are padded."""
        lengths = [len(row) for row in tokens]
        going = lengths if self.pad is None else [n for row, n in enumerate(lengths) if row not in set(ended)]
        width = min(going, default=max(lengths))
        padded = [[*row[first:width], *[self.pad] * (width - max(first, len(row)))] for row in tokens]
        return torch.tensor(padded, dtype=torch.int64)

    def output(self, completions: Sequence[Completion]) -> Any:
        new = self.columns([c.tokens for c in completions], range(len(completions))).to(self.input_ids)
        made: dict[str, Any] = {"sequences": torch.cat([self.input_ids, new], 1)}
        for name in ("scores", "logits"):
            if self.config.return_dict_in_generate and getattr(self.config, f"output_{name}"):
                rows = pad_sequence([torch.stack(getattr(c, name)) for c in completions], batch_first=True)
                made[name] = rows[:, : new.shape[1]].to(self.input_ids.device).unbind(1)
        return GenerateDecoderOnlyOutput(**made) if self.config.return_dict_in_generate else made["sequences"]


def _refuse(model: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kw: Any) -> None:
    """Name what this loop does not serve, before anything is decoded."""
    served = ("greedy_search", "sample", "assisted_generation")  # the last is HF's own drafting, which ours replaces
    mode, cache = generation_config.get_generation_mode().value, kw.get("past_key_values")
    cached = 0 if cache is None else cache.get_seq_length()
    others = ", ".join(sorted(k for k, value in kw.items() if value is not None and k not in KWARGS))
    kinds = [f"{type(process).__module__}.{type(process).__name__}" for process in logits_processor]
    stateful = ", ".join(kind for kind in kinds if STATEFUL.match(kind))
    for problem, sentence in (
        (model.config.is_encoder_decoder, "model must be decoder-only, got an encoder-decoder; pass another"),
        (mode not in served, f"decoding must be greedy or sampling, got {mode}; set num_beams=1"),
        (cached, f"past_key_values must be empty, got {cached} tokens; leave it out, pass the whole text as input_ids"),
        (others, f"generate() must be given token ids and their mask alone, got {others} too; leave that out"),
        (stateful, f"logits processors must be pure functions of the prefix, got {stateful}; leave it out"),
    ):  # fmt: skip
        if problem:
            raise ValueError(f"{sentence}, or decode without custom_generate")


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


def _peel(processors: Iterable[Any], do_sample: bool) -> tuple[list[Any], dict[str, Any]]:
    """The list, and as fields of `Sampling`, which serves all rows at once, the filters that were at its end."""
    rest, fields = list(processors), {"temperature": 1.0 if do_sample else 0.0}
    for kind, name in list(zip(FILTERS, FILTER_NAMES, strict=True))[::-1] if do_sample else ():
        last = rest[-1] if rest else None
        usual = getattr(last, "filter_value", -torch.inf) == -torch.inf and getattr(last, "min_tokens_to_keep", 1) == 1
        if type(last) is kind and usual and getattr(last, name) > 0:
            fields[name] = getattr(rest.pop(), name)
    return rest, fields
