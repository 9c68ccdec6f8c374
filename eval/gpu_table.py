"""The tables that `python -m eval gpu` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eval.figures import table
from eval.gpu_figures import ROUNDS
from eval.gpu_plan import Cell

Found = Mapping[str, Any]
SHOWN = 6  # reasons of missing cells that are printed


def render(content: Found) -> str:
    """Tokens per second of every shape by method and batch size, its rounds, and the other figures."""
    env, parts = content["environment"], list[str]()
    names = [shape["device"].get("gpu", env["cpu"]) for shape in content["shapes"].values() if "device" in shape]
    parts.append(f"{names[0] if names else env['cpu']}, torch {env['torch']}, transformers {env['transformers']}")
    values = {one["name"]: one for one in content["figures"]}
    for name, shape in content["shapes"].items():
        if "target" in shape:
            parts += _tables(name, shape, values)
        skipped = [f"{one['what']} ({one['why']})" for one in shape["not_measured"]]
        if skipped:
            more = "; and others, see the record" if len(skipped) > SHOWN else ""
            parts.append(f"{name}: not measured ({len(skipped)}): {'; '.join(skipped[:SHOWN])}{more}")
    others = [one for one in values.values() if one["target"] or not _is_of_round(one["name"])]
    rows = [[one["name"], one["target"], _shown(one)] for one in others]
    return "\n\n".join([*parts, table(["figure", "target", "measured"], rows)])


def _is_of_round(name: str) -> bool:
    return name.endswith(tuple(f": {one}" for one in ROUNDS))


def _shown(figure: Found) -> str:
    return f"not measured: {figure['why']}" if figure["value"] is None else f"{figure['value']:.3g}"


def _number(cell: Found, name: str, form: str) -> str:
    value = cell.get(name)
    return "" if value is None else format(value, form)


def _tables(name: str, shape: Found, values: Mapping[str, Found]) -> Iterator[str]:
    target, speed = shape["target"], shape["speed"]
    text = f"copies {speed['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    if "matmul_flops_per_second" in speed:
        text += f", multiplies {speed['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
    yield (
        f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
        f"{target['exit_layer']} of {target['num_layers']} at temperature {target['temperature']:g}; "
        f"the device {text}; tokens/s of all rows"
    )
    rates = {Cell(c["context"], c["batch"], c["method"]): c for c in shape["cells"] if "tokens_per_second" in c}
    for context in dict.fromkeys(cell.context for cell in rates):
        batches = sorted({cell.batch for cell in rates if cell.context == context})
        body = []
        for method in dict.fromkeys(cell.method for cell in rates if cell.context == context):
            cells = [rates.get(Cell(context, batch, method), {}) for batch in batches]
            body.append([method, *(_number(one, "tokens_per_second", ".1f") for one in cells)])
            if any(one.get("acceptance") is not None for one in cells):
                body.append([f"{method}: acceptance", *(_number(one, "acceptance", ".2f") for one in cells)])
        yield table([f"context {context}", *(f"batch {batch}" for batch in batches)], body)
    rounds = dict.fromkeys(
        one.rpartition(": ")[0] for one in values if one.startswith(f"{name}: ") and _is_of_round(one)
    )
    lines = []
    for title in rounds:
        each = [values[f"{title}: {column}"] for column in ROUNDS]
        lines.append([title.removeprefix(f"{name}: "), *("-" if one["value"] is None else _shown(one) for one in each)])
    yield table(["a round of", *ROUNDS], lines)
