"""What changed from one run to another, paired over the questions that a method answered in both.

Every figure is that of `eval.run.metrics`, for both runs over the same questions. The interval of its ratio, after over
before, comes from drawing those questions again, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from eval.run.config import TABLE, known
from eval.run.items import groups
from eval.run.lines import Row
from eval.run.metrics import METRICS, Group, figures
from eval.run.report import shown
from eval.run.resampling import OVER, SUMS, Opened, resampled

OVER_BASELINE = (*OVER, "paired_ratio")
COMPARED = tuple(name for name in METRICS if name in SUMS or name in OVER_BASELINE or name.endswith(("_p50", "_p95")))
LESS_IS_BETTER = (*(name for name in COMPARED if METRICS[name][0] == "s"), "layer_passes_per_token")
MACHINE = ("cpu", "cpu_cores", "device", "gpu", "threads")  # what an absolute speed depends on most
ROUNDING = 1e-9  # what two ways to compute the same ratio may differ by
PASSING = ("time", "command", "load_average", "costs", "resumed")  # differs from run to run


def compare(
    before: Opened, after: Opened, limits: Mapping[str, float], methods: Sequence[str] = (), category: str = "overall"
) -> dict[str, Any]:
    """One record of plain numbers: what differs, every method's figures, and what became of the limits.

    Args:
        limits: by metric, the share of it that may be lost.
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
    if not any(method["num_questions"] for method in found):
        raise ValueError(f"no question of {category!r} has been answered by the same method in both runs")
    verdicts = [_verdict(method, metric, share) for metric, share in limits.items() for method in found]
    return {
        "before": {"path": before.path, "baseline": before.baseline, "complete": before.is_complete},
        "after": {"path": after.path, "baseline": after.baseline, "complete": after.is_complete},
        "category": category,
        "is_greedy": not any(run.settings.get("temperature") for run in (before, after)),
        "differs": differing(before, after),
        "methods": found,
        "limits": verdicts,
        "has_failed": any(verdict["has_failed"] for verdict in verdicts),
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


def _verdict(method: Mapping[str, Any], metric: str, share: float) -> dict[str, Any]:
    name, change = method["method"], method["metrics"][metric]
    a, b = change["before"], change["after"]
    if a is None or b is None:
        which = "before" if a is None else "after"
        raise ValueError(f"--fail {metric}: {name!r} has none in the run {which}; name methods that do with --methods")
    spare = share + ROUNDING
    has_failed = b > a * (1 + spare) if metric in LESS_IS_BETTER else b < a * (1 - spare)
    return {"method": name, "metric": metric, "share": share, "has_failed": has_failed, **change}


def render(found: Mapping[str, Any]) -> str:
    """The comparison as Markdown."""
    sides = [f"`{found[side]['path']}`, speedups over `{found[side]['baseline']}`" for side in ("before", "after")]
    differs = [f"- `{key}`: {a!r}, then {b!r}" for key, (a, b) in found["differs"].items()]
    parts = [
        "# Run comparison",
        f"Before: {sides[0]}. After: {sides[1]}. Questions: {found['category']}.",
        *(f"**{sentence}**" for sentence in warnings(found)),
        *(["## Limits", "\n".join(map(_told, found["limits"]))] if found["limits"] else []),
        "## Outputs",
        _outputs(found),
        "## What differs",
        "\n".join(differs) or "Nothing: machine, versions and settings are the same.",
        "## Figures",
        "Over the questions that a method answered in both runs. Ratios have their interval (95 % over questions) in "
        "brackets, and are bold where that excludes no change; how busy the machine was either time is no part of it.",
        _table(found["methods"]),
    ]
    return "\n\n".join(parts) + "\n"


def warnings(found: Mapping[str, Any]) -> list[str]:
    """What forbids to take the figures as they are, in sentences."""
    before, after, differs, said = found["before"], found["after"], found["differs"], list[str]()
    machine = [key for key in MACHINE if key in differs]
    if machine:
        keys = ", ".join(machine)
        said.append(f"Absolute speeds do not compare ({keys}): look at speedups, each over its own run's baseline.")
    if "model" in differs or "questions_sha256" in differs:
        said.append("Other questions or another model: questions are paired by id, category and number of turns.")
    if before["baseline"] != after["baseline"]:
        said.append("The runs' speedups are over different methods: name one with --baseline.")
    for side in (before, after):
        if not side["complete"]:
            said.append(f"{side['path']} is not finished: what is there is compared.")
    for method in found["methods"]:
        if method["num_lost"]:
            said.append(f"{method['method']}: {method['num_lost']} questions answered before have no answer now.")
    return said


def _told(limit: Mapping[str, Any]) -> str:
    name, a, b, share = (limit[key] for key in ("metric", "before", "after", "share"))
    moved = "stayed" if shown(name, a) == shown(name, b) else "rose to" if b > a else "fell to"
    clear = {None: "", True: ", whose interval excludes no change", False: ", whose interval includes no change"}
    values = f"{shown(name, a)} {moved} {shown(name, b)}, ratio {_ratio_of(limit)}{clear[limit['is_clear']]}"
    state = "**Failed**" if limit["has_failed"] else "Held"
    return f"- {state}: `{limit['method']}` {name}: {values}; limit {share:.3g}."


def _outputs(found: Mapping[str, Any]) -> str:
    how = "greedy" if found["is_greedy"] else "sampled"
    other = [(method["method"], method["num_other_outputs"], method["num_questions"]) for method in found["methods"]]
    told = [f"- `{name}`: **other tokens in {num} of {of} questions** ({how})." for name, num, of in other if num]
    return "\n".join(told) or "Every output is what it was, token for token."


def _table(methods: Sequence[Mapping[str, Any]]) -> str:
    head = ["method", "questions", "metric", "before", "after", "after / before"]
    lines = [head, ["---", "---:", "---", *["---:"] * 3]]
    for method in methods:
        for name, change in method["metrics"].items():
            if change["before"] is change["after"] is None:
                continue
            values = shown(name, change["before"]), shown(name, change["after"]), _ratio_of(change)
            lines.append([f"`{method['method']}`", str(method["num_questions"]), name.replace("_", " "), *values])
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _ratio_of(change: Mapping[str, Any]) -> str:
    if change["ratio"] is None:
        return ""
    text = f"{change['ratio']:.3f}"
    if change["is_clear"] is None:
        return text
    text = f"{text} ({change['low']:.3f}..{change['high']:.3f})"
    return f"**{text}**" if change["is_clear"] else text
