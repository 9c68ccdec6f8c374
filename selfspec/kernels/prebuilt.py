"""Compiled libraries that wheels bring, and which of them this processor runs.

`make wheel` compiles them (`build_wheel.py`). This file imports nothing else of the package, since it is read before
the package is built.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "prebuilt"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=off")
GLIBC = "2.28"  # the oldest that libraries run with; torch's own wheels ask for it, too


class Library(NamedTuple):
    """A library of a wheel."""

    name: str
    machine: str
    """As `platform.machine` names it."""
    features: frozenset[str]
    """What the processor must have, as /proc/cpuinfo names it."""
    cpu: str
    """The compiler's -mcpu."""

    @property
    def file(self) -> Path:
        """Where it lies in an installed wheel."""
        return FOLDER / f"{self.name}.so"


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
_NEON = frozenset({"asimd"})
LIBRARIES = (
    Library("amx", "x86_64", _AMX, "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16"),
    Library("avx512_bf16", "x86_64", _AVX512 | {"avx512_bf16"}, "x86_64_v4+avx512vnni+avx512bf16"),
    Library("avx512_vnni", "x86_64", _AVX512, "x86_64_v4+avx512vnni"),
    Library("avx2_vnni", "x86_64", _AVX2 | {"avx_vnni"}, "x86_64_v3+avxvnni"),
    Library("avx2", "x86_64", _AVX2, "x86_64_v3"),
    Library("neon_i8mm", "aarch64", _NEON | {"asimddp", "i8mm"}, "generic+dotprod+i8mm"),
    Library("neon", "aarch64", _NEON, "generic"),
)
"""The fastest of each machine first."""


def features() -> frozenset[str]:
    """The instruction sets of this machine's processor; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    kept = (line.partition(":") for line in lines)
    found = next((value for key, _, value in kept if key.strip() in ("flags", "Features")), "")
    return frozenset(found.split())


def find() -> Path | None:
    """The fastest library of this wheel that the processor runs; None in a checkout and where there is none."""
    if not FOLDER.is_dir():
        return None
    machine, own = platform.machine(), features()
    fits = (one.file for one in LIBRARIES if one.machine == machine and one.features <= own)
    return next((file for file in fits if file.is_file()), None)
