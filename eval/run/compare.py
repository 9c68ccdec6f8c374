"""What changed from one run to another, paired over the questions that a method answered in both.

Every figure is that of `eval.run.metrics`, for both runs over the same questions. The interval of its ratio, after over
before, comes from drawing those questions again, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from eval.run.config import STUDY_SIZES, TABLE, known
from eval.run.items import groups
from eval.run.lines import Row
from eval.run.metrics import METRICS, Group, figures
from eval.run.resampling import OVER, SUMS, Opened, resampled

OVER_BASELINE = (*OVER, "paired_ratio")
COMPARED = tuple(name for name in METRICS if name in SUMS or name in OVER_BASELINE or name.endswith(("_p50", "_p95")))
LESS_IS_BETTER = (*(name for name in COMPARED if METRICS[name][0] == "s"), "layer_passes_per_token")
ROUNDING = 1e-9  # what two ways to compute the same ratio may differ by
PASSING = ("time", "command", "load_average", "costs", "resumed", *STUDY_SIZES)  # no answer depends on these


def compare(
    before: Opened, after: Opened, limits: Mapping[str, float], methods: Sequence[str] = (), category: str = "overall"
) -> dict[str, Any]:
    """One record of plain numbers: what differs, every method's figures, and what became of the limits.

    Args:
        limits: by metric, the share of it that may be lost; where there are any, no answer may be lost either.
        methods: those to compare; none given: all that both runs have.

    Raises:
        ValueError: a name that is unknown, nothing that both have answered, or a limit on what is not there.
    """
    for metric in limits:
        known("metric", metric, COMPARED)
    names = _names(before, after, methods, is_limited=bool(limits))
    metrics = [name for name in dict.fromkeys((*TABLE, *limits)) if name in COMPARED]
    known("category", category, dict.fromkeys(name for n in names for name in groups(list(before.items[n].values()))))
    found = [_method(before, after, name, metrics, category) for name in names]
    has_lost = bool(limits) and any(method["num_lost"] for method in found)
    if not has_lost and not any(method["num_questions"] for method in found):
        raise ValueError(f"no question of {category!r} has been answered by the same method in both runs")
    verdicts = [_verdict(method, metric, share, has_lost) for metric, share in limits.items() for method in found]
    return {
        "before": {"path": before.path, "baseline": before.baseline, "complete": before.is_complete},
        "after": {"path": after.path, "baseline": after.baseline, "complete": after.is_complete},
        "category": category,
        "is_greedy": not any(run.settings.get("temperature") for run in (before, after)),
        "differs": differing(before, after),
        "methods": found,
        "limits": verdicts,
        "has_failed": has_lost or any(verdict["has_failed"] for verdict in verdicts),
    }


def _names(before: Opened, after: Opened, methods: Sequence[str], is_limited: bool) -> list[str]:
    """The methods to compare."""
    for run in (before, after):
        if run.baseline is not None:
            known(f"in {run.path} the baseline", run.baseline, run.answers)
        for name in methods:
            known(f"in {run.path} the method", name, run.answers)
    names = list(dict.fromkeys(methods)) or [name for name in before.answers if name in after.answers]
    if not names:
        raise ValueError(f"the runs share no method: {', '.join(before.answers)} and {', '.join(after.answers)}")
    only = [] if methods else sorted(set(before.answers) ^ set(after.answers))
    if only and is_limited:
        raise ValueError(f"--fail: only one of the runs has {', '.join(only)}; name the methods of both with --methods")
    return names


def differing(before: Opened, after: Opened) -> dict[str, list[Any]]:
    """What of machine, versions and settings is not the same: by key, its values before and after."""
    found: dict[str, list[Any]] = {}
    for a, b in ((before.about, after.about), (before.settings, after.settings)):
        for key in {**a, **b}:
            if key not in PASSING and a.get(key) != b.get(key):
                found.setdefault(key, [a.get(key), b.get(key)])
    return found


def _method(before: Opened, after: Opened, name: str, metrics: Sequence[str], category: str) -> dict[str, Any]:
    both = _common(before, after, name)
    chosen = [item.question_id for item in groups([before.items[name][key] for key in both]).get(category, [])]
    with_base = [key for key in _common(before, after, None) if key in set(chosen)]
    seeds = int(after.settings.get("resamples", 2000)), int(after.settings.get("seed", 0))
    changes = {}
    for wanted, keys in ((OVER_BASELINE, with_base), (COMPARED, chosen)):
        sides = [_group(run, name, keys, seeds) for run in (before, after)]
        values = [figures(side) if keys else {} for side in sides]
        for metric in wanted:
            if metric in metrics and metric not in changes:
                a, b = (_number(value.get(metric)) for value in values)
                changes[metric] = _change(metric, a, b, *sides)
    rows = before.answers[name], after.answers[name]
    return {
        "method": name,
        "num_questions": len(chosen),
        "num_paired": len(with_base),
        "num_lost": len(set(rows[0]) - set(rows[1])),
        "num_other_outputs": sum(_output(rows[0][key]) != _output(rows[1][key]) for key in chosen),
        "metrics": {metric: changes[metric] for metric in metrics},
    }


def _common(before: Opened, after: Opened, name: str | None) -> list[Any]:
    """Ids that a method, or with None each run's baseline, has answered in both, alike in category and turns."""
    a, b = (run.items.get(name or run.baseline or "", {}) for run in (before, after))
    rows = [run.answers.get(name or run.baseline or "", {}) for run in (before, after)]
    turns = [{key: len(row["choices"][0]["wall_time"]) for key, row in of_run.items()} for of_run in rows]
    return [k for k in a if k in b and a[k].category == b[k].category and turns[0][k] == turns[1][k]]


def _output(row: Row) -> Any:
    choice = row["choices"][0]
    return choice.get("tokens", choice["turns"])


def _group(run: Opened, name: str, keys: Sequence[Any], seeds: tuple[int, int]) -> Group:
    base = run.items.get(run.baseline or "", {})
    return Group([run.items[name][key] for key in keys], [base[key] for key in keys if key in base], *seeds)


def _number(value: Any) -> float | None:
    return None if value is None else float(value["value"] if isinstance(value, Mapping) else value)


def _change(metric: str, a: float | None, b: float | None, before: Group, after: Group) -> dict[str, Any]:
    """A figure's values and their ratio; `is_clear` where its interval excludes no change."""
    found: dict[str, Any] = {"before": a, "after": b, "ratio": None, "low": None, "high": None, "is_clear": None}
    if a is None or b is None or not a:
        return found
    found["ratio"] = b / a
    with np.errstate(all="ignore"):  # a resample may hold nothing to divide by
        first, then = resampled(metric, before), resampled(metric, after)
        spread = after.interval(lambda draws: then(draws) / first(draws), len(after.items))
    if not all(map(isfinite, spread.values())):
        return found
    return {**found, **spread, "is_clear": not spread["low"] - ROUNDING <= 1 <= spread["high"] + ROUNDING}


def _verdict(method: Mapping[str, Any], metric: str, share: float, has_lost: bool) -> dict[str, Any]:
    """What became of a limit; one on nothing has failed where answers are lost, and is refused elsewhere."""
    name, change = method["method"], method["metrics"][metric]
    a, b, lacking = change["before"], change["after"], None
    if a is None or b is None:
        lacking, has_failed = _lacking(method, metric), True
        if not has_lost:
            raise ValueError(f"--fail {metric}: {lacking}; name other methods with --methods")
    else:
        spare = share + ROUNDING
        has_failed = b > a * (1 + spare) if metric in LESS_IS_BETTER else b < a * (1 - spare)
    told = {"method": name, "metric": metric, "share": share, "has_failed": has_failed, "lacking": lacking}
    return {**told, **change}


def _lacking(method: Mapping[str, Any], metric: str) -> str:
    name, change = method["method"], method["metrics"][metric]
    if change["before"] is not None or change["after"] is not None:
        return f"{name!r} has none in the run {'before' if change['before'] is None else 'after'}"
    if not method["num_questions"]:
        return f"the runs share no answered question for {name!r}"
    if metric in OVER_BASELINE and not method["num_paired"]:
        return f"the runs share no answered question for both {name!r} and the baseline"
    return f"{name!r} has none in either run"
