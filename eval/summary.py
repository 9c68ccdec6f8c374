"""Compute `summary.json` from the rows of a run: every metric of every method, and the comparison of outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from eval.answers import Row, groups, item_of
from eval.asking import Shared, prompt_of
from eval.methods import LLAMA_CPP, PLAIN_KINDS, parse_method
from eval.metrics import Group, figures
from eval.questions import Question
from selfspec import LLM

FORMAT = 1
TIE_ULPS = 8  # logits that differ by at most so many units in the last place of the largest are a tie
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
    """The summary as plain values: `methods` have `groups` (categories and `overall`), and these all metrics by name.

    A figure with an interval is `{value, low, high, ...}`. A run adds `check`, `environment`, `metrics`, `is_auto` and
    `skipped`.

    Args:
        baseline: the method that speedups are over; None leaves speedups out.
        num_questions: number of questions of the run.
    """
    errors = list(errors)
    items = {method: [item_of(row) for row in rows.values()] for method, rows in answers.items()}
    by_group = {method: groups(of_method) for method, of_method in items.items()}
    base = {} if baseline is None else by_group[baseline]
    methods = []
    for method, of_method in by_group.items():
        failed = Counter(row["kind"] for row in errors if row["method"] == method)
        pairs = ((name, members, base.get(name)) for name, members in of_method.items() if members)
        found = {name: figures(Group(members, theirs, resamples, seed)) for name, members, theirs in pairs}
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
    """The plain decoding with most tokens per second on the questions that all plain methods answered."""
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
    """Seconds of the harness between calls, over the seconds of the methods; None where rows do not report them.

    The harness builds prompts, decodes texts, writes rows, prints progress and collects garbage. None of it is part of
    a measured time.
    """
    harness = methods = 0.0
    for row in rows:
        harness += row.get("harness_seconds", 0.0)
        methods += row["seconds"] if "kind" in row else sum(row["choices"][0]["wall_time"])
    return harness / methods if methods and harness else None


class Difference(NamedTuple):
    """The first token of an answer that differs from the reference; a missing or additional token differs too."""

    question_id: int | str
    turn: int  # 0 for the first
    position: int  # index among the turn's new tokens
    token: int | None  # None: the answer ends here
    reference: int | None
    gap: float | None = None  # the model's best logit there minus its second best; None: not computed
    is_tie: bool | None = None


def first_difference(answer: Row, reference: Row) -> Difference | None:
    """The first difference between two answers; later turns, which depend on it, are not compared."""
    ours, theirs = answer["choices"][0], reference["choices"][0]
    for turn, (tokens, wanted) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if tokens == wanted:
            continue
        unequal = (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b)
        at = next(unequal, min(len(tokens), len(wanted)))
        a, b = (each[at] if at < len(each) else None for each in (tokens, wanted))
        return Difference(answer["question_id"], turn, at, a, b)
    return None


def compare_outputs(
    answers: Answers, methods: Sequence[str], questions: Sequence[Question], shared: Shared, llm: LLM | None
) -> list[dict[str, Any]]:
    """Compare every method's answers with those of plain decoding; returns a record per method.

    Args:
        llm: computes logit gaps; None where outputs are sampled and the gap has no meaning.
    """
    by_id = {question.question_id: question for question in questions}
    plain, found = answers["plain"], []
    for method in methods:
        if method == "plain":
            continue
        both = [(row, plain[key]) for key, row in answers[method].items() if key in plain]
        differing = [d for row, reference in both if (d := first_difference(row, reference)) is not None]
        if llm is not None:
            differing = [_with_gap(d, by_id[d.question_id], plain[d.question_id], shared, llm) for d in differing]
        found.append(
            {
                "method": method,
                "num_compared": len(both),
                "num_different": len(differing),
                "num_ties": None if llm is None else sum(bool(d.is_tie) for d in differing),
                "is_other_arithmetic": parse_method(method).kind == LLAMA_CPP,
                "differences": [d._asdict() for d in differing],
            }
        )
    return found


def _with_gap(difference: Difference, question: Question, reference: Row, shared: Shared, llm: LLM) -> Difference:
    """Add the gap between the model's two best logits at the difference."""
    choice, turn = reference["choices"][0], difference.turn
    split = llm.target.split
    prompt = prompt_of(question, turn, choice["turns"][:turn], shared, 0)
    ids = torch.tensor([[*prompt.ids, *choice["tokens"][turn][: difference.position]]], device=split.device)
    with torch.inference_mode():
        best, second = split.model(ids).logits[0, -1].double().topk(2).values.tolist()
    gap, largest = best - second, max(abs(best), abs(second))
    return difference._replace(gap=gap, is_tie=gap <= TIE_ULPS * torch.finfo(split.dtype).eps * largest)
