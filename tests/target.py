"""An opened model as most tests use it: prompts and parameters by name in, outputs out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.decoding.outputs import CompletionOutput
from selfspec.llm import several_prompts
from selfspec.loading import target
from selfspec.loading.hub import open_target

SPECULATIVE = {field.name for field in fields(SpeculativeConfig)}
PER_PROMPT = ("max_tokens", "seed", "temperature")  # which may be lists


class Target(target.Target):
    def llm(self, *, exact: bool = False, max_num_seqs: int = 8, **speculative: Any) -> LLM:
        """An `LLM` of this opened model, which keeps no prefixes."""
        made = object.__new__(LLM)
        made.target, made.speculative = self, SpeculativeConfig(**speculative)
        made.exact, made.max_num_seqs = exact, max_num_seqs
        made._prefix_cache, made.prefix_cache_tokens = False, 0
        return made

    def generate(
        self, prompts: Any, *, exact: bool = False, max_num_seqs: int = 8, on_round: Any = None, **options: Any
    ) -> list[CompletionOutput]:
        """One output per prompt.

        Args:
            options: fields of `SamplingParams`, some of which may be lists with a value per prompt, and of
                `SpeculativeConfig`.
        """
        speculative = {name: options.pop(name) for name in SPECULATIVE & options.keys()}
        llm = self.llm(exact=exact, max_num_seqs=max_num_seqs, **speculative)

        def params(at: int) -> SamplingParams:
            several = {name: options[name][at] for name in PER_PROMPT if isinstance(options.get(name), list)}
            return SamplingParams(**{**options, **several})

        all_params = [params(at) for at in range(len(several_prompts(prompts)))]
        return [output.outputs[0] for output in llm.generate(prompts, all_params, on_round=on_round)]


def load(model: Any, tokenizer: Any = None, **options: Any) -> Target:
    made = open_target(model, tokenizer, **options)
    made.__class__ = Target
    return made  # type: ignore[return-value]
