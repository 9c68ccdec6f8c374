"""Run one untrusted program in a limited subprocess and say whether it ran to its end.

WARNING: this exists to run code that a language model wrote. What it does, with the standard library alone:

- an isolated interpreter (`-I -S -B`: no environment, no site-packages, no user folder), an empty environment, a
  temporary working folder, standard input empty, output to a file of bounded size that is thrown away;
- limits on wall time, CPU time, memory (address space), size of files, open files, and for all users but root on
  processes (`resource.setrlimit`); the process group is killed afterwards in every case;
- an audit hook that ends the program when Python code opens a file for writing, changes the file system or the
  environment, starts a process, sends a signal, opens a socket or loads native code;
- on Linux, where the kernel allows it, user, process, network and IPC namespaces of its own: no network, and no
  process outlives the program. `Verdict.isolated` says whether that was possible.

What it does not protect: the program may read every file that this user may read. The audit hook stops accidents and
common tricks, not an attacker (PEP 578). Where namespaces are not allowed, native code could use the network or leave a
process that has left the group. A program in the same interpreter as its test can find ways to fake its verdict. macOS
does not enforce the memory limit, and Windows is refused. Use a container or a virtual machine for models you distrust.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import IO, NamedTuple

_INSIDE = Path(__file__).with_name("inside.py")


class Limits(NamedTuple):
    """What a program may use."""

    seconds: float = 10.0  # wall time, the interpreter's start included
    memory: int = 1 << 30  # bytes of address space
    output: int = 1 << 20  # bytes of standard output and error together


USUAL = Limits()


class Verdict(NamedTuple):
    """What became of a program; `reason` is empty when it passed."""

    passed: bool
    reason: str
    isolated: bool = False  # whether it had namespaces of its own


def run(program: str, limits: Limits = USUAL) -> Verdict:
    """Execute `program` as a module; it passes when it reaches its end without an exception, within the limits.

    Raises:
        ValueError: limits that are not positive.
        OSError: the system has no such limits, or no process can be started.
    """
    if min(limits) <= 0:
        raise ValueError(f"limits must be above 0, got {limits}")
    if os.name != "posix":
        raise OSError("running code needs process limits, which this system lacks; use Linux, or leave out --run-code")
    mark = secrets.token_hex(16)  # a program that writes to the pipe by chance does not know it
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as output:
        reading, writing = os.pipe()
        try:
            timely = _execute(f"{mark}\n{program}", limits, folder, output, writing)
            told = _read(reading)
        finally:
            os.close(reading)
        written = os.fstat(output.fileno()).st_size
    isolated, _, verdict = told.partition("\n")
    ended, _, reason = verdict.partition("\n")
    if not timely:
        reason = f"ran for more than {limits.seconds:g} seconds"
    elif written >= limits.output:
        reason = f"wrote {limits.output} bytes of output or more"
    elif ended == mark:
        return Verdict(True, "", isolated == "isolated")
    return Verdict(False, reason or "ended before its tests did", isolated == "isolated")


def _execute(text: str, limits: Limits, folder: str, output: IO[bytes], pipe: int) -> bool:
    """Run and clean up; False where the program had to be stopped. Closes the pipe's writing end here."""
    arguments = [pipe, ceil(limits.seconds) + 1, limits.memory, limits.output]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_INSIDE), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={},
            pass_fds=(pipe,),
            start_new_session=True,  # a process group of its own, to be killed whole
        )
    finally:
        os.close(pipe)
    try:
        process.communicate(text.encode("utf-8", "replace"), timeout=limits.seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says the latter of zombies
            os.killpg(process.pid, signal.SIGKILL)  # always, since a program may end and leave others behind
        process.communicate()


def _read(pipe: int) -> str:
    os.set_blocking(pipe, False)  # a process that got away might still hold the other end
    try:
        return os.read(pipe, 4096).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
