"""The figures a benchmark is run for, by name, from the record of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.summary import Spread, paired_ratio
from eval.timing import Sample

Rows = Sequence[dict[str, Any]]


def fastest(rows: Rows, family: str, together: bool | None = None) -> str | None:
    """Name of a family's fastest method, in a batch stage among those decoded together or one by one."""
    done = [row for row in rows if row["family"] == family and "error" not in row]
    if together is not None:
        done = [row for row in done if row["method"].endswith("together") == together]
    return max(done, key=lambda row: row["tokens_per_second"])["method"] if done else None


def figures(record: dict[str, Any], load: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Every figure as `{figure, of, over, median, low, ...}`; ratios are speeds, so above 1 the first is faster."""
    timings, rows, batch = record["timings"], record["comparison"], record["batch"]
    alone = {family: fastest(rows, family) for family in ("plain", "fixed", "generate", "early_exit", "prompt_lookup")}
    pairs = [
        ("plain", "generate"),
        ("fixed", "plain"),
        ("fixed", "generate"),
        ("fixed", "early_exit"),
        ("fixed", "prompt_lookup"),
        ("early_exit", "generate"),
        ("prompt_lookup", "generate"),
    ]
    found = [_ratio(f"{a} / {b}", timings["comparison"], alone[a], alone[b]) for a, b in pairs]
    found += _batch_figures(batch, timings["batch"])
    found += _attribution_figures(record["attribution"])
    if load is not None:
        found.append({"figure": "seconds from load to first token", "of": record["config"]["model"], **load["seconds"]})
    return [figure for figure in found if figure is not None] + _differing(record)


def _ratio(name: str, samples: Sequence[Sample], a: str | None, b: str | None) -> dict[str, Any] | None:
    """None when one of the two methods failed."""
    if a is None or b is None:
        return None
    return _figure(name, a, b, paired_ratio(samples, a, b))


def _figure(name: str, of: str, over: str | None, values: Spread) -> dict[str, Any]:
    return {"figure": name, "of": of, "over": over, **values._asdict()}


def _batch_figures(rows: Rows, samples: Sequence[Sample]) -> list[dict[str, Any] | None]:
    names = {(f, t): fastest(rows, f, t) for f in ("plain", "fixed", "generate") for t in (True, False)}
    pairs = [
        ("fixed: batch / one by one", ("fixed", True), ("fixed", False)),
        ("plain: batch / one by one", ("plain", True), ("plain", False)),
        ("generate: batch / one by one", ("generate", True), ("generate", False)),
        ("in the batch: fixed / plain", ("fixed", True), ("plain", True)),
        ("in the batch: plain / generate", ("plain", True), ("generate", True)),
    ]
    return [_ratio(name, samples, names[a], names[b]) for name, a, b in pairs]


def _attribution_figures(rows: Rows) -> list[dict[str, Any]]:
    parts = [
        ("(pick + rest) / round", "pick_and_rest_share"),
        ("outside the model's forward / call", "outside_forward_share_of_call"),
    ]
    return [{"figure": name, "of": row["method"], "over": None, **row[key]} for name, key in parts for row in rows]


def _differing(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts, over all methods and stages, whose tokens are not plain decoding's."""
    rows = [row for stage in ("coarse", "comparison", "batch") for row in record[stage] if "error" not in row]
    ours = sum(row["differing_prompts"] for row in rows if row["family"] in ("plain", "fixed"))
    theirs = sum(row["differing_prompts"] for row in rows if row["family"] not in ("plain", "fixed"))
    return [
        {"figure": "differing prompts", "of": "selfspec, all methods and stages", "over": "plain", "median": ours},
        {
            "figure": "differing prompts",
            "of": "transformers, all methods and stages",
            "over": "plain",
            "median": theirs,
        },
    ]
