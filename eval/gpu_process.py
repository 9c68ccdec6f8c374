"""Work in a process of its own: a lost CUDA context or a crash costs one figure, and the rest is measured afresh."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Save = Callable[[dict[str, Any]], None]
GRACE = 30.0  # seconds after its end for which work may finish the figure it is at


class LostContextError(RuntimeError):
    """No later call of this process can succeed on the device."""


def run_apart(work: Callable[..., None], given: Sequence[Any], end: float, save: Save) -> str | None:
    """Call `work(send, *given)` in a fresh process; what it sends is handed to `save`.

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
            kind, what = receiver.recv()
            if kind == "ended":
                return what
            save(what)
        return f"it took {GRACE:.0f} s longer than it had, and was ended"
    except (EOFError, OSError):  # the process has ended, perhaps in the middle of sending
        process.join()
        code = process.exitcode or 0
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        process.kill()  # after a lost context even the process's own end may hang
        process.join()
        receiver.close()


def _work(sender: Connection, work: Callable[..., None], given: Sequence[Any]) -> None:
    try:
        work(lambda content: sender.send(("content", content)), *given)
    except Exception as problem:
        sender.send(("ended", one_line(problem)))
    else:
        sender.send(("ended", None))


def check_context(problem: Exception, device: torch.device) -> None:
    """Raise LostContextError if, after this error, the device cannot be used any more."""
    import torch

    lost: Exception | None = problem if isinstance(problem, torch.AcceleratorError) else None
    if lost is None and device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as found:
            lost = found
    if lost is not None:
        raise LostContextError(one_line(lost)) from problem


def one_line(problem: BaseException) -> str:
    """An error in one line."""
    if type(problem).__name__ == "OutOfMemoryError":  # torch's own; torch may not be imported here
        return "out of memory"
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, LostContextError) else f"{type(problem).__name__}: {text}"
