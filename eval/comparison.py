"""Compare two runs, paired by the questions that a method answered in both.

Every figure is that of `eval.metrics`, for both runs over the same questions. The interval of a ratio, after over
before, comes from a bootstrap with the same resamples on both sides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from eval.answers import Item, Row, groups, item_of
from eval.comparison_report import render
from eval.config import STUDY_SIZES
from eval.metrics import COMPARED, METRICS, OVER_BASELINE, TABLE, Group, drawn, value_of
from eval.records import answers_path, by_question, read_lines, read_object
from eval.summary import fastest_plain
from selfspec.configuration import check_known

ROUNDING = 1e-9  # tolerance between two ways to compute the same ratio
IGNORED = ("time", "command", "load_average", "costs", "resumed", *STUDY_SIZES)  # keys that no answer depends on
EXIT_CODES = """Exit codes: 0; 1 (a figure named with --fail got worse by more than its share, or a method lost answers
that it had before; without --fail neither counts); 2 (invalid input, explained in one sentence)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two run folders question by question."""
    text = " ".join(f"{main.__doc__} {EXIT_CODES}".split())
    parser = argparse.ArgumentParser(prog="python -m eval compare", description=text)
    parser.add_argument("before", metavar="RUN_A", help="run folder of before")
    parser.add_argument("after", metavar="RUN_B", help="run folder of after")
    parser.add_argument(
        "--fail",
        nargs="+",
        action="extend",
        default=[],
        metavar="METRIC=SHARE",
        help="exit with 1 when METRIC of any method got worse by more than SHARE (0.05, or 5%%), or answers are lost; "
        "speedup=0.05 is the most reliable, as its baseline was measured in the same run",
    )
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="methods to compare; default: all")
    parser.add_argument("--category", default="overall", metavar="NAME", help="compare the questions of one category")
    parser.add_argument("--baseline", metavar="NAME", help="what speedups are over; default: each run's own baseline")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of Markdown")
    options = parser.parse_args(arguments)
    limits = dict(_limit(text) for text in options.fail)
    before, after = (open_run(Path(path), options.baseline) for path in (options.before, options.after))
    found = compare(before, after, limits, options.methods, options.category)
    print(json.dumps(found) if options.json else render(found))
    return int(found["has_failed"])


def _limit(text: str) -> tuple[str, float]:
    """Parse METRIC=SHARE."""
    name, _, share = text.partition("=")
    try:
        number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not name or not 0 <= number <= 1:
        raise ValueError(f"--fail takes METRIC=SHARE, the share in 0..1 such as 0.05 or 5%, got {text!r}")
    return name, number


class Run(NamedTuple):
    """The content of a run folder; `items` are the parsed `answers`."""

    path: str
    settings: Row
    environment: Row
    is_complete: bool
    baseline: str | None
    answers: dict[str, dict[Any, Row]]
    items: dict[str, dict[Any, Item]]


def open_run(path: Path, baseline: str | None = None) -> Run:
    """Read a run folder, complete or not.

    Args:
        baseline: the method that speedups are over; None: the run's own.

    Raises:
        ValueError: it is no run folder.
    """
    try:
        settings = yaml.safe_load((path / "config.yaml").read_text("utf-8"))
        names = list(settings["methods"])
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError) as problem:
        hint = "name one that `python -m eval run` has written"
        raise ValueError(f"{str(path)!r} is no run folder ({problem}); {hint}") from problem
    environment, summary = read_object(path / "environment.json"), read_object(path / "summary.json")
    names = [name for name in names if name not in (summary.get("skipped") or {})]
    answers = {name: by_question(read_lines(answers_path(path, name))) for name in names}
    items = {name: {key: item_of(row) for key, row in rows.items()} for name, rows in answers.items()}
    own = summary.get("baseline") or settings.get("baseline")
    base = baseline or (own if own in names else fastest_plain(answers))
    return Run(str(path), settings, environment, summary.get("complete", False), base, answers, items)


def compare(
    before: Run, after: Run, limits: Mapping[str, float], methods: Sequence[str] = (), category: str = "overall"
) -> dict[str, Any]:
    """The comparison as plain values: what differs, every method's figures, and the result of every limit.

    Args:
        limits: by metric, the share of it that may be lost; with any limit, lost answers fail too.
        methods: methods to compare; empty: all that both runs have.

    Raises:
        ValueError: a name is unknown, the runs share no answered question, or a limited figure is missing.
    """
    for metric in limits:
        check_known("metric", metric, COMPARED)
    names = _names(before, after, methods, has_limits=bool(limits))
    metrics = [name for name in dict.fromkeys((*TABLE, *limits)) if name in COMPARED]
    check_known(
        "category", category, dict.fromkeys(name for n in names for name in groups(list(before.items[n].values())))
    )
    found = [_method(before, after, name, metrics, category) for name in names]
    has_lost = bool(limits) and any(method["num_lost"] for method in found)
    if not has_lost and not any(method["num_questions"] for method in found):
        raise ValueError(f"no question of {category!r} has been answered by the same method in both runs")
    results = [_check_limit(method, metric, share, has_lost) for metric, share in limits.items() for method in found]
    sides = [{"path": run.path, "baseline": run.baseline, "complete": run.is_complete} for run in (before, after)]
    return {
        "before": sides[0],
        "after": sides[1],
        "category": category,
        "is_greedy": not any(run.settings.get("temperature") for run in (before, after)),
        "differs": _differences(before, after),
        "methods": found,
        "limits": results,
        "has_failed": has_lost or any(result["has_failed"] for result in results),
    }


def _names(before: Run, after: Run, methods: Sequence[str], has_limits: bool) -> list[str]:
    """The methods to compare."""
    for run in (before, after):
        if run.baseline is not None:
            check_known(f"in {run.path} the baseline", run.baseline, run.answers)
        for name in methods:
            check_known(f"in {run.path} the method", name, run.answers)
    names = list(dict.fromkeys(methods)) or [name for name in before.answers if name in after.answers]
    if not names:
        raise ValueError(f"the runs share no method: {', '.join(before.answers)} and {', '.join(after.answers)}")
    unpaired = [] if methods else sorted(set(before.answers) ^ set(after.answers))
    if unpaired and has_limits:
        have = ", ".join(unpaired)
        raise ValueError(f"--fail: only one of the runs has {have}; name the methods of both with --methods")
    return names


def _differences(before: Run, after: Run) -> dict[str, list[Any]]:
    """Keys of environment and settings that differ, with their values before and after."""
    found: dict[str, list[Any]] = {}
    for a, b in ((before.environment, after.environment), (before.settings, after.settings)):
        for key in {**a, **b}:
            if key not in IGNORED and a.get(key) != b.get(key):
                found.setdefault(key, [a.get(key), b.get(key)])
    return found


def _method(before: Run, after: Run, name: str, metrics: Sequence[str], category: str) -> dict[str, Any]:
    both = _common(before, after, name)
    chosen = [item.question_id for item in groups([before.items[name][key] for key in both]).get(category, [])]
    with_base = [key for key in _common(before, after, None) if key in set(chosen)]
    rows = before.answers[name], after.answers[name]
    changes = {}
    for metric in metrics:
        keys = with_base if metric in OVER_BASELINE else chosen
        changes[metric] = _change(metric, *(_group(run, name, keys, after.settings) for run in (before, after)))
    return {
        "method": name,
        "num_questions": len(chosen),
        "num_paired": len(with_base),
        "num_lost": len(set(rows[0]) - set(rows[1])),
        "num_other_outputs": sum(_output(rows[0][key]) != _output(rows[1][key]) for key in chosen),
        "metrics": changes,
    }


def _common(before: Run, after: Run, name: str | None) -> list[Any]:
    """Ids of questions that a method (None: each run's baseline) answered in both, of equal category and turns."""
    a, b = (run.items.get(name or run.baseline or "", {}) for run in (before, after))
    rows = [run.answers.get(name or run.baseline or "", {}) for run in (before, after)]
    turns = [{key: len(row["choices"][0]["wall_time"]) for key, row in of_run.items()} for of_run in rows]
    return [k for k in a if k in b and a[k].category == b[k].category and turns[0][k] == turns[1][k]]


def _output(row: Row) -> Any:
    choice = row["choices"][0]
    return choice.get("tokens", choice["turns"])


def _group(run: Run, name: str, keys: Sequence[Any], settings: Mapping[str, Any]) -> Group:
    base = run.items.get(run.baseline or "", {})
    own, theirs = [run.items[name][key] for key in keys], [base[key] for key in keys if key in base]
    return Group(own, theirs, int(settings.get("resamples", 2000)), int(settings.get("seed", 0)))


def _change(metric: str, before: Group, after: Group) -> dict[str, Any]:
    """A figure's values, their ratio with its interval, and whether the interval excludes 1 (`is_clear`)."""
    a, b = (value_of(metric, group) if group.items else None for group in (before, after))
    found: dict[str, Any] = {"before": a, "after": b, "ratio": None, "low": None, "high": None, "is_clear": None}
    if a is None or b is None or not a:
        return found
    found["ratio"] = b / a
    (first, num), (second, num_after) = drawn(metric, before), drawn(metric, after)
    if num != num_after:  # empty answers are left out of the paired ratio
        return found
    with np.errstate(all="ignore"):  # a resample may divide by zero
        interval = after.interval(lambda draws: np.asarray(second(draws) / first(draws)), num)
    if not all(map(isfinite, interval.values())):
        return found
    return {**found, **interval, "is_clear": not interval["low"] - ROUNDING <= 1 <= interval["high"] + ROUNDING}


def _check_limit(method: Mapping[str, Any], metric: str, share: float, has_lost: bool) -> dict[str, Any]:
    """The result of a limit. A missing figure fails it where answers are lost, and is an error otherwise."""
    change, missing = method["metrics"][metric], None
    a, b = change["before"], change["after"]
    if a is None or b is None:
        missing, has_failed = _why_missing(method, metric), True
        if not has_lost:
            raise ValueError(f"--fail {metric}: {missing}; name other methods with --methods")
    else:
        allowed = share + ROUNDING
        has_failed = b > a * (1 + allowed) if METRICS[metric].less_is_better else b < a * (1 - allowed)
    about = {"method": method["method"], "metric": metric, "share": share, "has_failed": has_failed}
    return {**about, "missing": missing, **change}


def _why_missing(method: Mapping[str, Any], metric: str) -> str:
    name, change = method["method"], method["metrics"][metric]
    if change["before"] is not None or change["after"] is not None:
        return f"{name!r} has none in the run {'before' if change['before'] is None else 'after'}"
    if not method["num_questions"]:
        return f"the runs share no answered question for {name!r}"
    if metric in OVER_BASELINE and not method["num_paired"]:
        return f"the runs share no answered question for both {name!r} and the baseline"
    return f"{name!r} has none in either run"
