"""Adaptive, and the fixed setting that replay finds best, over plain decoding by batch size, live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval.config import LiveConfig
from eval.live import ADAPTIVE, time_batch
from eval.run.studies.material import Material
from selfspec.calibrate.measure import measure
from selfspec.control.costs import Costs
from selfspec.model.fingerprint import hidden_size_of

SIZES = (1, 2, 4, 8, 16, 32)
CONFIG = LiveConfig(batch_sizes=SIZES, finalists=1, repeats=3, warmup_tokens=4)
COST_REPEATS, COST_SECONDS = 3, 15.0  # the costs of all sizes take no longer, or one repeat
WIDEST = 9  # tokens per row of a verification
COPIES = 4  # of the logits, while tokens are picked


def study(material: Material) -> dict[str, Any]:
    """The record; a batch size that memory does not hold, and those above it, are left out."""
    tokens = material.tokens
    longest = max(len(prompt.ids) for prompt in material.prompts) + tokens
    sizes = affordable(SIZES, material, longest)
    scene = material.scene(tokens, costs_of(material, sizes))
    timed: list[dict[str, Any]] = []
    for size in sizes:
        material.say(f"batch: {size} {'row' if size == 1 else 'rows'}")
        try:
            timed.append(time_batch(scene, size, CONFIG, "batch", lambda text: None))
        except torch.OutOfMemoryError:
            if not timed:
                raise
            break
    adaptive = [_named(each, each["adaptive"]) for each in timed]
    best = [_named(each, each["best_fixed"]) for each in timed]
    return {
        "study": "batch",
        "batch_sizes": [each["batch_size"] for each in timed],
        "methods": [
            {"method": ADAPTIVE, "speedup": [_speedup(method) for method in adaptive]},
            {
                "method": "best fixed",
                "speedup": [_speedup(method) for method in best],
                "settings": [",".join(map(str, method["settings"].values())) for method in best],
            },
        ],
        "tokens": tokens,
    }


def costs_of(material: Material, sizes: Sequence[int]) -> Costs:
    """Costs of batches of these sizes, measured now, or the user's own table."""
    material.say("batch: measuring costs")
    if not material.cost_repeats:
        return material.target.costs(max(sizes))
    repeats = min(COST_REPEATS, material.cost_repeats)
    return measure(material.target.stack, sizes, repeats, within=COST_SECONDS)


def affordable(sizes: Sequence[int], material: Material, longest: int) -> list[int]:
    """The sizes whose rows of `longest` tokens fill no more than half the free memory; the first in any case."""
    stack = material.target.stack
    of_token = (
        2 * stack.num_layers * hidden_size_of(stack) * torch.finfo(stack.hidden_dtype).bits // 8
    )  # keys and values
    of_row = longest * of_token + WIDEST * stack.vocab_size * 4 * COPIES
    return [size for size in sizes if size == sizes[0] or size * of_row <= free_bytes(stack.device) / 2]


def free_bytes(device: torch.device) -> float:
    """Free memory where the model is; infinite where nobody tells."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return float("inf")
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(free[0]) if free else float("inf")


def _named(timed: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(method for method in timed["methods"] if method["method"] == name)
    return found


def _speedup(method: dict[str, Any]) -> dict[str, float]:
    return {name: method["live"][name] for name in ("median", "low", "high")}
