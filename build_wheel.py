"""Compiles the engine into a wheel: a build hook of hatchling, which `make wheel` turns on.

SELFSPEC_WHEEL names the machine, x86_64 or aarch64, or one library. Without it the wheel is pure Python, and the engine
is compiled where it is used. The package ziglang is the compiler, since its libraries, for any machine, ask for an old
glibc alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("selfspec", "kernels")


def prebuilt() -> Any:
    """The module `selfspec.kernels.prebuilt`, without what the package depends on."""
    spec = importlib.util.spec_from_file_location("prebuilt", Path(__file__).parent / KERNELS / "prebuilt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prebuilt"] = module
    spec.loader.exec_module(module)
    return module


def command(library: Any, target: Any, sources: list[str]) -> list[str]:
    """The compiler's command for a library."""
    own = prebuilt()
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{library.machine}-linux-gnu.{own.GLIBC}"]
    return [*zig, f"-mcpu={library.cpu}", *own.FLAGS, "-g0", "-s", *sources, "-o", str(target)]


class CompiledEngine(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries of a machine to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name, own = os.environ.get("SELFSPEC_WHEEL", ""), prebuilt()
        if not name or version == "editable":
            return
        made = [one for one in own.LIBRARIES if name in (one.machine, one.name)]
        if not made:
            known = ", ".join(sorted({one.machine for one in own.LIBRARIES}))
            raise ValueError(f"SELFSPEC_WHEEL={name} is not known; choose one of {known}")
        folder = Path(self.root, "build", "prebuilt")
        folder.mkdir(parents=True, exist_ok=True)
        sources = sorted(map(str, Path(self.root, KERNELS, "cpu").glob("*.cpp")))
        for one in made:
            self.app.display_info(f"compiling {one.name}")
            target = folder / f"{one.name}.so"
            subprocess.run(command(one, target, sources), check=True)
            build_data["force_include"][str(target)] = str(KERNELS / "prebuilt" / target.name)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{own.GLIBC.replace('.', '_')}_{made[0].machine}"
