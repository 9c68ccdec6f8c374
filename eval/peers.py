"""transformers' own decoders as methods, on the very model that the target shares its weights with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from eval.answers import Prompt, Steps, Turn
from eval.methods import MethodName, check_exit_layer
from eval.models import Endless, open_peer


class Transformers:
    """`generate` of a transformers model, plain or assisted.

    Args:
        target: its ends of text end the output.
        tokenizer: the model's, for an assistant of another vocabulary.
        limit: seconds per prompt, looked at after every step.

    Raises:
        ValueError: an exit layer that the model does not have.
        OSError, ValueError: an assistant that cannot be opened.
    """

    def __init__(self, target: Endless, tokenizer: Any, method: MethodName, temperature: float, limit: float) -> None:
        self.name, self.kind, self.model = method.name, method.kind, target.stack.model
        self.eos, self.temperature, self.limit = sorted(target.eos_token_ids), temperature, limit
        self.num_layers, self.device = target.stack.num_layers, target.stack.device
        self.options: dict[str, Any] = {}
        if method.kind == "early_exit":
            check_exit_layer(method, int(method.option), self.num_layers)
            self.options["assistant_early_exit"] = int(method.option)
        elif method.kind == "prompt_lookup":
            self.options["prompt_lookup_num_tokens"] = int(method.option)
        elif method.kind == "assistant":
            self.options["assistant_model"], its_own = open_peer(method.option, target)
            if _vocabulary(self.options["assistant_model"]) != _vocabulary(self.model):  # then it goes by way of text
                self.options.update(tokenizer=tokenizer, assistant_tokenizer=its_own)

    def __call__(self, prompt: Prompt) -> Turn:
        ids = torch.tensor([prompt.ids], device=self.device)
        torch.manual_seed(prompt.seed)
        with neutral_generation_config(self.model) as config:
            config.eos_token_id = self.eos or None
            if self.temperature > 0:
                config.do_sample, config.temperature, config.top_k, config.top_p = True, self.temperature, 0, 1.0
            steps = Steps(self.limit)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=_Streamer(steps),
                max_new_tokens=prompt.max_new_tokens,
                **self.options,
            )
            tokens = out[0, len(prompt.ids) :].tolist()
            seconds = perf_counter() - steps.start
        does_not_tell = self.kind in ("early_exit", "assistant")  # how many layers ran to draft
        return Turn(
            tokens,
            seconds,
            accept_lengths=steps.sizes,
            step_seconds=steps.seconds,
            layer_passes=None if does_not_tell else self.num_layers * len(steps.sizes),
        )

    def close(self) -> None:
        pass


@contextmanager
def neutral_generation_config(model: Any) -> Iterator[Any]:
    """Give the model a generation config that is greedy and knows no end of text; put its own back afterwards.

    transformers shortens the config's `num_hidden_layers` while it drafts by early exit and does not restore it after
    an error; that is restored here too.
    """
    own, layers = model.generation_config, model.config.num_hidden_layers
    config = type(own)(use_cache=True, do_sample=False, pad_token_id=0)
    config.eos_token_id = None
    try:
        model.generation_config = config
        yield config
    finally:
        model.generation_config = own
        model.config.num_hidden_layers = layers


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


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
