"""One command for a GPU: are the kernels right, how fast is the machine, and how near to it do we come?

    python -m eval gpu --output runs/gpu

Targets are synthetic: well-known shapes, random weights, a set acceptance. What there is no time or memory for is
reported as not measured. Every shape is measured in a process of its own: one that loses its CUDA context, or crashes,
costs the figure it was at. The record is written after every figure, the most telling ones first: `--minutes 4` gives
plain, fixed and adaptive decoding of the first shape at the first two batch sizes, beside transformers' `generate`.
It needs torch and transformers only; `--smoke` runs all of it on a CPU, small, in a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eval.environment import device, machine
from eval.gpu.figures import figures
from eval.gpu.parts import measure_device, measure_shape, sayer
from eval.gpu.process import run_apart
from eval.gpu.record import Budget, Content, Record, file_writer, merged
from eval.gpu.speed import MAKING, Settings
from eval.gpu.table import render
from eval.shapes import SHAPES

MINUTES = 9.5
SHAPE_WEIGHTS = {"llama-3-8b": 4.0, "llama-2-7b": 2.5, "llama-3.2-1b": 2.0}
DEVICE, DEVICE_WEIGHT = "the device and its kernels", 1.0
FIRST_SECONDS, DEVICE_SECONDS = 160.0, 55.0  # that the first shape and the device have at least, of a short run
BATCHES = (1, 32, 8, 128, 4, 64, 2, 16)


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


class Run:
    """All parts in turn, each in a process of its own and within its share of the time.

    Args:
        write: given the whole record after every figure.
    """

    def __init__(self, options: argparse.Namespace, settings: Settings, write: Callable[[Content], None]) -> None:
        self.settings, self.start = settings, perf_counter()
        weights = {DEVICE: DEVICE_WEIGHT} | {name: SHAPE_WEIGHTS.get(name, 2.0) for name in settings.shapes}
        least = {settings.shapes[0]: FIRST_SECONDS, DEVICE: DEVICE_SECONDS}
        self.budget, self.record = Budget(60 * options.minutes, weights, least), Record(write)
        about = {**machine(), **device(settings.device)}
        self.record.content |= {"complete": False, "benchmark": "gpu", "environment": about, "options": vars(options)}
        self.record.save()

    def measure(self) -> Content:
        """The record, with a reason for everything that is not in it."""
        first, *others = self.settings.shapes
        self._shape(first)  # what it tells is worth most
        self._device()
        for name in others:
            self._shape(name)
        self._keep({**self.record.content, "complete": True})
        return self.record.content

    def _device(self) -> None:
        end = self.budget.end_of(DEVICE)
        why = self._apart(measure_device, (self.settings.device, self.start, end), end)
        if why is not None:
            self.record.skip(DEVICE, why)

    def _shape(self, name: str) -> None:
        """A shape; once more in a fresh process, without the figure it was at, where a process was lost."""
        end, found = self.budget.end_of(name), None
        while True:
            needed, left = self._seconds_to_make(name), end - perf_counter()
            if left < needed:
                return self.record.skip(name, f"about {needed:.0f} s needed to make it, {max(0, left):.0f} s left")
            why = self._apart(measure_shape, (name, self.settings, self.start, end, found), end)
            if why is None:
                return None
            found = self._shapes().get(name)
            if found is None or found["trying"] == MAKING:
                return self.record.skip(name, why)
            self.record.skip(found["trying"], why)

    def _seconds_to_make(self, name: str) -> float:
        """What making the target took before; of a shape that was not made yet, what the quickest other one took."""
        made = {one: shape["made_in"] for one, shape in self._shapes().items() if "made_in" in shape}
        return made.get(name, min(made.values(), default=0.0))

    def _shapes(self) -> dict[str, Any]:
        return self.record.content.get("shapes", {})

    def _apart(self, work: Callable[..., None], given: Sequence[Any], end: float) -> str | None:
        before = self.record.content
        return run_apart(work, given, end, lambda part: self._keep(merged(before, part)))

    def _keep(self, content: Content) -> None:
        content["figures"] = [figure.as_dict() for figure in figures(content)]
        content["seconds"] = round(perf_counter() - self.start, 1)
        self.record.content = content
        self.record.save()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        settings = settings_of(options)
        unknown = [name for name in settings.shapes if name not in SHAPES and not Path(name).exists()]
        if unknown:
            raise ValueError(f"shapes must be of {', '.join(SHAPES)}, or a config.json, got {unknown[0]!r}")
        path = Path(options.output) / "gpu.json"
        run = Run(options, settings, file_writer(path))
    except (ValueError, OSError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    content = run.measure()
    sayer(run.start)(f"everything is in {path}")
    print(render(content))
    return 0
