"""Figures and tables from the record of `python -m eval gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eval.figures import table
from eval.gpu_rates import PEERS
from eval.gpu_shape import DRAFT_TOKENS, OURS

Shape = dict[str, Any]
SHOWN = 6  # reasons of missing figures in a shape's table


class Figure(NamedTuple):
    """One figure; a `value` of None was not measured, for the reason `why`."""

    name: str
    value: float | None
    why: str = ""


def figures(content: dict[str, Any]) -> list[Figure]:
    """All figures, shape by shape."""
    found: list[Figure] = []
    for name, shape in content["shapes"].items():
        if "target" not in shape:
            found.append(Figure(f"{name}: everything", None, "the target could not be made"))
            continue
        of_shape = (*_plain_figures(shape), *_draft_figures(shape), *_forward_figures(shape))
        found += [figure._replace(name=f"{name}: {figure.name}") for figure in of_shape]
    return found


def _cell(shape: Shape, method: str, batch: int, context: int) -> dict[str, Any] | None:
    wanted = method, batch, context
    return next((c for c in shape["cells"] if (c["method"], c["batch"], c["context"]) == wanted), None)


def _first_context(shape: Shape) -> int:
    return int(shape["cells"][0]["context"]) if shape["cells"] else 0


def _plain_figures(shape: Shape) -> Iterator[Figure]:
    context, sizes = _first_context(shape), shape["sizes"]
    plain = _cell(shape, "plain", 1, context)
    read = sizes["read_bytes"] + context * sizes["kv_bytes_per_token"]
    share = plain["tokens_per_second"] * read / shape["speed"]["copy_bytes_per_second"] if plain else None
    title = f"plain, batch 1, context {context}: share of the copy bandwidth"
    yield Figure(title, share, "plain decoding was not measured")
    for method in ("plain", "fixed"):
        cell, busy = _cell(shape, method, 1, context), shape.get("busy", {}).get(method)
        idle = max(0.0, 1 - busy["busy_seconds"] * cell["rounds"] / cell["seconds"]) if cell and busy else None
        title = f"{method}, batch 1: share of a round in which the device waits for the host"
        yield Figure(title, idle, "the device's busy time was not measured")
        if busy:
            yield Figure(f"{method}, batch 1: launches per round", busy["launches"])


def _draft_figures(shape: Shape) -> Iterator[Figure]:
    context, target = _first_context(shape), shape["target"]
    plain, fixed = (_cell(shape, method, 1, context) for method in ("plain", "fixed"))
    title = f"fixed (E={target['exit_layer']}, D={DRAFT_TOKENS}), batch 1: speedup over plain"
    speedup = fixed["tokens_per_second"] / plain["tokens_per_second"] if plain and fixed else None
    yield Figure(title, speedup, "one of the two was not measured")
    ratios = {}
    for cell in shape["cells"]:
        plain = _cell(shape, "plain", cell["batch"], cell["context"])
        if cell["method"] == "adaptive" and plain is not None:
            ratio = cell["tokens_per_second"] / plain["tokens_per_second"]
            ratios[f"batch {cell['batch']}, context {cell['context']}"] = ratio
    if not ratios:
        yield Figure("adaptive: lowest speedup over plain", None, "not measured at any batch size")
        return
    worst = min(ratios, key=lambda where: ratios[where])
    yield Figure(f"adaptive: lowest speedup over plain of {len(ratios)} ({worst})", ratios[worst])


def _forward_figures(shape: Shape) -> Iterator[Figure]:
    titles = {"4 tokens per row over 1": ("even", "one"), "ragged rows over even rows": ("ragged", "even")}
    forwards = shape.get("forwards")
    for title, (one, over) in titles.items():
        if forwards is None:
            yield Figure(f"forward: {title}", None, "it was not measured")
            continue
        seconds, where = forwards["seconds"], f"batch {forwards['rows']}, context {forwards['context']}"
        yield Figure(f"forward, {where}: {title}", seconds[one] / seconds[over])


def render(content: dict[str, Any]) -> str:
    """Tokens per second of every shape by method and batch size, then the figures."""
    env, parts = content["environment"], list[str]()
    names = [shape["device"].get("gpu", env["cpu"]) for shape in content["shapes"].values() if "device" in shape]
    parts.append(f"{names[0] if names else env['cpu']}, torch {env['torch']}, transformers {env['transformers']}")
    for name, shape in content["shapes"].items():
        if "target" in shape:
            parts += _tables(name, shape)
        skipped = [f"{one['what']} ({one['why']})" for one in shape["not_measured"]]
        if skipped:
            more = "; and others, see the record" if len(skipped) > SHOWN else ""
            parts.append(f"{name}: not measured ({len(skipped)}): {'; '.join(skipped[:SHOWN])}{more}")
    rows = []
    for figure in content["figures"]:
        value = f"not measured: {figure['why']}" if figure["value"] is None else f"{figure['value']:.2f}"
        rows.append([figure["name"], value])
    return "\n\n".join([*parts, table(["figure", "value"], rows)])


def _tables(name: str, shape: Shape) -> Iterator[str]:
    target, speed = shape["target"], shape["speed"]
    text = f"copies {speed['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    if "matmul_flops_per_second" in speed:
        text += f", multiplies {speed['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
    yield (
        f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
        f"{target['exit_layer']} of {target['num_layers']}; the device {text}; tokens/s of all rows"
    )
    for context in dict.fromkeys(cell["context"] for cell in shape["cells"]):
        batches = sorted({cell["batch"] for cell in shape["cells"] if cell["context"] == context})
        body = []
        for method in (*OURS, *PEERS):
            cells = [_cell(shape, method, batch, context) for batch in batches]
            if any(cells):
                body.append([method, *("" if cell is None else f"{cell['tokens_per_second']:.1f}" for cell in cells)])
        yield table([f"context {context}", *(f"batch {batch}" for batch in batches)], body)
