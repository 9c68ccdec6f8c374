"""Clocks for comparing methods, and a record of the machine, versions and model of a measurement."""

from __future__ import annotations

import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import transformers

import selfspec
from selfspec import LLM

ROOT = Path(__file__).parents[1]
Result = TypeVar("Result")
Say = Callable[[str], None]  # prints a line of progress


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; without it a clock measures only launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The call's result and its seconds."""
    synchronize(device)
    start = perf_counter()
    result = call()
    synchronize(device)
    return result, perf_counter() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, so that no method's time includes collecting another one's objects.

    Explicit collections inside skip the objects that exist at the start.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def rotated(methods: Sequence[Result], by: int) -> list[Result]:
    """The methods in rotated order. Slow drifts of the machine's speed then affect all of them alike."""
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


def rates(steps: Sequence[tuple[float, int]], num_parts: int = 3) -> dict[str, float]:
    """Tokens per second of steps, each with its seconds and tokens; and of the slowest and the fastest third."""
    cuts = sorted({round(i * len(steps) / num_parts) for i in range(num_parts + 1)})
    parts = [steps[a:b] for a, b in pairwise(cuts)]
    speeds = [sum(tokens for _, tokens in part) / sum(seconds for seconds, _ in part) for part in parts]
    seconds, tokens = (sum(each) for each in zip(*steps, strict=True))
    return {"tokens_per_second": tokens / seconds, "lowest": min(speeds), "highest": max(speeds), "seconds": seconds}


class Spread(NamedTuple):
    """Median, minimum and maximum of some values, their number, and a confidence interval of the true median."""

    median: float
    low: float
    high: float
    num_values: int
    ci_low: float  # 95 % confidence; the range of the values where they are fewer than six
    ci_high: float


def spread(values: Iterable[float]) -> Spread:
    """The spread of at least one value. The interval is exact for any distribution: a binomial test on ranks."""
    from scipy.stats import quantile_test  # not on every machine that measures a device

    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    interval = quantile_test(ordered, p=0.5).confidence_interval(0.95)
    bounds = (low, high) if interval.low != interval.low else (float(interval.low), float(interval.high))  # NaN: few
    return Spread(statistics.median(ordered), low, high, len(ordered), *bounds)


def rounded(value: Any) -> Any:
    """Plain values with floats rounded to six significant digits, the precision of the clocks."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def environment(llm: LLM, config_model: str) -> dict[str, Any]:
    """One flat record of the machine, device and model of a measurement."""
    return {**machine(), **device(llm.target.split.device), **model(llm, config_model)}


def machine() -> dict[str, Any]:
    """A record of the time, command, commit, versions, CPU and threads."""
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
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": load_average(),
    }


def commit() -> dict[str, Any]:
    """The repository's commit, and whether files differ from it; None outside a repository."""
    head, status = _output("git", "rev-parse", "HEAD"), _output("git", "status", "--porcelain")
    return {"commit": head, "dirty": None if status is None else bool(status)}


def difference() -> str:
    """The output of `git diff HEAD`."""
    return _output("git", "diff", "HEAD") or ""


def _output(*command: str) -> str | None:
    """A command's standard output; None where it cannot be run or fails."""
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "timeout": 30}
    try:
        return subprocess.run(command, cwd=ROOT, check=True, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not report one."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Mean number of runnable processes over the last minute; well above `threads`, other programs were computing."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def device(where: torch.device) -> dict[str, Any]:
    """The device, and a GPU's name, memory, driver and CUDA version."""
    if where.type != "cuda":
        return {"device": str(where)}
    properties = torch.cuda.get_device_properties(where)
    gib = round(properties.total_memory / 2**30, 1)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"gpu": properties.name, "gpu_memory_gib": gib, "driver": driver and driver.split("\n")[0]}
    return {"device": str(where), **about, "cuda": torch.version.cuda}


def model(llm: LLM, name: str) -> dict[str, Any]:
    """The model's shape and number format, and the implementations that run its layers."""
    target = llm.target
    own = target.split.model
    return {
        "model": name,
        "architecture": type(own).__name__,
        "num_layers": target.split.num_layers,
        "num_parameters": sum(parameter.numel() for parameter in own.parameters()),
        "dtype": str(target.split.dtype).removeprefix("torch."),
        "attention_of_transformers": getattr(own.config, "_attn_implementation", None),
        "attention_of_selfspec": target.attention_backend,
        "graphs_of_selfspec": target.split.runner is not None,
        "engine_of_selfspec": target.split.backend,
    }
