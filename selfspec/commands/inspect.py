"""`selfspec inspect`: what a model is, and whether it can draft for itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.commands.failure import RUN, as_sentences


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to know before a model is used; the last five need a model that can be split."""

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
    exit_layer: int | None = None  # stored with the model, for policies that are told one
    num_draft_tokens: int | None = None


def inspect(model: str, dtype: str | None, device: str | None, adapter: Path | None, as_json: bool) -> int:
    """Write the report; the exit code says whether the self-check passes."""
    from selfspec import hub

    with as_sentences():
        opened, tokenizer = hub.open_model(model, dtype=dtype, device=device, adapter=adapter)
        report = examine(model, opened, tokenizer)
    if as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        _write(report)
    sys.stdout.flush()
    return 0 if report.self_check else RUN


def examine(name: str, model: Any, tokenizer: Any) -> Report:
    """Try the split; a model that cannot be split is reported as far as it goes, with the reason."""
    from selfspec.errors import UnsupportedModelError
    from selfspec.model.views import unwrap
    from selfspec.target import Target

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
    return Report(**facts, self_check=True, reason=None, **_defaults(target))


def _defaults(target: Any) -> dict[str, Any]:
    from selfspec.control.registry import DEFAULT_POLICY

    return {
        "split_error": target.split_error,
        "context_limit": target.stack.context_limit,
        "policy": DEFAULT_POLICY,
        "exit_layer": target.default_exit_layer,
        "num_draft_tokens": target.default_num_draft_tokens,
    }


def _write(report: Report) -> None:
    check = "passes" if report.self_check else f"does not pass: {report.reason}"
    if report.split_error is not None:
        check += f" (split and whole model differ by {report.split_error:.1e} standard deviations of the logits)"
    template = "with a chat template" if report.chat_template else "without a chat template"
    rows: dict[str, Any] = {
        "model": report.model,
        "family": report.family,
        "layers": report.layers,
        "parameters": f"{report.parameters:,}",
        "dtype": report.dtype,
        "device": report.device,
        "tokenizer": template if report.tokenizer else "none",
        "self-check": check,
        "context limit": report.context_limit,
        "default policy": report.policy,
        "stored exit layer": report.exit_layer,
        "stored draft tokens": report.num_draft_tokens,
    }
    for name, value in rows.items():
        if value is not None:
            sys.stdout.write(f"{name:<21} {value}\n")
