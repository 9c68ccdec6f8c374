"""Methods: ways to continue prompts, behind one signature, so that every comparison treats them alike.

A method takes prompts as token ids and returns new token ids; text is no part of it. Ends of text are ignored, so that
every method writes exactly `max_new_tokens` and their times can be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from selfspec.decoding.results import Round
from selfspec.decoding.stats import SpecStats
from selfspec.legacy import WHOLE_BURST
from selfspec.legacy import LoadedTarget as Target

Ids = Sequence[Sequence[int]]


class Answer(NamedTuple):
    """What a method made of one prompt."""

    tokens: list[int]
    stats: SpecStats | None  # None where the method does not say


class Method(Protocol):
    """Continues every prompt greedily by `max_new_tokens`; more than one prompt are decoded together."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, int]: ...
    def __call__(self, prompts: Ids, max_new_tokens: int) -> list[Answer]: ...


class Endless(Target):
    """A target that knows no end of text and takes nothing from its model's generation config.

    Its model, views and self-check are those of the target it is made from.
    """

    def __init__(self, target: Target, with_text: bool = False) -> None:
        vars(self).update(vars(target))
        self.remembered = target.remembered.copy()  # what it sees is its own
        if not with_text:
            self.tokenizer = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def stored(self) -> None:
        """Greedy and neutral, or what a method's options say: figures do not change with a model's files."""
        return None


@dataclass(frozen=True, slots=True)
class SelfSpec:
    """selfspec as `generate` decodes: plain decoding, or the fixed policy when `settings` name E and D."""

    target: Endless
    name: str
    family: str
    settings: Mapping[str, int] = field(default_factory=dict)

    def rounds(self, prompts: Ids, max_new_tokens: int) -> Iterator[Round]:
        policy = "fixed" if self.settings else "plain"
        batch = {"max_batch_size": len(prompts), "max_new_tokens": max_new_tokens, "burst": WHOLE_BURST}
        return self.target.stream(prompts, policy=policy, **self.settings, **batch)  # type: ignore[arg-type]

    def __call__(self, prompts: Ids, max_new_tokens: int) -> list[Answer]:
        rows = [row for round_ in self.rounds(prompts, max_new_tokens) for row in round_.rows]
        done = sorted((row.completion for row in rows if row.completion is not None), key=lambda c: c.request_id)
        return [Answer(completion.tokens, completion.stats) for completion in done]


@dataclass(frozen=True, slots=True)
class Transformers:
    """transformers' own `generate` on the very model the target shares its weights with.

    Args:
        settings: options of `generate`; `num_assistant_tokens` goes to the model's generation config instead, since
            assisted generation reads it only there.
    """

    model: Any
    name: str
    family: str
    settings: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, prompts: Ids, max_new_tokens: int) -> list[Answer]:
        device = self.model.get_input_embeddings().weight.device
        longest = max(len(prompt) for prompt in prompts)
        padded = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        options = {key: value for key, value in self.settings.items() if key != "num_assistant_tokens"}
        with greedy_without_end(self.model, self.settings.get("num_assistant_tokens")):
            out = self.model.generate(padded, attention_mask=seen, max_new_tokens=max_new_tokens, **options)
        return [Answer(tokens, None) for tokens in out[:, longest:].tolist()]


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A method that is handed its prompts one at a time: what a batch is compared with."""

    inner: Method
    name: str

    @property
    def family(self) -> str:
        return self.inner.family

    @property
    def settings(self) -> Mapping[str, int]:
        return self.inner.settings

    def __call__(self, prompts: Ids, max_new_tokens: int) -> list[Answer]:
        return [answer for prompt in prompts for answer in self.inner([prompt], max_new_tokens)]


@contextmanager
def greedy_without_end(model: Any, num_assistant_tokens: int | None = None) -> Iterator[None]:
    """Give the model a generation config that is greedy and knows no end of text; put its own back afterwards.

    transformers shortens the config's `num_hidden_layers` while it drafts by early exit and does not restore it after
    an error; that is restored here too.
    """
    own, layers = model.generation_config, model.config.num_hidden_layers
    config = type(own)(use_cache=True, do_sample=False, pad_token_id=0)
    config.eos_token_id = None
    if num_assistant_tokens is not None:
        config.num_assistant_tokens = num_assistant_tokens
    try:
        model.generation_config = config
        yield
    finally:
        model.generation_config = own
        model.config.num_hidden_layers = layers


def fixed(target: Endless, exit_layer: int, num_draft_tokens: int) -> SelfSpec:
    name = f"fixed (E={exit_layer}, D={num_draft_tokens})"
    return SelfSpec(target, name, "fixed", {"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens})


def plain(target: Endless) -> SelfSpec:
    return SelfSpec(target, "plain", "plain")


def generate(model: Any) -> Transformers:
    return Transformers(model, "transformers generate", "generate")


def early_exit(model: Any, exit_layer: int, num_assistant_tokens: int) -> Transformers:
    """transformers' `assistant_early_exit`; 0 tokens leaves its default draft length, which ends early when unsure."""
    settings = {"assistant_early_exit": exit_layer}
    if num_assistant_tokens:
        settings["num_assistant_tokens"] = num_assistant_tokens
    length = f", {num_assistant_tokens} tokens" if num_assistant_tokens else ""
    return Transformers(model, f"transformers early exit ({exit_layer}{length})", "early_exit", settings)


def prompt_lookup(model: Any, num_tokens: int) -> Transformers:
    settings = {"prompt_lookup_num_tokens": num_tokens}
    return Transformers(model, f"transformers prompt lookup ({num_tokens})", "prompt_lookup", settings)


def watch(target: Endless, stack: Any) -> Endless:
    """The same target over another stack."""
    watched = copy.copy(target)
    watched.stack = stack
    return watched
