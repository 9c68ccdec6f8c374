"""The figures that say whether the machine is used well, out of what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eval.gpu.speed import DRAFT_TOKENS


class Figure(NamedTuple):
    """One figure; `value` None: not measured, and `why`."""

    name: str
    value: float | None
    goal: float | None = None
    at_least: bool = True  # whether more is better
    why: str = ""

    @property
    def holds(self) -> bool | None:
        if self.value is None or self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "holds": self.holds}


SHARES = {"llama-3-8b": 0.8, "llama-3.2-1b": 0.6}  # of the copy bandwidth, that plain decoding is to reach


def figures(content: dict[str, Any]) -> list[Figure]:
    """All of them, shape by shape; those that cannot be had say why."""
    found: list[Figure] = []
    on_gpu = str(content.get("environment", {}).get("device", "")).startswith("cuda")
    copied = (content.get("bandwidth") or {}).get("copy_bytes_per_second")
    for name, shape in content.get("shapes", {}).items():
        if "target" not in shape:
            found.append(Figure(f"{name}: everything", None, why="the target could not be made"))
            continue
        for figure in (
            *_of_plain(name, shape, copied),
            *_of_drafts(name, shape),
            *_of_forwards(shape),
            *_of_exact(shape),
        ):
            found.append(figure._replace(name=f"{name}: {figure.name}"))
    return found if on_gpu else [figure._replace(goal=None) for figure in found]  # the goals are a GPU's


def rate(shape: dict[str, Any], method: str, batch: int, context: int) -> dict[str, Any] | None:
    """The cell of a way to decode, or None."""
    for cell in shape["cells"]:
        if (cell["method"], cell["batch"], cell["context"]) == (method, batch, context):
            return cell  # type: ignore[no-any-return]
    return None


def _of_plain(name: str, shape: dict[str, Any], copied: float | None) -> Iterator[Figure]:
    context = _first_context(shape)
    plain = rate(shape, "plain", 1, context)
    title = f"plain, batch 1, context {context}: share of the copy bandwidth"
    if plain is None or copied is None:
        missing = "plain decoding" if plain is None else "the copy bandwidth"
        yield Figure(title, None, SHARES.get(name), why=f"{missing} was not measured")
    else:
        sizes = shape["sizes"]
        read = sizes["read_bytes"] + context * sizes["kv_bytes_per_token"]
        yield Figure(title, plain["tokens_per_second"] * read / copied, SHARES.get(name))
    busy = shape.get("busy_seconds_per_plain_round")
    title = "plain, batch 1: share of a round that the device waits for the host"
    if plain is None or busy is None:
        yield Figure(title, None, 0.05, False, "the device's own time was not measured")
    else:
        yield Figure(title, max(0.0, 1 - busy * plain["tokens_per_second"]), 0.05, False)


def expected_speedup(layers: int, exit_layer: int, drafted: int, head: float, acceptance: float) -> float:
    """Speculation over plain decoding at batch 1, where every pass takes as long as the weights it reads.

    A round drafts `drafted` tokens through `exit_layer` layers and the head (as long as `head` layers), runs the last
    of them through the early layers, and verifies.
    """
    cost = (drafted * (exit_layer + head) + exit_layer + (layers - exit_layer) + head) / (layers + head)
    tokens = sum(acceptance**i for i in range(drafted + 1))
    return tokens / cost


def _of_drafts(name: str, shape: dict[str, Any]) -> Iterator[Figure]:
    context, target = _first_context(shape), shape["target"]
    plain, fixed = (rate(shape, method, 1, context) for method in ("plain", "fixed"))
    exit_layer = target["exit_layer"]
    title = f"fixed (E={exit_layer}, D={DRAFT_TOKENS}), batch 1: times plain"
    goal = 1.8 if name == "llama-2-7b" else None
    if plain is None or fixed is None or fixed["acceptance"] is None:
        yield Figure(title, None, goal, why="one of the two was not measured")
    else:
        gained = fixed["tokens_per_second"] / plain["tokens_per_second"]
        head = shape["sizes"]["head_in_layers"]
        model = expected_speedup(target["num_layers"], exit_layer, DRAFT_TOKENS, head, fixed["acceptance"])
        yield Figure(title, gained, goal)
        beside = f"the same beside the cost model's {model:.2f} at acceptance {fixed['acceptance']:.2f}"
        yield Figure(beside, gained / model, 0.9)
    pairs = [
        (cell, rate(shape, "plain", cell["batch"], cell["context"]))
        for cell in shape["cells"]
        if cell["method"] == "adaptive"
    ]
    ratios = {
        f"batch {a['batch']}, context {a['context']}": a["tokens_per_second"] / p["tokens_per_second"]
        for a, p in pairs
        if p is not None
    }
    if not ratios:
        yield Figure("adaptive: times plain, where it is lowest", None, 1.0, why="not measured at any batch size")
    else:
        worst = min(ratios, key=lambda where: ratios[where])
        yield Figure(f"adaptive: times plain, lowest of {len(ratios)} ({worst})", ratios[worst], 1.0)


def _of_forwards(shape: dict[str, Any]) -> Iterator[Figure]:
    forwards = shape.get("forwards")
    titles = ("4 tokens per row over 1", "ragged rows over even ones, as many tokens")
    goals = (1.25, 1.05)
    if forwards is None:
        for title, goal in zip(titles, goals, strict=True):
            yield Figure(f"forward: {title}", None, goal, False, "it failed")
        return
    seconds, where = forwards["seconds"], f"batch {forwards['rows']}, context {forwards['context']}"
    values = (seconds["even"] / seconds["one"], seconds["ragged"] / seconds["even"])
    for title, goal, value in zip(titles, goals, values, strict=True):
        yield Figure(f"forward, {where}: {title}", value, goal, False)


def _of_exact(shape: dict[str, Any]) -> Iterator[Figure]:
    """Rows that differ from plain decoding in some bit, and the price of none."""
    if "exact" not in shape:
        yield Figure("exact mode: rows of speculation that differ from plain decoding in some bit", None, 0.0, False)
        return
    for rows, found in shape["exact"]["by_batch"].items():
        differs, cost = found["differing"]["exact"], found["cost"]
        title = f"exact mode, batch {rows}: rows of speculation that differ from plain decoding in some bit"
        yield Figure(title, float(differs["bits"]), 0.0, False)
        yield Figure(f"exact mode, batch {rows}: time of plain decoding over the ordinary mode's", cost["plain"])
        yield Figure(f"exact mode, batch {rows}: time of speculation over the ordinary mode's", cost["speculative"])


def _first_context(shape: dict[str, Any]) -> int:
    return int(shape["contexts"][0])
