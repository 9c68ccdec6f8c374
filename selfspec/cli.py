"""The command line: options only. What the commands do is in `selfspec/commands`."""

from __future__ import annotations

import inspect as python_inspect
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import selfspec
from selfspec.commands.failure import RUN, Failure, ending, say
from selfspec.commands.generate import generate
from selfspec.commands.notices import notices
from selfspec.commands.options import (
    ADAPTER_HELP,
    DEVICE,
    DEVICE_HELP,
    DTYPE_HELP,
    ENGINE_HELP,
    EXIT_HEADS_HELP,
    MODEL_HELP,
    QUANTIZE_HELP,
    THREADS_HELP,
    Dtype,
    EngineName,
    Generate,
    QuantizeName,
)

GENERATE_HELP = """Continue a text. Drafting never changes a token.

Examples:

  selfspec generate 'def fibonacci(n):'

  selfspec generate --show-drafts --compare 'class Stack:'

  git log -1 | selfspec generate --model ./my-model --temperature 0.8 --seed 7

  selfspec generate --model org/name --prompts prompts.jsonl > answers.jsonl
"""
INSPECT_HELP = """Say what a model is, and whether it can draft for itself. Exit code 1 if it cannot.

Example:  selfspec inspect org/name --json
"""

CALIBRATE_HELP = """Measure what a model's layers and head cost on this machine, and keep it for later runs to plan by.

Without it, the first run measures in a hurry. An idle machine measures best.

Examples:

  selfspec calibrate demo --plan

  selfspec calibrate org/name --device cuda --dtype bfloat16 --batch-sizes 1,2,4,8,16,32
"""

DATASTORE_HELP = """Index a corpus, so that drafts can be taken from it. A datastore belongs to one tokenizer."""
BUILD_HELP = """Build a datastore from text files, a document each, and JSON-lines files, a document per line.

Several processes can share one; building it again replaces it at once, and whoever reads the old one keeps it.

Examples:

  selfspec datastore build demo src/*.py -o code.store

  selfspec datastore build org/name answers.jsonl --field completion -o answers.store
"""
INFO_HELP = """Say what is in a datastore. Exit code 1 if it is damaged or none.

Example:  selfspec datastore info code.store --verify
"""

app = typer.Typer(
    help="Faster decoding for Hugging Face models: their first layers draft, the rest verify. No token changes.",
    epilog="Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 the run failed, 2 wrong usage, 130 interrupted.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {selfspec.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _selfspec(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        raise Failure("a command is missing, generate, inspect, calibrate or datastore; see 'selfspec --help'")


def _with_options_of(options: type[Any], run: Callable[[Any], None]) -> Callable[..., None]:
    """A function whose parameters are the fields of a dataclass, which typer then reads."""

    def command(**given: Any) -> None:
        run(options(**given))

    hints = get_type_hints(options, include_extras=True)
    fields = options.__dataclass_fields__.values()
    keyword = python_inspect.Parameter.KEYWORD_ONLY
    parameters = [
        python_inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields
    ]
    command.__signature__ = python_inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


def _generate(options: Generate) -> None:
    with notices(options.quiet):
        generate(options)


app.command("generate", help=GENERATE_HELP)(_with_options_of(Generate, _generate))


@app.command("inspect", help=INSPECT_HELP)
def _inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=MODEL_HELP)],
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help=ADAPTER_HELP)] = None,
    dtype: Annotated[Dtype | None, typer.Option(help=DTYPE_HELP)] = None,
    device: Annotated[str | None, typer.Option(metavar=DEVICE, help=DEVICE_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    from selfspec.commands.inspect import inspect

    with notices():
        raise typer.Exit(inspect(model, dtype, device, adapter, as_json))


@app.command("calibrate", help=CALIBRATE_HELP)
def _calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=MODEL_HELP)],
    adapter: Annotated[Path | None, typer.Option(metavar="FOLDER", help=ADAPTER_HELP)] = None,
    dtype: Annotated[Dtype | None, typer.Option(help=DTYPE_HELP)] = None,
    device: Annotated[str | None, typer.Option(metavar=DEVICE, help=DEVICE_HELP)] = None,
    exit_heads: Annotated[str | None, typer.Option(metavar="FOLDER|none", help=EXIT_HEADS_HELP)] = None,
    engine: Annotated[EngineName, typer.Option(help=ENGINE_HELP)] = "auto",
    quantize: Annotated[QuantizeName | None, typer.Option(help=QUANTIZE_HELP)] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help=THREADS_HELP)] = None,
    batch_sizes: Annotated[
        list[str] | None,
        typer.Option(metavar="B,B,...", help="Rows decoded together; may be repeated. Default: 1,2,4,8."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Also show how far to draft, by batch size.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    from selfspec.commands.calibrate import calibrate

    with notices(quiet):
        parts = {"adapter": adapter, "dtype": dtype, "device": device, "exit_heads": exit_heads}
        parts |= {"engine": engine, "quantize": quantize}
        calibrate(model, parts, threads, batch_sizes or [], plan, as_json, quiet)


datastores = typer.Typer(help=DATASTORE_HELP)
app.add_typer(datastores, name="datastore")


@datastores.callback(invoke_without_command=True)
def _datastore(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise Failure("a command is missing, build or info; see 'selfspec datastore --help'")


@datastores.command("build", help=BUILD_HELP)
def _build(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=f"Whose tokenizer: {MODEL_HELP}")],
    corpus: Annotated[list[Path], typer.Argument(metavar="CORPUS...", show_default=False, help="Files, UTF-8.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="The datastore.")],
    field: Annotated[
        str, typer.Option(help="Where a line of a JSON-lines file (.jsonl, .ndjson) has its text.")
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    from selfspec.commands.datastore import build

    with notices(quiet):
        build(model, corpus, output, field, as_json, quiet)


@datastores.command("info", help=INFO_HELP)
def _info(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="The datastore.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it and compare it with its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    from selfspec.commands.datastore import info

    info(file, verify, as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Expected trouble is one sentence on stderr."""
    if sys.stdout is None:
        return say("stdout is closed; there is nowhere to write to", RUN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    try:
        code = app(arguments, prog_name="selfspec", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as problem:
        return ending(problem)


if __name__ == "__main__":
    sys.exit(main())
