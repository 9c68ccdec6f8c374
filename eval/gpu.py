"""Measure decoding on a GPU, and compare it with the speed of the device: `python -m eval gpu --minutes 4`.

Targets are synthetic: well-known shapes, random weights, a set acceptance. Every shape is measured in its own process,
so a lost CUDA context or a crash costs one figure. The record is written after every figure, the most important first:
`--minutes 4` gives, for the first shape, plain, fixed and adaptive decoding at the first two batch sizes with the
device's busy time, kernels and bytes, each way to run the layers, and adaptive at the other batch sizes; then exact
mode, prefill, attention and peers as far as they fit. Other figures are reported as not measured, with the reason.
`--config configs/eval/gpu_small.yaml` tries the command on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eval.config import FOLDER, add_flags, check, flags_given, read_config
from eval.gpu_figures import figures
from eval.gpu_peers import read_peer
from eval.gpu_plan import GpuConfig
from eval.gpu_shape import OPENING, Save, measure_shape, one_line
from eval.gpu_table import render
from eval.measurement import machine
from eval.synthetic import SHAPES

WEIGHTS = {"llama-3-8b": 6.0, "smollm2-135m": 4.0}  # shares of the time by shape; the other shapes have DEFAULT_WEIGHT
DEFAULT_WEIGHT = 2.0
FIRST_SECONDS = 160.0  # minimum of the first shape in a short run
GRACE = 30.0  # seconds that a process may exceed its time, to finish its current figure


class Run:
    """Measures all shapes in turn, each in its own process and within its share of the time.

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
        """Measure all shapes; returns the record, with a reason for every missing figure."""
        for number, name in enumerate(self.config.shapes):
            self.measure_shape(name, self.end_of(number))
        self.content["complete"] = True
        self.save()
        return self.content

    def end_of(self, number: int) -> float:
        """The end of a shape that begins now; the shapes after it keep their shares of the remaining time."""
        now = perf_counter()
        left = max(0.0, self.end - now)
        weights = [WEIGHTS.get(name, DEFAULT_WEIGHT) for name in self.config.shapes[number:]]
        least = FIRST_SECONDS if number == 0 else 0.0
        return now + min(left, max(left * weights[0] / sum(weights), least))

    def measure_shape(self, name: str, end: float) -> None:
        """Measure a shape; after a lost process, again in a new one without the figure that was being measured."""
        shapes = self.content["shapes"]

        def keep(found: dict[str, Any]) -> None:
            shapes[name] = found
            self.save()

        while True:
            found: dict[str, Any] = shapes.get(name, {"cells": [], "tried": [], "not_measured": []})
            needed, left = self.opening_seconds(name), end - perf_counter()
            why: str | None = f"about {needed:.0f} s needed to open it, {max(0, left):.0f} s left"
            trying = name
            if left >= needed:
                keep({**found, "trying": OPENING})  # a process that is lost now is not started again
                why = run_in_process(measure_shape, (name, self.config, self.start, end, found), end, keep)
                found = shapes.get(name, found)
                trying = found.get("trying", OPENING)
            if why is None:
                return
            keep({**found, "not_measured": [*found["not_measured"], {"what": trying, "why": why}]})
            if left < needed or trying == OPENING:
                return

    def opening_seconds(self, name: str) -> float:
        """Seconds that a shape took to open, or the fastest other shape if it has not been opened."""
        made = {one: shape["made_in"] for one, shape in self.content["shapes"].items() if "made_in" in shape}
        return float(made.get(name, min(made.values(), default=0.0)))

    def save(self) -> None:
        """Replace the record's file in one step."""
        self.content["figures"] = [figure._asdict() for figure in figures(self.content)]
        self.content["seconds"] = round(perf_counter() - self.start, 1)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n", "utf-8")
        os.replace(temporary, self.path)


def run_in_process(work: Callable[..., None], given: Sequence[Any], end: float, save: Save) -> str | None:
    """Call `work(send, *given)` in a new process; `save` receives what it sends.

    Args:
        work: a function of a module; it and its arguments must be picklable.
        end: the planned end, on the clock of `perf_counter`. The process is killed `GRACE` seconds later.

    Returns:
        Why the work was not completed, in one line; None if it was.
    """
    context = get_context("spawn")  # a forked process would inherit this one's CUDA state
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, work, given))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, end + GRACE - perf_counter())):
            kind, content = receiver.recv()
            if kind == "ended":
                return content
            save(content)
        return f"it exceeded its time by {GRACE:.0f} s and was killed"
    except (EOFError, OSError):  # the process has died, perhaps while it was sending
        process.join()
        code = process.exitcode or 0
        return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        process.kill()  # a process with a lost context may not end by itself
        process.join()
        receiver.close()


def _work(sender: Connection, work: Callable[..., None], given: Sequence[Any]) -> None:
    try:
        work(lambda content: sender.send(("content", content)), *given)
    except Exception as problem:
        sender.send(("ended", one_line(problem)))
    else:
        sender.send(("ended", None))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError: the device or a shape does not exist, or an option is out of range.
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
    names = [read_peer(folder).name for folder in config.peer]
    check(len(set(names)) == len(names), "peer", "folders of different names", names)
    path = Path(options.output) / "gpu.json"
    print(render(Run(config, path).measure()))
    print(f"\nThe record is in {path}.")
    return 0
