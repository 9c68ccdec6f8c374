"""A part of the measurements in a process of its own: a lost CUDA context or a crash costs that part alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from eval.gpu.record import Content, Record

GRACE = 30.0  # seconds after its end for which a part may finish the figure it is at


def run_apart(
    work: Callable[..., None], given: Sequence[Any], end: float, on_content: Callable[[Content], None]
) -> str | None:
    """Call `work(record, *given)` in a fresh process; `on_content` gets the record's content whenever it is saved.

    Args:
        work: a module's function; it and what it is given must be picklable.
        end: when the work should be over, in the seconds of `perf_counter`. The process is ended `GRACE` later.

    Returns:
        Why the work did not come to its end, in one line; None if it did.
    """
    context = get_context("spawn")  # a fork would inherit what this process knows of the device
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, work, given))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, end + GRACE - perf_counter())):
            kind, what = received(receiver)
            if kind == "ended":
                return what
            on_content(what)
        return f"it took {GRACE:.0f} s longer than it had, and was ended"
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        process.kill()  # also one that has sent all: after a lost context, what it does at its end may hang
        process.join()
        receiver.close()


def received(receiver: Connection) -> tuple[str, Any]:
    """What the process sent; EOFError where it has ended, be it in the middle of sending."""
    try:
        kind, what = receiver.recv()
    except OSError as problem:
        raise EOFError(*problem.args) from problem
    return kind, what


def _work(sender: Connection, work: Callable[..., None], given: Sequence[Any]) -> None:
    try:
        work(Record(lambda content: sender.send(("content", content))), *given)
    except Exception as problem:
        from eval.gpu.faults import told  # imports torch, which not all work needs

        sender.send(("ended", told(problem)))
    else:
        sender.send(("ended", None))
