"""The figures of `python -m eval gpu`: cells against each other and against what a device must read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eval.figures import table
from eval.gpu_rates import TEMPERATURE, Record

DRAFT_TOKENS = 4  # of "fixed" and of transformers' early exit
NEAR = 0.1  # of the wanted acceptance, within which a speedup of fixed is judged
HOPELESS = ", hopeless"  # how methods on a target whose early layers know nothing end
COLUMNS = (
    *("tokens/s", "lowest", "highest", "acceptance", "over plain", "over hf", "over best fixed", "wall ms", "floor ms"),
    *("wall / floor", "busy ms", "busy / floor", "host share", "recordings", "recording s"),
)


class Cell(NamedTuple):
    """One measurement: a method at a batch size and context."""

    context: int
    batch: int
    method: str

    def __str__(self) -> str:
        return f"{self.method}, batch {self.batch}, context {self.context}"


def floor_seconds(found: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """Seconds to read what a round of plain or fixed must read, by the larger of the measured bandwidths.

    All rows share the weights. A fixed round runs the early layers once for every drafted token and once more for the
    last one, then the other layers; the head's rows of the draft vocabulary once for every drafted token, and the whole
    head once for all of them.
    """
    about, sizes = found["target"], found["sizes"]
    depth, drafted = (about["exit_layer"], DRAFT_TOKENS) if cell["method"] == "fixed" else (0, 0)
    passes = 1 + drafted * depth / about["num_layers"]
    held = cell["batch"] * cell["mean_context"] * sizes["kv_bytes_per_token"]
    layers = sizes["read_bytes"] - sizes["head_bytes"] + held
    heads = sizes["head_bytes"] + drafted * sizes["draft_head_bytes"]
    return float((passes * layers + heads) / bandwidth(found["speed"]))


def bandwidth(speed: Mapping[str, float]) -> float:
    """Bytes per second: the larger of those of a copy and of reading alone."""
    return max(value for name, value in speed.items() if name.endswith("bytes_per_second"))


def figures(found: Mapping[str, Any]) -> list[Record]:
    """The values of `COLUMNS` of every cell, as far as they are known."""
    cells = {Cell(one["context"], one["batch"], one["method"]): one for one in found["cells"]}
    made = []
    for cell, one in cells.items():
        speed = one["tokens_per_second"]
        row = {**cell._asdict(), "tokens/s": speed, "lowest": one.get("lowest"), "highest": one.get("highest")}
        fixed = [c for c in cells if c[:2] == cell[:2] and c.method.partition(":")[0] == "fixed"]
        best = max(fixed, key=lambda c: cells[c]["tokens_per_second"], default=None)
        is_hopeless = cell.method.endswith(HOPELESS)  # another target
        over = {"over plain": cell._replace(method=f"plain{HOPELESS}" if is_hopeless else "plain")}
        over |= {} if is_hopeless else {"over hf": cell._replace(method="hf")}
        over |= {"over best fixed": best} if best and cell.method.startswith("adaptive") and not is_hopeless else {}
        row |= {name: speed / cells[of]["tokens_per_second"] for name, of in over.items() if of in cells}
        if cell.method in ("prefill", "first token", "launches"):
            other = one.get("hf_tokens_per_second")
            row |= {"over plain": None, "over hf": speed / other if other else None}
        seen, wanted = one.get("acceptance"), found["target"]["wanted"]
        row["acceptance"] = seen
        if cell.method == "fixed" and "over plain" in row and (seen is None or abs(seen - wanted) > NEAR):
            row["over plain"] = None  # it would say nothing about the wanted acceptance
        if "rounds" in one:
            row["wall ms"] = 1e3 * one["seconds"] / one["rounds"]
        if cell.method in ("plain", "fixed"):
            row["floor ms"] = 1e3 * floor_seconds(found, one)
            row["wall / floor"] = row["wall ms"] / row["floor ms"]
        if one.get("recordings"):
            row |= {"recordings": one["recordings"], "recording s": one["recording_seconds"]}
        if "busy_seconds" in one:
            row |= {"busy ms": 1e3 * one["busy_seconds"], "busy / floor": 1e3 * one["busy_seconds"] / row["floor ms"]}
            row["host share"] = max(0.0, 1 - row["busy ms"] / row["wall ms"])
        made.append({name: value for name, value in row.items() if value is not None})
    return made


def render(record: Mapping[str, Any]) -> str:
    """The table of every shape, its targets, and what was not measured."""
    env, parts = record["environment"], list[str]()
    for name, found in record["shapes"].items():
        if "target" in found:
            target, terabytes = found["target"], bandwidth(found["speed"]) / 1e12
            parts.append(
                f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
                f"{target['exit_layer']} of {target['num_layers']} at temperature {TEMPERATURE:g}; "
                f"{found['device'].get('gpu', env['cpu'])}, which reads {terabytes:.2f} TB/s; torch {env['torch']}"
            )
            shown = [column for column in COLUMNS if any(column in row for row in found["figures"])]
            cells = [
                [row["method"], str(row["batch"]), str(row["context"])]
                + [f"{row[column]:.3g}" if column in row else "" for column in shown]
                for row in found["figures"]
            ]
            parts.append(table(["method", "batch", "context", *shown], cells))
        if found["missing"]:
            whys = "; ".join(f"{what} ({why})" for what, why in found["missing"].items())
            parts.append(f"{name}: not measured ({len(found['missing'])}): {whys}")
    return "\n\n".join(parts)
