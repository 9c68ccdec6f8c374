"""Live decode speed of every fixed setting beside plain decoding, and what replay says of the same settings."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from eval.config import LiveConfig
from eval.live import PLAIN, fixed, way_of
from eval.live_timing import Scene, Way, call
from eval.replay import replay
from eval.run.studies.material import Material
from eval.timing import quiet, rotated

WARMUP = 4  # tokens
Cells = list[list[float]]  # a row per exit layer, a column per draft length


class Readings(NamedTuple):
    """Seconds of decoding, prefill apart."""

    plain: list[list[float]]  # per question, once per exit layer
    ratios: dict[str, list[float]]  # by way: plain's seconds over its own, per question


def study(material: Material) -> dict[str, Any]:
    """The record; every speedup, measured or predicted, is a median over the questions of the ratio to plain."""
    config, scene = LiveConfig(), material.scene(material.tokens, material.costs())
    exits, lengths = config.exits_of(material.num_layers), config.draft_lengths
    grid = [[fixed(scene.costs, e, d) for d in lengths] for e in exits]
    read = measured(scene, grid, material)
    speedup = [[median(read.ratios[way.name]) for way in row] for row in grid]
    expected = predicted(scene, grid)
    plain = sum(len(trace.tokens) for trace in scene.traces) / sum(median(seconds) for seconds in read.plain)
    best, likely = (_highest(cells) for cells in (speedup, expected))

    def setting(at: tuple[int, int]) -> dict[str, Any]:
        return {"exit_layer": exits[at[0]], "draft_length": lengths[at[1]], "speedup": speedup[at[0]][at[1]]}

    return {
        "study": "grid",
        "exit_layers": list(exits),
        "draft_lengths": list(lengths),
        "plain_tokens_per_second": plain,
        "tokens_per_second": [[plain * ratio for ratio in row] for row in speedup],
        "predicted_speedup": expected,
        "best": setting(best),
        "predicted_best": {**setting(likely), "predicted_speedup": expected[likely[0]][likely[1]]},
        "num_questions": len(scene.prompts),
        "tokens": material.tokens,
    }


def measured(scene: Scene, grid: list[list[Way]], material: Material) -> Readings:
    """Time the grid question by question, an exit layer's settings together with a plain call of their own.

    What drifts meanwhile reaches both sides of a ratio; the order rotates from question to question.
    """
    plain = way_of(scene, PLAIN)
    groups = [[plain, *row] for row in grid]
    read = Readings([], {way.name: [] for row in grid for way in row})
    for way in [plain, *(way for row in grid for way in row)]:
        call(scene.only(0), way, 1, WARMUP)
    for i in range(len(scene.prompts)):
        material.say(f"grid: question {i + 1} of {len(scene.prompts)}")
        one = scene.only(i)
        read.plain.append([])
        for ways in rotated(groups, i):
            with quiet():
                seconds = {way.name: call(one, way, 1).decoding for way in rotated(ways, i)}
            own = seconds.pop(plain.name)
            read.plain[-1].append(own)
            for name, took in seconds.items():
                read.ratios[name].append(own / took)
    return read


def predicted(scene: Scene, grid: list[list[Way]]) -> Cells:
    """The same medians by exact replay at the scene's costs."""
    ones = [scene.only(i) for i in range(len(scene.prompts))]

    def seconds(way: Way) -> list[float]:
        return [replay(one.traces, way.make(), scene.costs).seconds for one in ones]

    plain = seconds(way_of(scene, PLAIN))
    return [[median(a / b for a, b in zip(plain, seconds(way), strict=True)) for way in row] for row in grid]


def _highest(cells: Cells) -> tuple[int, int]:
    return max(((i, j) for i, row in enumerate(cells) for j in range(len(row))), key=lambda at: cells[at[0]][at[1]])
