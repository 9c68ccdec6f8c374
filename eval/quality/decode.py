"""Decode questions with several policies, and compare what they wrote token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.control.registry import POLICIES
from selfspec.decoding.request import Completion
from selfspec.legacy import LoadedTarget as Target


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy as written on the command line: a name, or `fixed:E,D`."""

    name: str
    policy: str
    exit_layer: int | None = None
    num_draft_tokens: int | None = None


def choice(text: str) -> Choice:
    """Read `plain`, `adaptive`, another policy's name, or `fixed:E,D` for exit layer E and draft length D.

    Raises:
        ValueError: there is no such policy, or E and D are not whole numbers.
    """
    policy, _, numbers = text.partition(":")
    if policy not in POLICIES:
        raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, or fixed:E,D, got {text!r}")
    if policy == text:
        return Choice(text, policy)
    try:
        exit_layer, num_draft_tokens = map(int, numbers.split(","))
    except ValueError:
        raise ValueError(f"--policy {policy}:E,D needs two whole numbers, got {text!r}") from None
    return Choice(text, policy, exit_layer, num_draft_tokens)


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt: as one user message where `chat` and the tokenizer has a template, else as raw text."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return [int(i) for i in encoded["input_ids"]]
    return [int(i) for i in tokenizer(prompt)["input_ids"]]


def fitting(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Indices of the prompts that leave room for `max_new_tokens` in the model's context."""
    limit = target.stack.context_limit
    return [i for i, prompt in enumerate(prompts) if len(prompt) + max_new_tokens <= limit]


def decode(
    target: Target, prompts: Sequence[Sequence[int]], chosen: Choice, max_new_tokens: int, stops: Sequence[str]
) -> list[Completion]:
    """Continue every prompt greedily, one at a time: rows of a batch may round differently than a row alone."""
    return target.generate(
        prompts,
        policy=chosen.policy,
        exit_layer=chosen.exit_layer,
        num_draft_tokens=chosen.num_draft_tokens,
        max_batch_size=1,
        max_new_tokens=max_new_tokens,
        stop=stops,
        temperature=0.0,
        generation_config=False,
    )


def differing(outputs: Sequence[Completion], reference: Sequence[Completion]) -> list[int]:
    """Indices of the outputs whose tokens are not those of the reference."""
    pairs = zip(outputs, reference, strict=True)
    return [i for i, (output, wanted) in enumerate(pairs) if output.tokens != wanted.tokens]
