"""How a command ends when it cannot go on: one sentence on stderr and an exit code."""

from __future__ import annotations

import os
import sys

RUN, USAGE, INTERRUPTED = 1, 2, 130


class Failure(Exception):
    """A sentence for the user, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def ending(problem: BaseException) -> int:
    """Say what stopped a command, if that is expected trouble, and return its exit code; else raise it again."""
    if isinstance(problem, Failure):
        return say(str(problem), problem.code)
    if isinstance(problem, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(problem, BrokenPipeError):  # whoever read our output has left: nothing more to say
        _drop_stdout()
        return RUN
    if isinstance(problem, OSError):  # other files are handled where they are opened: this is stdout, on a full disk
        _drop_stdout()
        return say(f"the output cannot be written ({problem.strerror or problem}); make room and run it again", RUN)
    if hasattr(problem, "format_message"):  # typer's usage errors; their classes are private
        path = getattr(getattr(problem, "ctx", None), "command_path", "selfspec")
        return say(f"{problem.format_message().replace('Value error, ', '').rstrip('.')}; see '{path} --help'", USAGE)
    if type(problem).__name__ == "OutOfMemoryError":
        return say("the device ran out of memory; lower --max-tokens, or choose --dtype bfloat16 or --device cpu", RUN)
    if isinstance(problem, MemoryError):
        return say(str(problem) or "memory ran out; lower --max-tokens, or decode fewer prompts at once", RUN)
    raise problem


def say(sentence: str, code: int) -> int:
    """One line on stderr; returns the code."""
    print(f"selfspec: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """Let Python's flush at exit go nowhere instead of failing once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
