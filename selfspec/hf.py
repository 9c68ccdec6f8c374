"""`SelfSpeculative`: the decoding loop for transformers' own `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

import re
from collections import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import StopStringCriteria

from selfspec.control.plan import Policy
from selfspec.core import RoundOutput, Sequence
from selfspec.decoding.engine import MAX_STEP_SECONDS, PAGE_SIZE, LLMEngine
from selfspec.decoding.outputs import CompletionOutput, SpecStats
from selfspec.drafting.datastore import Datastore
from selfspec.errors import refuse_empty
from selfspec.hf_call import Call
from selfspec.llm import LLM
from selfspec.model.refusals import drop_hooks_of_call, refuse_call, refuse_unsplittable
from selfspec.model.views import copied_state, make_twin
from selfspec.params import SpeculativeConfig

KWARGS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
STATEFUL = re.compile(r"(xgrammar|outlines|outlines_core|llguidance)\.|.*(ClassifierFreeGuidance|SynthID)")


@dataclass(eq=False)
class SelfSpeculative:
    """Speculates in place of `generate`'s decoding loop and returns what `generate` returns; no token changes.

    Sampling draws one seed per row from torch's global generator, so `set_seed` makes it reproducible: tokens follow
    the distribution `generate` samples from, but are other draws. Logits processors are asked about trial prefixes and
    must be pure functions of the prefix; stopping criteria are asked about each row's every kept token.

    Args:
        exit_layer: layers the draft runs; `fixed` defaults to `generation_config.exit_layer`, else a quarter.
        num_speculative_tokens: drafted each round; default: `generation_config`'s, else 4.
        policy: a name, or a `selfspec.Policy`; default: `adaptive`, or `fixed` where an exit layer or a
            draft length is named. `generate` takes these three by name too.
        drafters: where `adaptive` may take drafts from, some of `selfspec.params.DRAFTERS`; default: all.
        corpus: a file that `selfspec corpus build` wrote, or a `selfspec.Datastore`, in which `adaptive` looks
            drafts up too; `Datastore.open(file, tokenizer)` also checks that it belongs to the tokenizer.
        streamer: belongs here, since `generate(streamer=...)` never hands it on. It gets the prompt, then each block
            of kept tokens (of several rows, each complete column), and always its end.
        exact: not even a rounding depends on how tokens were drafted. It needs compiled layers, or fused ones on CUDA.
        stop_strings: texts that end a row once it holds one of them; they and the `tokenizer` belong here, since
            `generate(stop_strings=..., tokenizer=...)` keeps the tokenizer from a callable and then asks for it.

    Raises:
        ValueError: stop strings that are no texts, or without a tokenizer.

    Example:
        >>> speculate = SelfSpeculative(exit_layer=8, streamer=TextStreamer(tokenizer))
        >>> output = model.generate(**inputs, custom_generate=speculate, max_new_tokens=64)
        >>> speculate.stats.mean_acceptance_length
    """

    exit_layer: int | None = None
    num_speculative_tokens: int | None = None
    policy: str | Policy | None = None
    drafters: abc.Sequence[str] | None = None
    corpus: str | Path | Datastore | None = None
    streamer: Any = None
    exact: bool = False
    stop_strings: str | abc.Sequence[str] | None = None
    tokenizer: Any = None
    completions: list[CompletionOutput] = field(default_factory=list, init=False)  # one per row of the last call
    _llms: WeakKeyDictionary[nn.Module, Any] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.streamer is not None and not (hasattr(self.streamer, "put") and hasattr(self.streamer, "end")):
            raise ValueError(f"streamer must have put and end, as transformers' have, got {self.streamer!r}")
        refuse_empty("stop_strings", self._stops())
        if self._stops() and self.tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer whose tokens they are texts of; pass tokenizer=... too")

    def __getstate__(self) -> dict[str, Any]:
        """Without the models that were opened up: a copy opens them anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_llms"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _llms=WeakKeyDictionary())

    @property
    def stats(self) -> SpecStats:
        """Counts of the last call, all rows together."""
        return sum((one.stats for one in self.completions if one.stats is not None), SpecStats())

    def __call__(
        self,
        model: Any,
        ids: Tensor,
        exit_layer: int | None = None,
        num_speculative_tokens: int | None = None,
        policy: str | Policy | None = None,
        **given: Any,
    ) -> Any:
        """What `generate` calls: token ids `[B, S]` in, `[B, S + new]` out, or a `GenerateDecoderOnlyOutput`.
        Beyond a row's end its scores and logits are zeros; `past_key_values` is None.

        Raises:
            ValueError: the call asks for something that this loop does not serve; the sentence says what to do instead.
            UnsupportedModelError: the model cannot be split, with the reason.
        """
        self.completions = []
        try:
            config = given["generation_config"]
            refuse_call(model)
            _refuse(model, **given)
            llm = self._llm(model, exit_layer, num_speculative_tokens, policy, len(ids))
            target = llm.target
            split = target.refresh(self.exact)
            split.model.generation_config = config  # the twin's: the engine's defaults come from there
            if self._stops():
                stop = StopStringCriteria(self.tokenizer, self._stops())
                given["stopping_criteria"] = [*given["stopping_criteria"], stop]
            call = Call(ids, split.context_limit, given)
            share = -(-call.longest // PAGE_SIZE) * PAGE_SIZE  # whole pages, so that all rows fit at once
            engine = llm._engine(  # `llm.engine` would compare all weights again
                split,
                llm.max_num_seqs,
                max_num_cached_tokens=len(ids) * share,
                prefill_chunk=config.prefill_chunk_size or 512,
                max_step_seconds=MAX_STEP_SECONDS if self.streamer is None else None,
                prefix_cache=llm.prefix_cache,
            )
            rows = self._decode(engine, call)
            llm.keep_statistics(engine)
            self.completions = [
                CompletionOutput(0, "", row.completion_token_ids, row.finish_reason, stats=row.stats) for row in rows
            ]
            return call.output(rows)
        except BaseException:
            drop_hooks_of_call(model)
            raise
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _stops(self) -> list[str]:
        given: Any = self.stop_strings
        if given is None or isinstance(given, list | tuple):
            return list(given or ())
        return [given]

    def _decode(self, engine: LLMEngine, call: Call) -> list[Sequence]:
        if self.streamer is not None:
            self.streamer.put(call.input_ids.cpu())
        requests = call.requests()
        for row, request in enumerate(requests):
            engine.add_request(str(row), request)
        tokens: list[list[int]] = [[] for _ in requests]
        done: dict[int, Sequence] = {}
        sent = 0

        def on_round(round_: RoundOutput) -> None:
            nonlocal sent
            for row in round_.rows:
                at = int(row.sequence.request_id)
                tokens[at] += row.token_ids
                if row.finish_reason is not None:
                    done[at] = row.sequence
            if self.streamer is not None:
                block = call.columns(tokens, done, sent)
                sent += block.shape[1]
                if block.shape[1]:  # none while the prompt is being read
                    for part in block.T if len(tokens) > 1 else block:
                        self.streamer.put(part)

        while engine.has_unfinished_requests():
            engine.step(on_round)
        return [done[row] for row in range(len(tokens))]

    def _llm(
        self,
        model: nn.Module,
        exit_layer: int | None,
        num_speculative_tokens: int | None,
        policy: str | Policy | None,
        num_rows: int,
    ) -> LLM:
        """The model opened up: once, and again when anything has changed that a twin copies instead of sharing."""
        state = copied_state(model)
        if self._llms.get(model, (None,))[0] != state:
            refuse_unsplittable(model)
            self._llms[model] = state, LLM(make_twin(model), prefix_cache=False)  # so that the model is not kept alive
        llm: LLM = self._llms[model][1]
        llm.max_num_seqs, llm.exact = num_rows, self.exact
        llm.speculative = SpeculativeConfig(
            policy=self.policy if policy is None else policy,
            exit_layer=self.exit_layer if exit_layer is None else exit_layer,
            num_speculative_tokens=(
                self.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
            ),
            drafters=self.drafters,
            corpus=self.corpus,
            reuse_responses=False,
        )
        return llm


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
