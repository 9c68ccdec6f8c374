"""How fast does a GPU decode, and how near is that to what the device can do: `python -m eval gpu --minutes 4`.

Targets are synthetic: well-known shapes, random weights, a set acceptance. Every shape is measured in a process of its
own: a lost CUDA context or a crash costs the figure it was at. The record is written after every figure, the most
telling first: `--minutes 4` gives plain, fixed and adaptive decoding of the first shape at the first two batch sizes,
beside transformers' `generate`. What there is no time or memory for is reported as not measured.
`--config configs/eval/gpu_small.yaml` tries the same on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eval.config import FOLDER, add_flags, flags_given, read_config
from eval.gpu_process import run_apart
from eval.gpu_shape import MAKING, GpuConfig, measure_shape
from eval.gpu_table import figures, render
from eval.measurement import machine
from eval.shapes import SHAPES

WEIGHTS = {"llama-3-8b": 4.0}  # shares of the time; every other shape has OTHERS
OTHERS = 2.0
FIRST_SECONDS = 160.0  # that the first shape has at least in a short run


class Run:
    """All shapes in turn, each in a process of its own and within its share of the time.

    Args:
        path: the file of the record, written after every figure.
    """

    def __init__(self, config: GpuConfig, path: Path) -> None:
        self.config, self.path, self.start = config, path, perf_counter()
        self.end = self.start + 60 * config.minutes
        self.content: dict[str, Any] = {
            "complete": False,
            "benchmark": "gpu",
            "environment": machine(),
            "config": dataclasses.asdict(config),
            "shapes": {},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def measure(self) -> dict[str, Any]:
        """The record, with a reason for everything that is not in it."""
        for number, name in enumerate(self.config.shapes):
            self.shape(name, self.end_of(number))
        self.content["complete"] = True
        self.save()
        return self.content

    def end_of(self, number: int) -> float:
        """When a shape that begins now is to end: shapes after it have their shares of what is left."""
        now = perf_counter()
        left = max(0.0, self.end - now)
        weights = [WEIGHTS.get(name, OTHERS) for name in self.config.shapes[number:]]
        least = FIRST_SECONDS if number == 0 else 0.0
        return now + min(left, max(left * weights[0] / sum(weights), least))

    def shape(self, name: str, end: float) -> None:
        """A shape; once more in a fresh process, without the figure it was at, as often as a process is lost."""
        shapes = self.content["shapes"]

        def keep(found: dict[str, Any]) -> None:
            shapes[name] = found
            self.save()

        while True:
            found: dict[str, Any] = shapes.get(name, {"cells": [], "tried": [], "not_measured": []})
            needed, left = self.seconds_to_make(name), end - perf_counter()
            why: str | None = f"about {needed:.0f} s needed to make it, {max(0, left):.0f} s left"
            at = name
            if left >= needed:
                keep({**found, "trying": MAKING})  # a process that is lost before it tells more is not tried again
                why = run_apart(measure_shape, (name, self.config, self.start, end, found), end, keep)
                found = shapes.get(name, found)
                at = found.get("trying", MAKING)
            if why is None:
                return
            keep({**found, "not_measured": [*found["not_measured"], {"what": at, "why": why}]})
            if left < needed or at == MAKING:
                return

    def seconds_to_make(self, name: str) -> float:
        """As it took before; for a shape that was not made yet, as the quickest other one took."""
        made = {one: shape["made_in"] for one, shape in self.content["shapes"].items() if "made_in" in shape}
        return float(made.get(name, min(made.values(), default=0.0)))

    def save(self) -> None:
        """The old file or the new one is there at every moment, never a part of one."""
        self.content["figures"] = [figure.as_dict() for figure in figures(self.content)]
        self.content["seconds"] = round(perf_counter() - self.start, 1)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
        os.replace(beside, self.path)


def main(arguments: Sequence[str]) -> int:
    """The exit code.

    Raises:
        ValueError, OSError: there is no such device or shape, or an option is out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m eval gpu", description=__doc__)
    parser.add_argument("--config", default=str(FOLDER / "gpu.yaml"), help="YAML file with keys named as the flags")
    parser.add_argument("--output", default="runs/gpu", metavar="FOLDER", help="for gpu.json; default: %(default)s")
    add_flags(parser, GpuConfig)
    options = parser.parse_args(arguments)
    config = read_config(GpuConfig, options.config, flags_given(options, GpuConfig))
    if torch.device(config.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device; --config configs/eval/gpu_small.yaml tries it on a CPU")
    for name in config.shapes:
        if name not in SHAPES and not Path(name).exists():
            raise ValueError(f"shapes must be of {', '.join(SHAPES)}, or a config.json, got {name!r}")
    path = Path(options.output) / "gpu.json"
    print(render(Run(config, path).measure()))
    print(f"\nThe record is in {path}.")
    return 0
