"""selfspec as a model of lm-evaluation-harness (EleutherAI, lm_eval 0.4), registered under the name `selfspec`.

Its prompts have the same tokens as those of the harness's own model `hf`. The engine decodes all requests of a task in
one running batch; log-likelihoods come from the split model that verifies drafts. The harness knows the model once
this module is imported:

    from eval.harness import SelfSpecLM
    lm_eval.simple_evaluate(model=SelfSpecLM("smollm2"), tasks=["gsm8k"])
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor

from eval.config import Common
from eval.methods import parse_method
from eval.models import all_logits, open_llm
from selfspec import SamplingParams, SpeculativeConfig

SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@register_model("selfspec")
class SelfSpecLM(HFLM):
    """A selfspec model for lm-evaluation-harness.

    Args:
        pretrained: model to open: "demo", "smollm2", a folder, a GGUF file, a hub id, or a transformers model.
        policy: a method of selfspec, such as "adaptive", "plain" or "fixed:4,4".
        batch_size: rows decoded or scored together.
        options: other arguments of the harness's `HFLM`, such as `max_length` and `add_bos_token`.

    Raises:
        ValueError: the policy is unknown; see also `eval.models.open_llm`.
    """

    def __init__(
        self,
        pretrained: Any = "demo",
        *,
        tokenizer: Any = None,
        policy: str = "adaptive",
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 8,
        **options: Any,
    ) -> None:
        method = parse_method(policy)
        if not method.is_ours:
            raise ValueError(f"policy must be a method of selfspec, such as adaptive or fixed:4,4, got {policy!r}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size must be a whole number of at least 1 (auto is not supported), got {batch_size!r}"
            )
        is_name = isinstance(pretrained, str)
        config = Common(device=device or "", dtype=dtype) if is_name else None
        self.llm = open_llm(pretrained, config, tokenizer=tokenizer)
        if self.llm.tokenizer is None:
            raise ValueError("the model has no tokenizer, and tasks are text; put one into the model's folder")
        if self.llm.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token, which the harness needs; set its eos_token")
        self.settings = method.settings
        super().__init__(
            pretrained=self.llm.target.split.model, tokenizer=self.llm.tokenizer, batch_size=int(batch_size), **options
        )

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits `[batch, length, vocab]` after ids `[batch, length]`, for the harness's scores."""
        return all_logits(self.llm, inps)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of every request, up to its first stop string; requests with equal settings are decoded together."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for indices in groups.values():
            contexts = [requests[i].args[0] for i in indices]
            made = self._generate(contexts, dict(requests[indices[0]].args[1]))
            for i, text in zip(indices, made, strict=True):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _generate(self, contexts: list[str], given: dict[str, Any]) -> list[str]:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        until = handle_stop_sequences(settings.pop("until", None), eos=None)
        max_new, is_sampled = settings.pop("max_gen_toks"), bool(settings.pop("do_sample", False))
        sampling = {name: settings[name] for name in SAMPLING if name in settings} if is_sampled else {}
        max_prompt = self.max_length - max_new
        if max_prompt < 1:
            raise ValueError(f"max_gen_toks must be below the context of {self.max_length} tokens, got {max_new}")
        prompts = [self.tok_encode(context, left_truncate_len=max_prompt) for context in contexts]
        stop = [text for text in until if text]
        params = SamplingParams(max_tokens=max_new, stop=stop, generation_config=False, **sampling)
        llm = self.llm.with_speculative(SpeculativeConfig(**self.settings))
        llm.max_num_seqs = self.batch_size
        done = [request.outputs[0].text for request in llm.generate(prompts, params)]
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        return [postprocess_generated_text(text, [*until, end], None) for text in done]
