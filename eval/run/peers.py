"""transformers' own decoders as methods, on the very model that the target shares its weights with."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from eval.methods import greedy_without_end
from eval.run.names import MethodName
from eval.run.turns import Prompt, Steps, Turn
from eval.timing import timed
from selfspec.hub import open_model
from selfspec.legacy import LoadedTarget as Target


class _Streamer(BaseStreamer):
    """Hands every step's tokens to `Steps`; the prompt, which comes first, is no step."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.is_first = steps, True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_first:
            self.steps.add(value.numel())
        self.is_first = False

    def end(self) -> None:
        pass


class Transformers:
    """`generate` of a transformers model, plain or assisted.

    Args:
        eos: tokens that end the output; none: only the length does.
        limit: seconds per prompt; looked at after every step.

    Raises:
        ValueError: an exit layer that the model does not have.
    """

    def __init__(
        self, target: Target, tokenizer: Any, method: MethodName, eos: frozenset[int], temperature: float, limit: float
    ) -> None:
        self.name, self.model, self.device = method.name, target.stack.model, target.stack.device
        self.eos, self.temperature, self.limit = sorted(eos), temperature, limit
        self.num_layers, self.kind = target.stack.num_layers, method.kind
        self.options = self._options(target, tokenizer, method)

    def _options(self, target: Target, tokenizer: Any, method: MethodName) -> dict[str, Any]:
        if method.kind == "early_exit":
            (layer,) = method.numbers
            if layer >= self.num_layers:
                limit = self.num_layers - 1
                raise ValueError(f"method {self.name!r}: the exit layer must lie in 1..{limit} for this model")
            return {"assistant_early_exit": layer}
        if method.kind == "prompt_lookup":
            return {"prompt_lookup_num_tokens": method.numbers[0]}
        if method.kind == "assistant":
            dtype = str(target.stack.dtype).removeprefix("torch.")
            model, its_own = open_model(method.options[0], dtype=dtype, device=self.device)
            options: dict[str, Any] = {"assistant_model": model}
            if _vocabulary(model) != _vocabulary(self.model):  # then it goes by way of text
                options.update(tokenizer=tokenizer, assistant_tokenizer=its_own)
            return options
        return {}

    def __call__(self, prompt: Prompt) -> Turn:
        ids = torch.tensor([prompt.ids], device=self.device)
        torch.manual_seed(prompt.seed)
        with greedy_without_end(self.model):
            own = self.model.generation_config
            own.eos_token_id = self.eos or None
            if self.temperature > 0:
                own.do_sample, own.temperature, own.top_k, own.top_p = True, self.temperature, 0, 1.0
            (out, steps), seconds = timed(lambda: self._generate(ids, prompt.max_new_tokens), self.device)
        tokens = out[0, len(prompt.ids) :].tolist()
        drafts = self.kind in ("early_exit", "assistant")  # layers run by what they draft with are not told
        return Turn(
            tokens,
            seconds,
            accept_lengths=steps.sizes,
            step_seconds=steps.seconds,
            layer_passes=None if drafts else self.num_layers * len(steps.sizes),
        )

    def close(self) -> None:
        pass

    def _generate(self, ids: torch.Tensor, max_new_tokens: int) -> tuple[torch.Tensor, Steps]:
        steps = Steps(self.limit)
        mask = torch.ones_like(ids)
        options = {**self.options, "streamer": _Streamer(steps), "max_new_tokens": max_new_tokens}
        return self.model.generate(ids, attention_mask=mask, **options), steps


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
