"""What a model is, and whether it can draft for itself, before anybody uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from selfspec.control.registry import DEFAULT_POLICY
from selfspec.errors import UnsupportedModelError
from selfspec.loading.target import Target
from selfspec.model.views import unwrap


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to know of a model; the last five need one that can be split."""

    model: str
    family: str
    layers: int | None
    parameters: int
    dtype: str
    device: str
    tokenizer: bool
    chat_template: bool
    self_check: bool
    reason: str | None  # why the self-check does not pass
    split_error: float | None = None  # largest logit difference, in standard deviations of the logits
    context_limit: int | None = None
    policy: str | None = None  # the default
    exit_layer: int | None = None  # stored with the model, for policies that need one
    num_speculative_tokens: int | None = None


def examine(name: str, model: nn.Module, tokenizer: Any) -> Report:
    """Try the split; a model that cannot be split is reported as far as it goes, with the reason."""
    bare: Any = unwrap(model)
    first = next(bare.parameters())
    facts: dict[str, Any] = {
        "model": name,
        "family": bare.config.model_type,
        "layers": getattr(bare.config.get_text_config(), "num_hidden_layers", None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": str(first.device),
        "tokenizer": tokenizer is not None,
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
    }
    try:
        target = Target(model, tokenizer)
    except UnsupportedModelError as problem:
        return Report(**facts, self_check=False, reason=str(problem))
    return Report(
        **facts,
        self_check=True,
        reason=None,
        split_error=target.split_error,
        context_limit=target.split.context_limit,
        policy=DEFAULT_POLICY,
        exit_layer=target.default_exit_layer,
        num_speculative_tokens=target.default_num_speculative_tokens,
    )
