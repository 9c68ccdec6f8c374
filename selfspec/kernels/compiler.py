"""The C++ of `cpu/`, compiled once per machine by the compiler that is there, and kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
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

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off")
# What this processor has, where the compiler can tell, and threads, where it knows them: the first that works is taken.
TRIED = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ("-mcpu=native",), ())
SECONDS = 120  # after which a compiler is given up
_log = logging.getLogger("selfspec")


def find_compiler() -> str | None:
    """The C++ compiler: the program that $CXX names, else g++ or clang++; None where there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled functions of `cpu`; compiled now if they never were on this machine.

    Raises:
        NoCompilerError: there is no compiler, or it cannot compile them, with the reason.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NoCompilerError("neither $CXX nor g++ nor clang++ was found", "install one")
    folder, is_lasting = _folder(name := f"body-{_key(compiler)}.so")
    file = folder / name
    try:
        if not file.is_file():
            _compile(compiler, file, f", kept in {file}" if is_lasting else "")
        return ctypes.CDLL(str(file))
    except OSError as problem:
        with suppress(OSError):
            file.unlink()  # broken, or of another system under the same name: the next program compiles anew
        raise NoCompilerError(f"{file} cannot be loaded ({problem})", "run it again") from problem
    finally:
        if not is_lasting:
            shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays loaded


def _compile(compiler: str, file: Path, kept: str) -> None:
    start = perf_counter()
    reason = ""
    _log.warning("compiling for this machine's processor with %s, ten to thirty seconds, once ...", compiler)
    for more in TRIED:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}-", suffix=".tmp")
        os.close(handle)
        reason = _run([compiler, *FLAGS, *more, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", name])
        if not reason:
            os.replace(name, file)  # whole or not at all: of several programs that compile at once, the last one wins
            _log.warning("compiled in %.1f s%s", perf_counter() - start, kept)
            return
        with suppress(OSError):
            os.unlink(name)
    raise NoCompilerError(f"{compiler} fails ({reason})", "repair it")


def _run(command: Sequence[str]) -> str:
    """Empty, or the last line of what a failed command said."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 0:
        return ""
    return next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")


def _key(compiler: str) -> str:
    """What the compiled file depends on: the sources, the flags, the compiler and the processor."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    stat = os.stat(os.path.realpath(compiler))
    about = f"{FLAGS} {TRIED} {os.path.realpath(compiler)} {stat.st_size} {stat.st_mtime_ns}"
    about += f" {platform.machine()} {_features()}"
    return hashlib.sha256(b"".join([*parts, about.encode()])).hexdigest()[:16]


def _features() -> str:
    """The processor's name and instruction sets: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return " ".join(sorted(kept))


def _folder(name: str) -> tuple[Path, bool]:
    """Where a compiled file is or can be kept, in selfspec's cache folder; else, with a notice, a temporary folder."""
    from selfspec.kernels.places import cache_folder, say_unkept

    try:
        place = cache_folder() / "compiled"
        if (place / name).is_file():  # which need not be a folder that can be written to
            return place, True
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place, True
    except OSError as problem:
        say_unkept(problem)
    return Path(tempfile.mkdtemp(prefix="selfspec-")), False
