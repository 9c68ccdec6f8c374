"""selfspec as a model of lm-evaluation-harness (EleutherAI, lm_eval 0.4), registered under the name `selfspec`.

Its tokens are those of the harness's own model `hf`. Texts are written by the engine, all of a task's requests in one
running batch; log-likelihoods come from the same split model that verifies drafts. The harness finds no models by
entry point, so import this module first:

    python -m eval quality --model selfspec --model_args pretrained=MODEL,policy=adaptive --tasks gsm8k

is lm_eval's own command line with this module imported. In Python:

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
from eval.models import all_logits, complete, open_target

SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@register_model("selfspec")
class SelfSpecLM(HFLM):
    """An opened target, asked as the harness asks.

    Args:
        pretrained: what to open: "demo", "smollm2", a folder, a GGUF file, a hub id, or a transformers model.
        policy: a method of selfspec, such as "adaptive", "plain" or "fixed:4,4".
        batch_size: rows decoded or scored together.
        options: further ones of the harness's `HFLM`, such as `max_length` and `add_bos_token`.

    Raises:
        ValueError: no such policy; see also `eval.models.open_target`.
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
                f"batch_size must be a whole number of at least 1 (auto is not served), got {batch_size!r}"
            )
        is_name = isinstance(pretrained, str)
        config = Common(device=device or "", dtype=dtype) if is_name else None
        self.target = open_target(pretrained, config, tokenizer=tokenizer)
        if self.target.tokenizer is None:
            raise ValueError("the model has no tokenizer, and tasks are text; put one beside the model")
        if self.target.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token, which the harness asks for; set its eos_token")
        self.settings = method.settings
        super().__init__(
            pretrained=self.target.stack.model,
            tokenizer=self.target.tokenizer,
            batch_size=int(batch_size),
            **options,
        )

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits `[batch, length, vocab]` after ids `[batch, length]`: what the harness scores by."""
        return all_logits(self.target, inps)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of every request, up to its first stop string; those of the same settings are decoded together."""
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
        asked: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        until = handle_stop_sequences(asked.pop("until", None), eos=None)
        most, is_sampled = asked.pop("max_gen_toks"), bool(asked.pop("do_sample", False))
        sampling = {name: asked[name] for name in SAMPLING if name in asked} if is_sampled else {}
        room = self.max_length - most
        if room < 1:
            raise ValueError(f"max_gen_toks is {most}, which leaves no room in the context of {self.max_length} tokens")
        prompts = [self.tok_encode(context, left_truncate_len=room) for context in contexts]
        done = complete(
            self.target,
            prompts,
            most,
            stop=[text for text in until if text],
            max_batch_size=self.batch_size,
            **self.settings,
            **sampling,
        )
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        return [postprocess_generated_text(text, [*until, end], None) for text in done]
