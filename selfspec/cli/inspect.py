"""`selfspec inspect`: what a model is, and whether it can draft for itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from typer import Exit

from selfspec.cli.failure import RUN, as_sentences
from selfspec.cli.options import Inspect
from selfspec.cli.talk import Talk


def inspect(options: Inspect) -> None:
    """Write the report; the exit code says whether the self-check passes."""
    model = options.model
    with Talk() as talk, as_sentences():
        with talk.waiting("importing torch and transformers"):
            from selfspec import hub
            from selfspec.inspection import examine

        with talk.waiting(f"loading {model}"):
            opened, tokenizer = hub.open_model(
                model, dtype=options.dtype, device=options.device, adapter=options.adapter
            )
            report = examine(model, opened, tokenizer)
    if options.as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        _write(report)
    sys.stdout.flush()
    raise Exit(0 if report.self_check else RUN)


def _write(report: Any) -> None:
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
