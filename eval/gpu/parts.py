"""What a run measures in processes of their own: the device with its kernels, and every shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

from eval.gpu.record import Record
from eval.gpu.speed import Settings, Shape
from eval.timing import timed

KERNEL_SECONDS = 40.0  # after which no other kernel is compared: the tests compare all
Say = Callable[[str], None]


def sayer(start: float) -> Say:
    """Prints progress with the seconds since `start`, which are the same in every process."""

    def say(text: str) -> None:
        print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def measure_device(record: Record, where: torch.device, start: float, end: float) -> None:
    """How fast the device is, and every kernel beside its twin; of a CPU, only how fast it copies.

    Args:
        start: when the run began, and `end`: when this part is to be over, in the seconds of `perf_counter`.
    """
    try:
        if where.type != "cuda":
            raise ImportError("they need a CUDA device")
        from eval.gpu.kernels import bandwidth, check_kernels
    except ImportError as problem:  # or there is no Triton
        record.content["bandwidth"] = copy_rate(where)
        return record.skip("kernels", str(problem))
    say = sayer(start)
    say("bandwidth")
    record.content["bandwidth"] = bandwidth(where)
    record.content["kernels"] = []
    record.save()
    end = min(end, perf_counter() + KERNEL_SECONDS)
    for case in check_kernels(where):
        say(f"{case.kernel}, {case.case}: {case.error:.2g} of {case.allowed:.2g} allowed")
        record.content["kernels"].append(case.as_dict())
        record.save()
        if perf_counter() > end:
            return record.skip("the other kernels", "no time left; `pytest -m gpu tests/gpu` compares all")
    return None


def copy_rate(where: torch.device, num_bytes: int = 1 << 26, repeats: int = 8) -> dict[str, Any]:
    """Bytes read and written per second by a large copy, the best of the repeats."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), where)[1] for _ in range(repeats))
    return {"copy_bytes_per_second": 2 * num_bytes / seconds, "copied_bytes": 2 * num_bytes, "repeats": repeats}


def measure_shape(
    record: Record, name: str, settings: Settings, start: float, end: float, found: dict[str, Any] | None
) -> None:
    """Everything of one shape, but for what `found` says was tried before; `start` and `end` as above."""
    logging.set_verbosity_error()
    Shape(name, settings, end, record, sayer(start), found).measure()
