"""What a figure depends on beside the code: machine, threads, versions, commit, number format, attention."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec
from eval.models import Target

ROOT = Path(__file__).parents[1]


def environment(target: Target, config_model: str) -> dict[str, Any]:
    """One flat record of where and with what a measurement is made."""
    return {**machine(), **device(target.stack.device), **model(target, config_model)}


def machine() -> dict[str, Any]:
    """What of it no model has a part in."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "eval", *sys.argv[1:]]),
        **commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "selfspec": selfspec.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": load_average(),
    }


def commit() -> dict[str, Any]:
    """The repository's commit, and whether files differ from it; None outside a repository."""
    head, status = _output("git", "rev-parse", "HEAD"), _output("git", "status", "--porcelain")
    return {"commit": head, "dirty": None if status is None else bool(status)}


def _output(*command: str) -> str | None:
    """What a command writes to standard output; None where it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted a core over the last minute; well above `threads`, others were computing too."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def device(where: torch.device) -> dict[str, Any]:
    """The device, and the accelerator's name, memory and CUDA version where there is one."""
    if where.type != "cuda":
        return {"device": str(where)}
    properties = torch.cuda.get_device_properties(where)
    gib = round(properties.total_memory / 2**30, 1)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"gpu": properties.name, "gpu_memory_gib": gib, "driver": driver and driver.split("\n")[0]}
    return {"device": str(where), **about, "cuda": torch.version.cuda}


def model(target: Target, name: str) -> dict[str, Any]:
    """The checkpoint's shape, its number format, and the code that runs its layers on either side."""
    own = target.stack.model
    return {
        "model": name,
        "architecture": type(own).__name__,
        "num_layers": target.stack.num_layers,
        "num_parameters": sum(parameter.numel() for parameter in own.parameters()),
        "dtype": str(target.stack.dtype).removeprefix("torch."),
        "attention_of_transformers": getattr(own.config, "_attn_implementation", None),
        "attention_of_selfspec": target.attention_backend,
        "graphs_of_selfspec": target.stack.runner is not None,
        "engine_of_selfspec": target.stack.engine,
    }


def difference() -> str:
    """How the repository's files differ from its commit, as git shows it."""
    return _output("git", "diff", "HEAD") or ""
