"""What changed from one run to another, paired over the questions that a method answered in both.

Every figure is that of `eval.metrics`, for both runs over the same questions. The interval of its ratio, after over
before, comes from drawing those questions again, the same on both sides.
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
from eval.config import known
from eval.metrics import COMPARED, METRICS, OVER_BASELINE, TABLE, Group, drawn, value_of
from eval.records import answers_path, by_question, read_lines, read_object
from eval.run_config import SIZES
from eval.summary import fastest_plain

ROUNDING = 1e-9  # what two ways to compute the same ratio may differ by
PASSING = ("time", "command", "load_average", "costs", "resumed", *SIZES)  # no answer depends on these


def main(arguments: Sequence[str] | None = None) -> int:
    """What changed from one run to another, question by question.

    Exit codes: 0; 1 (a figure named with --fail fell by more than its share, or rose where less is better, or a method
    has no answer to a question that it answered before; without --fail neither counts); 2 (something asked for is not
    possible, in one sentence).
    """
    text = " ".join((main.__doc__ or "").split())
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
        "speedup=0.05 is the surest, as its baseline was timed beside it",
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
    """A metric and the share of it that may be lost."""
    name, _, share = text.partition("=")
    try:
        number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not name or not 0 <= number <= 1:
        raise ValueError(f"--fail takes METRIC=SHARE, the share in 0..1 such as 0.05 or 5%, got {text!r}")
    return name, number


class Opened(NamedTuple):
    """A run folder's content; `items` holds the figures of `answers`."""

    path: str
    settings: Row
    about: Row
    is_complete: bool
    baseline: str | None
    answers: dict[str, dict[Any, Row]]
    items: dict[str, dict[Any, Item]]


def open_run(path: Path, baseline: str | None = None) -> Opened:
    """Read a run folder, finished or not.

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
    about, summary = read_object(path / "environment.json"), read_object(path / "summary.json")
    names = [name for name in names if name not in (summary.get("skipped") or {})]
    answers = {name: by_question(read_lines(answers_path(path, name))) for name in names}
    items = {name: {key: item_of(row) for key, row in rows.items()} for name, rows in answers.items()}
    own = summary.get("baseline") or settings.get("baseline")
    base = baseline or (own if own in names else fastest_plain(answers))
    return Opened(str(path), settings, about, summary.get("complete", False), base, answers, items)


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


def _common(before: Opened, after: Opened, name: str | None) -> list[Any]:
    """Ids that a method, or with None each run's baseline, has answered in both, alike in category and turns."""
    a, b = (run.items.get(name or run.baseline or "", {}) for run in (before, after))
    rows = [run.answers.get(name or run.baseline or "", {}) for run in (before, after)]
    turns = [{key: len(row["choices"][0]["wall_time"]) for key, row in of_run.items()} for of_run in rows]
    return [k for k in a if k in b and a[k].category == b[k].category and turns[0][k] == turns[1][k]]


def _output(row: Row) -> Any:
    choice = row["choices"][0]
    return choice.get("tokens", choice["turns"])


def _group(run: Opened, name: str, keys: Sequence[Any], settings: Mapping[str, Any]) -> Group:
    base = run.items.get(run.baseline or "", {})
    own, theirs = [run.items[name][key] for key in keys], [base[key] for key in keys if key in base]
    return Group(own, theirs, int(settings.get("resamples", 2000)), int(settings.get("seed", 0)))


def _change(metric: str, before: Group, after: Group) -> dict[str, Any]:
    """A figure's values and their ratio; `is_clear` where its interval excludes no change."""
    a, b = (value_of(metric, group) if group.items else None for group in (before, after))
    found: dict[str, Any] = {"before": a, "after": b, "ratio": None, "low": None, "high": None, "is_clear": None}
    if a is None or b is None or not a:
        return found
    found["ratio"] = b / a
    (first, num), (then, num_then) = drawn(metric, before), drawn(metric, after)
    if num != num_then:  # an empty answer has no ratio
        return found
    with np.errstate(all="ignore"):  # a resample may hold nothing to divide by
        spread = after.interval(lambda draws: np.asarray(then(draws) / first(draws)), num)
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
        has_failed = b > a * (1 + spare) if METRICS[metric].less_is_better else b < a * (1 - spare)
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
