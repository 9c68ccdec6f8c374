"""What runs inside the sandbox: limits itself, then executes the program it reads from standard input.

Started by `eval.quality.sandbox` as a script of its own in an isolated interpreter; it imports nothing of this project.
Arguments: the verdict pipe's descriptor, CPU seconds, bytes of memory, bytes of output.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any

NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, linux/prctl.h
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk"}  # the import system lists folders
REFUSED = ("os.", "socket.", "subprocess.", "ctypes.", "shutil.", "pty.", "resource.", "sqlite3.", "signal.", "syslog.")


def separate(pipe: int) -> None:
    """Go on in namespaces of its own, without network, whose processes all end with the first; Linux only.

    Many containers and distributions forbid it; the verdict pipe is told whether it was possible.
    """
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    isolated = unshare is not None and unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC) == 0
    os.write(pipe, b"isolated\n" if isolated else b"shared\n")
    if not isolated:
        return
    child = os.fork()  # only a child is in the new process namespace, as its first process
    if child:
        os.close(pipe)
        os.waitpid(child, 0)
        os._exit(0)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # it may leave the process group, but not this


def limit(cpu_seconds: int, memory: int, output: int) -> None:
    for name, value in (
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", output),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_NPROC", 0),  # no further process or thread; the kernel exempts root
    ):
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        ceiling = resource.getrlimit(kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            continue  # macOS refuses a memory limit


def refuse(pipe: int) -> None:
    """End the process at the first audit event that reaches outside it: files to write, processes, sockets.

    Audit hooks cannot be removed, but PEP 578 is clear that they are no sandbox: native code raises no events.
    """
    leave, tell, writing, refused, harmless = os._exit, os.write, WRITING, REFUSED, HARMLESS

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if not isinstance(flags, int) or not flags & writing or name == "/dev/null":
                return
            event = "open for writing"
        elif not event.startswith(refused) or event in harmless:
            return
        tell(pipe, f"failed\nused {event}, which is not allowed".encode())
        leave(1)

    sys.addaudithook(hook)


def main() -> None:
    pipe, *limits = map(int, sys.argv[1:])
    mark, _, source = sys.stdin.buffer.read().decode("utf-8").partition("\n")
    sys.argv[1:] = []
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the program must not wait for input
    separate(pipe)
    limit(*limits)
    refuse(pipe)
    verdict = "failed\n"
    try:
        candidate = sys.modules["candidate"] = ModuleType("candidate")  # dataclasses look their module up there
        exec(compile(source, "<candidate>", "exec"), candidate.__dict__)
        verdict = f"{mark}\n"
    except MemoryError:
        verdict += "out of memory"
    except BaseException as problem:  # sys.exit too: the tests after it have not run
        verdict += type(problem).__name__
    os.write(pipe, verdict.encode("utf-8", "replace"))
    os._exit(0)  # no threads, exit handlers or buffered output after the verdict


if __name__ == "__main__":
    main()
