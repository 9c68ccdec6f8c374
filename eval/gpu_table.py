"""The record of `python -m eval gpu` as figures with goals, and as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eval.figures import table
from eval.gpu_rates import PEERS
from eval.gpu_shape import DRAFT_TOKENS, OURS

Shape = dict[str, Any]
SHARES = {"llama-3-8b": 0.8, "llama-3.2-1b": 0.6}  # of the copy bandwidth, that plain decoding is to reach
SHOWN = 6  # things not measured that a shape's table names


class Figure(NamedTuple):
    """One figure; `value` None: not measured, and `why`."""

    name: str
    value: float | None
    goal: float | None = None
    at_least: bool = True  # whether more is better
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        holds = None
        if self.value is not None and self.goal is not None:
            holds = self.value >= self.goal if self.at_least else self.value <= self.goal
        return {**self._asdict(), "holds": holds}


def figures(content: dict[str, Any]) -> list[Figure]:
    """All of them, shape by shape; those that are missing say why. The goals are a GPU's, and left out elsewhere."""
    found: list[Figure] = []
    for name, shape in content["shapes"].items():
        if "target" not in shape:
            found.append(Figure(f"{name}: everything", None, why="the target could not be made"))
            continue
        of_shape = (*_of_plain(name, shape), *_of_drafts(name, shape), *_of_forwards(shape))
        found += [figure._replace(name=f"{name}: {figure.name}") for figure in of_shape]
    on_gpu = content["config"]["device"].startswith("cuda")
    return found if on_gpu else [figure._replace(goal=None) for figure in found]


def _cell(shape: Shape, method: str, batch: int, context: int) -> dict[str, Any] | None:
    wanted = method, batch, context
    return next((c for c in shape["cells"] if (c["method"], c["batch"], c["context"]) == wanted), None)


def _first_context(shape: Shape) -> int:
    return int(shape["cells"][0]["context"]) if shape["cells"] else 0


def _of_plain(name: str, shape: Shape) -> Iterator[Figure]:
    context, sizes = _first_context(shape), shape["sizes"]
    plain, busy = _cell(shape, "plain", 1, context), shape.get("busy", {})
    read = sizes["read_bytes"] + context * sizes["kv_bytes_per_token"]
    share = None
    if plain:
        share = plain["tokens_per_second"] * read / shape["speed"]["copy_bytes_per_second"]
    title = f"plain, batch 1, context {context}: share of the copy bandwidth"
    yield Figure(title, share, SHARES.get(name), why="plain decoding was not measured")
    for method in ("plain", "fixed"):
        cell, told = _cell(shape, method, 1, context), busy.get(method)
        waits = None
        if cell and told:
            per_round = cell["seconds"] / cell["rounds"]
            waits = max(0.0, 1 - told["busy_seconds"] / per_round)
        title = f"{method}, batch 1: share of a round that the device waits for the host"
        yield Figure(title, waits, 0.05, False, "the device's own time was not measured")
        if told:
            yield Figure(f"{method}, batch 1: launches per round", told["launches"])


def expected_speedup(layers: int, exit_layer: int, drafted: int, head: float, acceptance: float) -> float:
    """Speculation over plain decoding at batch 1, where every pass takes as long as the weights it reads.

    A round drafts `drafted` tokens through `exit_layer` layers and the head (as long as `head` layers), runs the last
    of them through the early layers, and verifies.
    """
    cost = (drafted * (exit_layer + head) + exit_layer + (layers - exit_layer) + head) / (layers + head)
    tokens = sum(acceptance**i for i in range(drafted + 1))
    return tokens / cost


def _of_drafts(name: str, shape: Shape) -> Iterator[Figure]:
    context, target = _first_context(shape), shape["target"]
    plain, fixed = (_cell(shape, method, 1, context) for method in ("plain", "fixed"))
    exit_layer, goal = target["exit_layer"], 1.8 if name == "llama-2-7b" else None
    title = f"fixed (E={exit_layer}, D={DRAFT_TOKENS}), batch 1: times plain"
    if plain is None or fixed is None or fixed["acceptance"] is None:
        yield Figure(title, None, goal, why="one of the two was not measured")
    else:
        gained = fixed["tokens_per_second"] / plain["tokens_per_second"]
        head = shape["sizes"]["head_in_layers"]
        model = expected_speedup(target["num_layers"], exit_layer, DRAFT_TOKENS, head, fixed["acceptance"])
        yield Figure(title, gained, goal)
        told = f"the same over the cost model's {model:.2f} at acceptance {fixed['acceptance']:.2f}"
        yield Figure(told, gained / model, 0.9)
    ratios = {}
    for cell in shape["cells"]:
        plain = _cell(shape, "plain", cell["batch"], cell["context"])
        if cell["method"] == "adaptive" and plain is not None:
            ratio = cell["tokens_per_second"] / plain["tokens_per_second"]
            ratios[f"batch {cell['batch']}, context {cell['context']}"] = ratio
    if not ratios:
        yield Figure("adaptive: times plain, where it is lowest", None, 1.0, why="not measured at any batch size")
        return
    worst = min(ratios, key=lambda where: ratios[where])
    yield Figure(f"adaptive: times plain, lowest of {len(ratios)} ({worst})", ratios[worst], 1.0)


def _of_forwards(shape: Shape) -> Iterator[Figure]:
    goals = {"4 tokens per row over 1": 1.25, "ragged rows over even ones, as many tokens": 1.05}
    forwards = shape.get("forwards")
    for (title, goal), (one, over) in zip(goals.items(), (("even", "one"), ("ragged", "even")), strict=True):
        if forwards is None:
            yield Figure(f"forward: {title}", None, goal, False, "it was not measured")
            continue
        seconds, where = forwards["seconds"], f"batch {forwards['rows']}, context {forwards['context']}"
        yield Figure(f"forward, {where}: {title}", seconds[one] / seconds[over], goal, False)


def render(content: dict[str, Any]) -> str:
    """Tokens per second of every shape by way to decode and batch, then the figures."""
    return "\n\n".join(_parts(content))


def _parts(content: dict[str, Any]) -> Iterator[str]:
    env = content["environment"]
    names = [shape["device"].get("gpu", env["cpu"]) for shape in content["shapes"].values() if "device" in shape]
    yield f"{names[0] if names else env['cpu']}, torch {env['torch']}, transformers {env['transformers']}"
    for name, shape in content["shapes"].items():
        if "target" in shape:
            yield from _tables(name, shape)
        skipped = [f"{one['what']} ({one['why']})" for one in shape["not_measured"]]
        if skipped:
            more = "; and others, see the record" if len(skipped) > SHOWN else ""
            yield f"{name}: not measured ({len(skipped)}): {'; '.join(skipped[:SHOWN])}{more}"
    body = []
    for figure in content["figures"]:
        goal = "" if figure["goal"] is None else f"{'>=' if figure['at_least'] else '<='} {figure['goal']:.2f}"
        value = f"not measured: {figure['why']}" if figure["value"] is None else f"{figure['value']:.2f}"
        body.append([figure["name"], value, goal, "missed" if figure["holds"] is False else ""])
    yield table(["figure", "value", "goal", ""], body)


def _tables(name: str, shape: Shape) -> Iterator[str]:
    target, speed = shape["target"], shape["speed"]
    told = f"copies {speed['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    if "matmul_flops_per_second" in speed:
        told += f", multiplies {speed['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
    yield (
        f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
        f"{target['exit_layer']} of {target['num_layers']}; the device {told}; tokens/s of all rows"
    )
    for context in dict.fromkeys(cell["context"] for cell in shape["cells"]):
        batches = sorted({cell["batch"] for cell in shape["cells"] if cell["context"] == context})
        body = []
        for method in (*OURS, *PEERS):
            cells = [_cell(shape, method, batch, context) for batch in batches]
            if any(cells):
                body.append([method, *("" if cell is None else f"{cell['tokens_per_second']:.1f}" for cell in cells)])
        yield table([f"context {context}", *(f"batch {batch}" for batch in batches)], body)
