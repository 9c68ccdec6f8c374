"""From rows to `summary.json`: every metric of every method, and whether outputs are plain decoding's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from eval.answers import Row, groups, item_of, worked_seconds
from eval.asking import Shared, prompt_of
from eval.methods import LLAMA_CPP, PLAIN_KINDS, parse_method
from eval.metrics import Group, figures
from eval.models import Target
from eval.questions import Question

FORMAT = 1
TIE = 8  # a gap of so many units of the number format's last place, at the size of the largest logit, is rounding
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


class Difference(NamedTuple):
    """Where an answer first leaves the reference's."""

    question_id: int | str
    turn: int  # 0 for the first
    position: int  # index among the turn's new tokens
    token: int | None  # None: the answer ends here
    reference: int | None
    gap: float | None = None  # the model's best logit there less its second best; None: not asked (sampled output)
    is_tie: bool | None = None


def first_difference(answer: Row, reference: Row) -> Difference | None:
    """The first token that differs; a missing or surplus one differs too.

    Turns after it are built on it, and not compared. An answer that came as text is equal when its text is, whatever
    tokens that text is cut into.
    """
    ours, theirs = answer["choices"][0], reference["choices"][0]
    for turn, (tokens, wanted) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if tokens == wanted or (ours["is_text"][turn] and ours["turns"][turn] == theirs["turns"][turn]):
            continue
        same = (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b)
        at = next(same, min(len(tokens), len(wanted)))
        a, b = (each[at] if at < len(each) else None for each in (tokens, wanted))
        return Difference(answer["question_id"], turn, at, a, b)
    return None


def compare_outputs(
    answers: Mapping[str, Mapping[Any, Row]],
    methods: Sequence[str],
    questions: Sequence[Question],
    shared: Shared,
    target: Target | None,
) -> list[dict[str, Any]]:
    """Every method's answers beside plain decoding's, a record per method.

    Args:
        target: to ask for logit gaps; None where outputs are sampled, and the largest logit decides nothing.
    """
    asked = {question.question_id: question for question in questions}
    plain, found = answers["plain"], []
    for method in methods:
        if method == "plain":
            continue
        both = [(row, plain[key]) for key, row in answers[method].items() if key in plain]
        differing = [d for row, reference in both if (d := first_difference(row, reference)) is not None]
        if target is not None:
            differing = [_with_gap(d, asked[d.question_id], plain[d.question_id], shared, target) for d in differing]
        found.append(
            {
                "method": method,
                "num_compared": len(both),
                "num_different": len(differing),
                "num_ties": None if target is None else sum(bool(d.is_tie) for d in differing),
                "is_other_arithmetic": parse_method(method).kind == LLAMA_CPP,
                "differences": [d._asdict() for d in differing],
            }
        )
    return found


def _with_gap(difference: Difference, question: Question, reference: Row, shared: Shared, target: Target) -> Difference:
    choice, turn = reference["choices"][0], difference.turn
    prompt = prompt_of(question, turn, choice["turns"][:turn], shared, 0)
    ids = [*prompt.ids, *choice["tokens"][turn][: difference.position]]
    gap, largest = top_gap(target, ids)
    return difference._replace(gap=gap, is_tie=gap <= TIE * torch.finfo(target.stack.dtype).eps * largest)


def top_gap(target: Target, ids: Sequence[int]) -> tuple[float, float]:
    """The whole model's best logit after `ids` less its second best, and the largest magnitude of the two."""
    with torch.inference_mode():
        logits = target.stack.model(torch.tensor([ids], device=target.stack.device)).logits[0, -1].double()
    best, second = logits.topk(2).values.tolist()
    return best - second, max(abs(best), abs(second))
