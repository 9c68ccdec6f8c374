"""Figures from the record of `python -m eval gpu`, and the targets of some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.gpu_plan import (
    ATTENTION,
    BUSY,
    COMPILED_LAYERS,
    COSTS,
    DRAFT_TOKENS,
    LAYERS,
    PAUSE,
    PEER,
    PREFILL,
    TRANSFORMERS,
    Cell,
)

Found = Mapping[str, Any]
OWN = ("plain", "fixed", "adaptive")
NEAR = 0.1  # of the wanted acceptance, within which a speedup of fixed is judged
ROUNDS = ("wall ms", "busy ms", "host share", "kernels", "floor ms", "busy / floor", "wall / floor", "wall / predicted")
# Targets by shape and figure; docs/measurements.md has the same rows.
TARGETS = {
    "llama-3-8b": {
        "plain, batch 1: busy / floor": "at most 1.2",
        "plain, batch 1: wall / floor": "at most 1.25",
        "plain, batch 32: wall / floor": "at most 1.67",
        "plain, batch 1: host share": "below 0.05",
        "plain, batch 32: host share": "below 0.1",
        "fixed, batch 1: host share": "below 0.05",
        "fixed, batch 32: host share": "below 0.1",
        "batch 1: kernels a layer": "at most 10",
        "batch 32: kernels a layer": "at most 10",
        "fixed, batch 1: speedup over plain": "at least 1.9",
        "fixed, batch 32: speedup over plain": "at least 1.5",
        "fixed, batch 1: wall / predicted": "0.9 to 1.1",
        "fixed, batch 32: wall / predicted": "0.9 to 1.1",
        "adaptive, batch 1: over the best fixed": "at least 0.97",
        "adaptive, batch 32: over the best fixed": "at least 0.97",
        "adaptive: lowest speedup over plain": "at least 1",
        "exact mode, batch 1: seconds over the ordinary mode's": "at most 1.25",
        "exact mode, batch 8: seconds over the ordinary mode's": "at most 1.25",
        "exact mode, batch 32: seconds over the ordinary mode's": "at most 1.25",
        "prefill, 1024 tokens: seconds over those of generate": "at most 1.3",
        "prefill, 8192 tokens: seconds over those of generate": "at most 1.3",
    },
    "smollm2-135m": {"batch 1: fastest over generate": "at least 8"},
}


class Figure(NamedTuple):
    """One figure; a `value` of None was not measured, for the reason `why`."""

    name: str
    value: float | None
    why: str = ""
    target: str = ""


def figures(content: Found) -> list[Figure]:
    """All figures, shape by shape."""
    found: list[Figure] = []
    for name, shape in content["shapes"].items():
        if "target" not in shape:
            found.append(Figure(f"{name}: everything", None, "the target could not be made"))
            continue
        targets = TARGETS.get(name, {})
        for one in _Shape(shape, content["config"]).figures():
            found.append(one._replace(name=f"{name}: {one.name}", target=targets.get(one.name, "")))
    return found


class _Shape:
    """The cells of a shape's record, and what follows from them."""

    def __init__(self, shape: Found, config: Found) -> None:
        self.shape, self.config, self.sizes = shape, config, shape["sizes"]
        self.cells = {Cell(one["context"], one["batch"], one["method"]): one for one in shape["cells"]}
        self.whys = {one["what"]: one["why"] for one in shape["not_measured"]}
        self.context = int(config["contexts"][0])
        self.batches = list(dict.fromkeys(config["batch_sizes"]))
        self.bandwidth = shape["speed"]["copy_bytes_per_second"]

    def figures(self) -> Iterator[Figure]:
        first = self.batches[:2]
        for batch in first:
            for method in ("plain", "fixed"):
                yield from self.round_figures(method, batch)
        for batch in first:
            yield from self.layer_figures(batch)
        yield from self.speedups(first)
        peers = [batch for batch in self.batches if batch in self.config["peer_batch_sizes"]]
        for batch in peers:
            cells = [Cell(self.context, batch, method) for method in ("plain", "plain, exact")]
            yield self.figure(f"exact mode, batch {batch}: seconds over the ordinary mode's", cells, _faster)
        yield from self.prefill_figures()
        for context in self.config["contexts"]:
            for batch in first:
                yield from self.attention_figures(context, batch)
        yield from self.peer_figures(peers)

    def figure(self, name: str, cells: Sequence[Cell], value: Callable[..., float]) -> Figure:
        """The value of some cells; not measured, where one of them was not."""
        for cell in cells:
            if cell not in self.cells:
                why = self.whys.get(str(cell), "the configuration leaves it out")
                return Figure(name, None, f"{cell}: {why}")
        return Figure(name, value(*(self.cells[cell] for cell in cells)))

    def floor(self, method: str, cell: Found) -> float:
        """Seconds to read what a round must read, by the measured copy bandwidth.

        All rows share the weights. A fixed round runs the early layers once for every drafted token and once more for
        the last one, then the other layers; the head's rows of the draft vocabulary once for every drafted token, and
        the whole head once for all of them.
        """
        about, sizes = self.shape["target"], self.sizes
        depth, drafted = (about["exit_layer"], DRAFT_TOKENS) if method == "fixed" else (0, 0)
        passes = 1 + drafted * depth / about["num_layers"]
        held = cell["batch"] * cell.get("mean_context", cell["context"]) * sizes["kv_bytes_per_token"]
        layers = sizes["read_bytes"] - sizes["head_bytes"] + held
        heads = sizes["head_bytes"] + drafted * sizes["draft_head_bytes"]
        return float((passes * layers + heads) / self.bandwidth)

    def round_figures(self, method: str, batch: int) -> Iterator[Figure]:
        """The figures of `ROUNDS`: a round by the wall, by the device's own time, and by what it must read."""
        rate, busy, costs = (Cell(self.context, batch, one) for one in (method, f"{BUSY}:{method}", COSTS))
        ways: dict[str, tuple[list[Cell], Callable[..., float]]] = {
            "wall ms": ([rate], lambda r: 1e3 * _wall(r)),
            "busy ms": ([busy], lambda b: 1e3 * b["busy_seconds"]),
            "host share": ([rate, busy], lambda r, b: max(0.0, 1 - b["busy_seconds"] / _wall(r))),
            "kernels": ([busy], lambda b: b["kernels"]),
            "floor ms": ([rate], lambda r: 1e3 * self.floor(method, r)),
            "busy / floor": ([rate, busy], lambda r, b: b["busy_seconds"] / self.floor(method, r)),
            "wall / floor": ([rate], lambda r: _wall(r) / self.floor(method, r)),
            "wall / predicted": ([rate, costs], lambda r, c: _wall(r) / c[method]),
        }
        for name in ROUNDS:
            yield self.figure(f"{method}, batch {batch}: {name}", *ways[name])

    def layer_figures(self, batch: int) -> Iterator[Figure]:
        cell = Cell(self.context, batch, LAYERS)
        measured = self.cells.get(cell)
        if measured is None:
            yield self.figure(f"batch {batch}: kernels a layer", [cell], float)
            return
        chosen = measured["bodies"][measured["chosen"]]
        yield Figure(f"batch {batch}: kernels a layer", chosen["kernels"], chosen["why"] or "")
        for name, body in measured["bodies"].items():
            value = None if body["seconds"] is None else 1e3 * body["seconds"]
            used = ", chosen" if name == measured["chosen"] else ""
            yield Figure(f"batch {batch}, {name}{used}: ms a layer", value, body["why"] or "")
        if batch == self.batches[0]:
            title, compiled = (
                f"batch {batch}, views by torch.compile: ms a layer",
                Cell(self.context, batch, COMPILED_LAYERS),
            )
            yield self.figure(title, [compiled], lambda c: 1e3 * c["seconds"])

    def fixed_speedup(self, batch: int) -> Figure:
        """The speedup of fixed; not measured, where the acceptance seen is far from the target's."""
        cells = [Cell(self.context, batch, method) for method in ("fixed", "plain")]
        found = self.figure(f"fixed, batch {batch}: speedup over plain", cells, _faster)
        seen = self.cells.get(cells[0], {}).get("acceptance")
        wanted = self.shape["target"]["wanted"]
        if found.value is None or (seen is not None and abs(seen - wanted) <= NEAR):
            return found
        text = "no acceptance" if seen is None else f"acceptance {seen:.2f}"
        return found._replace(value=None, why=f"{text} seen, {wanted:g} wanted")

    def speedups(self, first: Sequence[int]) -> Iterator[Figure]:
        for batch in first:
            yield self.fixed_speedup(batch)
        for batch in first:
            fixed = [c for c in self.cells if (c.kind, c.batch, c.context) == ("fixed", batch, self.context)]
            best = max(fixed, key=lambda c: self.cells[c]["tokens_per_second"], default=None)
            cells = [Cell(self.context, batch, "adaptive"), best or Cell(self.context, batch, "fixed")]
            yield self.figure(f"adaptive, batch {batch}: over the best fixed", cells, _faster)
        ratios = [
            self.figure(
                f"adaptive, batch {batch}: speedup over plain",
                [Cell(self.context, batch, method) for method in ("adaptive", "plain")],
                _faster,
            )
            for batch in sorted(self.batches)
        ]
        yield from ratios
        values = [one.value for one in ratios if one.value is not None]
        why = "" if len(values) == len(ratios) else f"measured at {len(values)} of {len(ratios)} batch sizes only"
        yield Figure("adaptive: lowest speedup over plain", None if why else min(values), why)

    def prefill_figures(self) -> Iterator[Figure]:
        for context in self.config["contexts"]:
            cell, title = [Cell(context, 1, PREFILL)], f"prefill, {context} tokens"
            yield self.figure(f"{title}: tokens/s", cell, lambda c: c["context"] / c["seconds"])
            yield self.figure(f"{title}: tokens/s in chunks", cell, lambda c: c["context"] / c["steps_seconds"])
            yield self.figure(f"{title}: tokens/s of generate", cell, lambda c: c["context"] / c["peer_seconds"])
            over = f"{title}: seconds over those of generate"
            yield self.figure(over, cell, lambda c: c["seconds"] / c["peer_seconds"])
        longest = max(self.config["contexts"])
        title = f"longest pause of a running row while {longest} tokens are read, ms"
        yield self.figure(title, [Cell(longest, 1, PAUSE)], lambda c: 1e3 * c["longest_seconds"])

    def attention_figures(self, context: int, batch: int) -> Iterator[Figure]:
        floor = batch * context * self.sizes["kv_bytes_per_token"] / self.shape["target"]["num_layers"] / self.bandwidth
        title, cells = f"attention, batch {batch}, context {context}", [Cell(context, batch, ATTENTION)]
        yield self.figure(f"{title}: ms a layer", cells, lambda c: 1e3 * c["seconds"])
        yield self.figure(f"{title}: over floor", cells, lambda c: c["seconds"] / floor)

    def peer_figures(self, peers: Sequence[int]) -> Iterator[Figure]:
        folders = [f"{PEER}:{Path(folder).resolve().name}" for folder in self.config["peer"]]
        ours = [c for c in self.cells if (c.batch, c.context) == (1, self.context) and c.kind in OWN]
        best = max(ours, key=lambda c: self.cells[c]["tokens_per_second"], default=Cell(self.context, 1, "plain"))
        yield self.figure("batch 1: fastest over generate", [best, Cell(self.context, 1, "hf")], _faster)
        for name in (*TRANSFORMERS, *folders):
            for batch in peers if name == "hf" or name in folders else [1]:
                cells = [Cell(self.context, batch, method) for method in ("plain", name)]
                yield self.figure(f"plain, batch {batch}: over {name}", cells, _faster)


def _wall(rate: Found) -> float:
    return float(rate["seconds"] / rate["rounds"])


def _faster(one: Found, other: Found) -> float:
    return float(one["tokens_per_second"] / other["tokens_per_second"])
