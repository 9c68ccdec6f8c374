"""From answer and error rows to `summary.json`: every metric of every method, by category and overall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from eval.answers import Row, groups, item_of, worked_seconds
from eval.methods import PLAIN_KINDS, parse_method
from eval.metrics import Group, figures

FORMAT = 1
Answers = Mapping[str, Mapping[Any, Row]]  # method -> question id -> answer


def summarise(
    answers: Answers,
    errors: Iterable[Row],
    baseline: str | None,
    *,
    num_questions: int,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """One record of plain numbers: `methods` hold `groups` (categories and `overall`), and these every metric by name.

    A figure with an interval is `{value, low, high, ...}`. A run adds `check`, `environment`, `metrics`, `is_auto` and
    `skipped`.

    Args:
        baseline: the method that speedups are over; None leaves them out.
        num_questions: what every method was to answer.
    """
    errors = list(errors)
    items = {method: [item_of(row) for row in rows.values()] for method, rows in answers.items()}
    by_group = {method: groups(of_method) for method, of_method in items.items()}
    base = {} if baseline is None else by_group[baseline]
    methods = []
    for method, of_method in by_group.items():
        failed = Counter(row["kind"] for row in errors if row["method"] == method)
        found = {
            name: figures(Group(members, base.get(name), resamples, seed))
            for name, members in of_method.items()
            if members
        }
        missing = num_questions - len(items[method]) - failed.total()
        methods.append({"method": method, "errors": dict(failed), "num_missing": missing, "groups": found})
    return {
        "format": FORMAT,
        "complete": all(method["num_missing"] == 0 for method in methods),
        "num_questions": num_questions,
        "baseline": baseline,
        "resamples": resamples,
        "seed": seed,
        "harness_share": harness_share([*(row for rows in answers.values() for row in rows.values()), *errors]),
        "methods": methods,
    }


def fastest_plain(answers: Answers) -> str | None:
    """The plain decoding of most tokens per second, over the questions that all plain ones answered."""
    items = {
        method: {row["question_id"]: item_of(row) for row in rows.values()}
        for method, rows in answers.items()
        if rows and parse_method(method).kind in PLAIN_KINDS
    }
    if not items:
        return None
    common = set.intersection(*(set(of_method) for of_method in items.values()))

    def speed(method: str) -> float:
        chosen = [item for key, item in items[method].items() if key in common or not common]
        return sum(item.num_tokens for item in chosen) / sum(item.seconds for item in chosen)

    return max(items, key=speed)


def harness_share(rows: Iterable[Row]) -> float | None:
    """Seconds outside the methods' own work over the seconds of that work; None where rows do not tell.

    Outside are prompts and texts, records on disk, the progress display and the collection of garbage: none of it is
    inside a measured time.
    """
    own = worked = 0.0
    for row in rows:
        own += row.get("harness_seconds", 0.0)
        worked += row["seconds"] if "kind" in row else worked_seconds(row)
    return own / worked if worked and own else None
