"""The commands: their names, help and order. What they do is in a module each."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

import selfspec
from selfspec.cli import cache, corpus
from selfspec.cli.batch import batch
from selfspec.cli.calibrate import calibrate
from selfspec.cli.chat import chat
from selfspec.cli.failure import RUN, Failure, ending, say
from selfspec.cli.generate import generate
from selfspec.cli.inspect import inspect
from selfspec.cli.options import command
from selfspec.cli.serve import serve
from selfspec.cli.tune import tune
from selfspec.serving.config import ServerConfig

GENERATE_HELP = """Continue a text. Drafting never changes a token.

Examples:

  selfspec generate 'def fibonacci(n):'

  selfspec generate --show-drafts --compare 'class SplitModel:'

  git log -1 | selfspec generate --model ./my-model --temperature 0.8 --seed 7

  selfspec generate --model org/name --prompts prompts.jsonl > answers.jsonl
"""
CHAT_HELP = """Talk with a model that has a chat template. The conversation stays in memory between turns.

Type /help for what else there is, Ctrl-C to stop a reply, Ctrl-D to end. A line of a pipe or file is a turn.

Examples:

  selfspec chat --model smollm2 --system 'Answer in one sentence.'

  printf 'Hello\\nWho are you?\\n' | selfspec chat --model smollm2 --temperature 0.7
"""
SERVE_HELP = """Serve a model to clients of OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models.

/health, /metrics and /version are there, too. SIGTERM and Ctrl-C let running requests end. Needs the extra 'serve'.

Examples:

  selfspec serve smollm2 --port 8000

  selfspec serve org/name --replicas 4 --api-key "$KEY"

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hello", "seed": 7}'
"""
BATCH_HELP = """Answer a file of requests: OpenAI's batch lines, or bodies such as {"prompt": "...", "max_tokens": 100}.

Answers are written as they come, in lines of OpenAI's batch output. The same command goes on where an earlier one was
stopped. Needs the extra 'serve'.

Examples:

  selfspec batch smollm2 --input questions.jsonl --output answers.jsonl

  selfspec batch org/name --input questions.parquet --output answers.parquet --replicas 4
"""
TUNE_HELP = """Train small exit heads on the model's own answers to your prompts, so that its early layers draft better.

It measures what they gain on prompts that it held out, and keeps them if they do. Ctrl-C keeps the best so far, and the
same command goes on. No text changes.

Examples:

  selfspec tune smollm2 --prompts questions.txt --minutes 10 --output my-heads

  selfspec serve smollm2 --exit-heads my-heads
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

CORPUS_HELP = """Index a corpus, so that drafts can be taken from it. It belongs to one tokenizer."""
BUILD_HELP = """Build an index from text files, a document each, and JSON-lines files, a document per line.

Several processes can share one; building it again replaces it at once, and whoever reads the old one keeps it.

Examples:

  selfspec corpus build demo src/*.py -o code.store

  selfspec corpus build org/name answers.jsonl --field completion -o answers.store
"""
INFO_HELP = """Say what is in an indexed corpus. Exit code 1 if it is damaged or none.

Example:  selfspec corpus info code.store --verify
"""

CACHE_HELP = """What lies in the cache folder: the compiled engine, costs, statistics, results of self-checks."""

app = typer.Typer(
    help="Faster decoding for Hugging Face models: their first layers draft, the rest verify. No token changes.",
    epilog="Data goes to stdout, messages to stderr. Exit codes: 0, 1 (the run failed), 2 (wrong input), 130 (Ctrl-C).",
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
        raise Failure(
            "a command is missing, generate, chat, serve, batch, tune, inspect, calibrate, corpus or cache; "
            "see 'selfspec --help'"
        )


OF_BATCHES = ("chat_template", "max_model_len", "max_num_cached_tokens", "max_num_seqs")
LIMITS = [one.name for one in fields(ServerConfig) if one.name not in OF_BATCHES]
corpora = typer.Typer(help=CORPUS_HELP)
app.command("generate", help=GENERATE_HELP)(command(generate))
app.command("chat", help=CHAT_HELP)(command(chat, without=("n", "logprobs")))
app.command("serve", help=SERVE_HELP)(command(serve))
app.command("batch", help=BATCH_HELP)(command(batch, without=LIMITS))
app.command("tune", help=TUNE_HELP)(command(tune, without=("exit_heads",)))
app.command("inspect", help=INSPECT_HELP)(
    command(inspect, without=("backend", "exact", "exit_heads", "precision", "quantize", "threads"))
)
app.command("calibrate", help=CALIBRATE_HELP)(command(calibrate, without=("exact",)))
corpora.command("build", help=BUILD_HELP)(command(corpus.build))
corpora.command("info", help=INFO_HELP)(command(corpus.info))
app.add_typer(corpora, name="corpus")
caches = typer.Typer(help=CACHE_HELP)
caches.command("list", help="List what is in the cache folder, with sizes and ages.")(command(cache.show))
caches.command("clear", help="Remove what is in the cache folder; it is made again when needed.")(command(cache.clear))
app.add_typer(caches, name="cache")


@caches.callback(invoke_without_command=True)
def _cache(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        cache.show()


@corpora.callback(invoke_without_command=True)
def _corpus(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise Failure("a command is missing, build or info; see 'selfspec corpus --help'")


class _Folding:
    """Makes texts of help as `own` does, which go on in the next line where their column ends; typer cuts them."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own

    def __call__(self, text: Any) -> Any:
        made = self.own(text)
        made.overflow = "fold"
        return made


def _show_whole_names() -> None:
    """Show long names of options whole in narrow terminals."""
    from typer import rich_utils

    for name in ("highlighter", "negative_highlighter"):
        own = getattr(rich_utils, name)
        if not isinstance(own, _Folding):
            setattr(rich_utils, name, _Folding(own))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Expected trouble is one sentence on stderr."""
    if sys.stdout is None:
        return say("stdout is closed; there is nowhere to write to", RUN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    try:
        if {"-h", "--help"}.intersection(sys.argv[1:] if arguments is None else arguments):
            _show_whole_names()
        code = app(arguments, prog_name="selfspec", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as problem:
        return ending(problem)
