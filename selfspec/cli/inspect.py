"""`selfspec inspect`: what a model is, and whether it can draft for itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import Json, ModelArgument, ModelOptions, as_sentences
from selfspec.cli.status import StatusConsole

if TYPE_CHECKING:
    from selfspec.loading.inspection import Report


def inspect(
    *,
    model: ModelArgument,
    options: ModelOptions,
    save_tokenizer: Annotated[
        Path | None,
        Option(help="Write the tokenizer to a folder, for load generators that want one.", metavar="FOLDER"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report; the exit code says whether the self-check passes."""
    with StatusConsole() as status, as_sentences():
        with status.waiting("importing torch and transformers"):
            from selfspec.loading import hub
            from selfspec.loading.inspection import examine

        with status.waiting(f"loading {model}"):
            opened, tokenizer = hub.open_model(
                model, dtype=options.dtype, device=options.device, adapter=options.adapter
            )
            report = examine(model, opened, tokenizer)
    if save_tokenizer is not None:
        if tokenizer is None:
            raise Failure(f"{model} has no tokenizer to save; leave --save-tokenizer out", RUN)
        tokenizer.save_pretrained(save_tokenizer)
    if as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        _write(report)
    sys.stdout.flush()
    raise Exit(0 if report.self_check else RUN)


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
        "stored draft tokens": report.num_speculative_tokens,
    }
    for name, value in rows.items():
        if value is not None:
            sys.stdout.write(f"{name:<21} {value}\n")
