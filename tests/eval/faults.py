"""Functions that fail in another process; a separate module, since those processes import it."""

import os
import signal
import time

KILLED = "llama-3.2-1b"  # a shape whose process is killed


def kill_or_measure(save, name, *given):
    if name == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    from eval.gpu_shape import measure_shape  # heavy

    measure_shape(save, name, *given)


def finish(save, number):
    save({"number": number})
    save({"number": number, "done": True})


def fail(save, number):
    save({"number": number})
    raise ValueError("no such\nthing")


def hang(save, number):
    time.sleep(600)
