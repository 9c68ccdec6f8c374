"""The library of the C++ code of `cpu/`: that of the installed wheel, or compiled once per machine.

What is compiled is kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import perf_counter

from selfspec.errors import NoCompilerError
from selfspec.kernels import prebuilt
from selfspec.kernels.prebuilt import FLAGS

SOURCES = Path(__file__).parent / "cpu"
# Flags for the processor's instructions. The first combination that compiles is used.
TRIED = (("-march=native",), ("-mcpu=native",), ())
SECONDS = 300  # time limit of a compilation
_log = logging.getLogger("selfspec")


def find_compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler: $CXX, else g++, clang++ or the package ziglang; None where there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    if found := next((found for name in names if name and (found := shutil.which(name))), None):
        return (found,)
    package = importlib.util.find_spec("ziglang")  # not imported
    for folder in (package and package.submodule_search_locations) or ():
        if zig := shutil.which("zig", path=folder):
            return (zig, "c++")
    return None


def version() -> str:
    """What changes with the compiled functions; empty where there is no compiler."""
    if (file := prebuilt.find()) is not None:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    compiler = find_compiler()
    return "" if compiler is None else _key(compiler)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The library of the compiled functions of `cpu/`.

    It is that of the installed wheel if it has one for this processor. Else it is compiled now, unless the cache folder
    holds it.

    Raises:
        NoCompilerError: there is no compiler, or the code cannot be compiled or loaded; the message says why.
    """
    if (ready := prebuilt.find()) is not None:
        try:
            return ctypes.CDLL(str(ready))
        except OSError as problem:
            _log.warning("%s cannot be loaded (%s), so it is compiled here", ready, problem)
    compiler = find_compiler()
    if compiler is None:
        raise NoCompilerError("neither $CXX nor g++ nor clang++ was found", "run `pip install ziglang`, which is one")
    folder, is_lasting = _folder(name := f"body-{_key(compiler)}.so")
    file = folder / name
    try:
        if not file.is_file():
            _compile(compiler, file, f", kept in {file}" if is_lasting else "")
        made = ctypes.CDLL(str(file))
        with suppress(OSError):
            os.utime(file)  # it is in use: see `selfspec.cached`
        return made
    except OSError as problem:
        with suppress(OSError):
            file.unlink()  # it is broken, or of another system: the next process compiles it again
        raise NoCompilerError(f"{file} cannot be loaded ({problem})", "run it again") from problem
    finally:
        if not is_lasting:
            shutil.rmtree(folder, ignore_errors=True)  # a loaded library stays usable


def _compile(compiler: Sequence[str], file: Path, kept: str) -> None:
    """Compile the library to `file`. `kept`: the end of the log message."""
    start = perf_counter()
    reason = ""
    _log.warning("compiling for this machine's processor with %s, up to two minutes, once ...", " ".join(compiler))
    for more in TRIED:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}-", suffix=".tmp")
        os.close(handle)
        reason = _run([*compiler, *FLAGS, *more, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", name])
        if not reason:
            os.replace(name, file)  # atomic, since several processes may compile at once
            _log.warning("compiled in %.1f s%s", perf_counter() - start, kept)
            return
        with suppress(OSError):
            os.unlink(name)
    raise NoCompilerError(f"{' '.join(compiler)} fails ({reason})", "repair it")


def _run(command: Sequence[str]) -> str:
    """Run a command. Returns an empty string, or the first error line of a command that failed."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 0:
        return ""
    return next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")


def _key(compiler: Sequence[str]) -> str:
    """A hash of what the compiled file depends on: the sources, flags, compiler and processor."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    stat = os.stat(program := os.path.realpath(compiler[0]))
    machine = f"{FLAGS} {TRIED} {program} {stat.st_size} {stat.st_mtime_ns}"
    machine += f" {platform.machine()} {_features()}"
    return hashlib.sha256(b"".join([*parts, machine.encode()])).hexdigest()[:16]


def _features() -> str:
    """The processor's name and instruction sets. They matter since machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return " ".join(sorted(kept))


def _folder(name: str) -> tuple[Path, bool]:
    """The folder of a compiled file, and whether it is lasting.

    It is in selfspec's cache folder if the file exists there or can be written there. Else it is a temporary folder,
    with a warning.
    """
    from selfspec.kernels.machine import cache_folder, warn_not_kept

    try:
        place = cache_folder() / "compiled"
        if (place / name).is_file():  # the folder need not be writable
            return place, True
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place, True
    except OSError as problem:
        warn_not_kept(problem)
    return Path(tempfile.mkdtemp(prefix="selfspec-")), False
