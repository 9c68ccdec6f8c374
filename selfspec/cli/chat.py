"""`selfspec chat`: a conversation, whose history stays in the KV cache between turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from typer import Option

from selfspec.cli.conversation import Conversation
from selfspec.cli.failure import RUN, Failure, say
from selfspec.cli.options import IgnoreGenerationConfig, Learn, ModelOption, ModelOptions, Quiet, System
from selfspec.cli.prompts import has_template, read_lines
from selfspec.cli.session import chosen, opened
from selfspec.cli.status import StatusConsole
from selfspec.params import SamplingParams, SpeculativeConfig

COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "more about the last reply",
    "/temperature X": "sample so from now on; 0 is greedy",
    "/system TEXT": "another system message",
    "/exit": "end, as Ctrl-D and Ctrl-C at the prompt do",
    "/help": "this list; Ctrl-C stops a reply",
}
CURSOR = "> "


def chat(
    *,
    model: ModelOption = None,
    options: ModelOptions,
    speculative: SpeculativeConfig,
    learn: Learn = None,
    sampling: SamplingParams,
    ignore_generation_config: IgnoreGenerationConfig = False,
    system: System = None,
    stats: Annotated[bool, Option("--stats", help="After a reply, tell all that /stats tells.")] = False,
    quiet: Quiet = False,
) -> None:
    """Answer line after line until the input ends."""
    if ignore_generation_config:
        sampling = replace(sampling, generation_config=False)
    with (
        StatusConsole(quiet) as status,
        opened(
            model := chosen(model, status, "smollm2"),  # the embedded model has no chat template
            options,
            speculative,
            status,
            learn=learn,
            max_num_seqs=1,
            prefix_cache=True,
        ) as llm,
    ):
        if not has_template(llm, model):
            raise Failure(f"chat needs a chat template, and {model} has none; use: selfspec generate")
        conversation = Conversation(llm, sampling, system, status, stats)
        try:
            for line in _lines():
                name, _, text = line.partition(" ")
                if line == "/exit":
                    break
                if line == "/reset":
                    conversation.reset()
                elif line == "/stats":
                    conversation.tell()
                elif name == "/temperature":
                    conversation.set_temperature(text.strip())
                elif name == "/system":
                    conversation.set_system(text.strip())
                elif line == "/help" or (line.startswith("/") and line[1:].isalpha()):
                    unknown = "" if line == "/help" else f"there is no command {line}; "
                    say(unknown + ", ".join(f"{name}: {what}" for name, what in COMMANDS.items()), RUN)
                elif line:
                    conversation.reply(line)
        finally:
            llm.keep_statistics(conversation.engine)


def _lines() -> Iterator[str]:
    """What a person types, or the lines of a pipe; stripped. Ends with the input, or with Ctrl-C at an empty prompt."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield from read_lines()
        return
    readline: Any = None
    with suppress(ImportError):  # there is none on Windows
        import readline  # editing and history for `input`
    while True:
        try:
            if sys.stdout.isatty():
                line = input(CURSOR)
            else:  # which `input` would write to
                sys.stderr.write(CURSOR)
                sys.stderr.flush()
                line = input()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            if readline is not None and readline.get_line_buffer():
                continue  # what was typed is taken back
            return
        yield line.strip()
