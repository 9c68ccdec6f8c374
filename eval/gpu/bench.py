"""One command for a GPU: are the kernels right, how fast is the machine, and how near to it do we come?

    python -m eval gpu --output runs/gpu

Targets are synthetic: well-known shapes, random weights, a set acceptance. What there is no time or memory for is
reported as not measured. It needs torch and transformers only; `--smoke` runs all of it on a CPU, small, in a minute.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

from eval.environment import device, machine
from eval.gpu.figures import figures
from eval.gpu.record import Budget, Record
from eval.gpu.speed import Settings, Shape
from eval.gpu.table import render
from eval.shapes import SHAPES

MINUTES = 9.5
SHAPE_WEIGHTS = {"llama-3-8b": 4.0, "llama-2-7b": 2.5, "llama-3.2-1b": 2.0}
BATCHES = (1, 32, 8, 128, 4, 64, 2, 16)
FIRST_WEIGHTS = {"kernels": 0.8, "bandwidth": 0.2}
Say = Callable[[str], None]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval gpu", description=__doc__)
    parser.add_argument(
        "--output", default="runs/gpu", metavar="FOLDER", help="where gpu.json goes; default: %(default)s"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it; default: %(default)s")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPE_WEIGHTS), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCHES), help="the most telling first")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], help="default: 1024 8192")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="the same on a CPU with a tiny shape, in under a minute")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line asks for.

    Raises:
        ValueError: there is no such device, or a size is out of range.
    """
    if options.smoke:
        where, dtype = torch.device("cpu"), torch.float32
        return Settings(where, dtype, ("tiny",), (48, 96), (1, 2), (1, 2), (1, 2), 96, 0.05, 0.15, 4, 5.0)
    where = torch.device(options.device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device; --smoke runs the same, small, on a CPU")
    if min(*options.batch_sizes, *options.contexts, 1) < 1 or min(options.contexts) < 2 or options.minutes <= 0:
        raise ValueError("batch sizes must be at least 1, contexts at least 2 and minutes more than 0")
    batches = tuple(dict.fromkeys(options.batch_sizes))
    fixed = tuple(size for size in batches if size in (1, 8, 32))
    few = tuple(size for size in batches if size in (1, 8, 32))
    contexts = tuple(dict.fromkeys(options.contexts))
    dtype = getattr(torch, options.dtype)
    return Settings(where, dtype, tuple(options.shapes), contexts, batches, fixed, few, 768, 0.6, 1.2, 32, 100.0)


def kernels(where: torch.device, record: Record, say: Say) -> None:
    """Every kernel beside its twin, where this machine can run them."""
    try:
        from eval.gpu.kernels import check_kernels
    except ImportError as problem:
        return record.skip("kernels", f"{type(problem).__name__}: {problem}")
    if where.type != "cuda":
        return record.skip("kernels", "they need a CUDA device")
    record.content["kernels"] = check_kernels(where, say)
    return None


def bandwidth(where: torch.device, record: Record, say: Say) -> None:
    """How fast the device copies and multiplies; a CPU, or a machine without that part, only how fast it copies."""
    say("bandwidth")
    try:
        if where.type != "cuda":
            raise ImportError("they need a CUDA device")
        from eval.gpu.kernels import bandwidth as of_device

        record.content["bandwidth"] = of_device(where)
    except ImportError:
        record.content["bandwidth"] = copy_rate(where)


def copy_rate(where: torch.device, num_bytes: int = 1 << 26, repeats: int = 8) -> dict[str, Any]:
    """Bytes read and written per second by a large copy, the best of the repeats."""
    from eval.timing import timed

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), where)[1] for _ in range(repeats))
    return {"copy_bytes_per_second": 2 * num_bytes / seconds, "copied_bytes": 2 * num_bytes, "repeats": repeats}


def measure(options: argparse.Namespace, settings: Settings, record: Record, say: Say) -> None:
    """All parts in turn, each within its share of the time; the record is on disk after every figure."""
    start, content = perf_counter(), record.content
    weights = FIRST_WEIGHTS | {name: SHAPE_WEIGHTS.get(name, 2.0) for name in settings.shapes}
    budget = Budget(60 * options.minutes, weights)
    content |= {"benchmark": "gpu", "environment": {**machine(), **device(settings.device)}, "options": vars(options)}
    record.save()
    for name, part in {"kernels": kernels, "bandwidth": bandwidth}.items():
        with budget.part(name):
            try:
                part(settings.device, record, say)
            except Exception as problem:
                record.skip(name, f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
        record.save()
    for name in settings.shapes:
        with budget.part(name):
            shape = Shape(name, settings, budget, record, say)
            shape.found["contexts"] = list(settings.contexts)
            try:
                shape.measure()
            except Exception as problem:
                record.skip(name, f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
        tidy(settings.device)
        content["figures"] = [figure.as_dict() for figure in figures(content)]
        content["seconds"] = round(perf_counter() - start, 1)
        record.save()
    content["complete"] = True
    record.save()


def tidy(where: torch.device) -> None:
    """Give a shape's memory back: compiled code would keep its weights."""
    gc.collect()
    if where.type == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    start = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        settings = settings_of(options)
        unknown = [name for name in settings.shapes if name not in SHAPES and not Path(name).exists()]
        if unknown:
            raise ValueError(f"shapes must be of {', '.join(SHAPES)}, or a config.json, got {unknown[0]!r}")
        record = Record(Path(options.output) / "gpu.json")
    except (ValueError, OSError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    measure(options, settings, record, say)
    say(f"everything is in {record.path}")
    print(render(record.content))
    return 0
