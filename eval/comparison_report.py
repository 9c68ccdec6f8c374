"""Render a comparison of two runs as Markdown: warnings first, then limits, outputs and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.figures import table
from eval.report import shown

MACHINE = ("cpu", "cpu_cores", "device", "gpu", "threads")  # keys that absolute speeds depend on


def render(found: Mapping[str, Any]) -> str:
    """Render the record of `eval.comparison.compare`."""
    sides = [f"`{found[side]['path']}`, speedups over `{found[side]['baseline']}`" for side in ("before", "after")]
    differs = [f"- `{key}`: {a!r}, then {b!r}" for key, (a, b) in found["differs"].items()]
    lost = [(method["method"], method["num_lost"]) for method in found["methods"] if method["num_lost"]]
    failed = [f"- **Failed**: `{name}`: {num} questions answered before have no answer now." for name, num in lost]
    parts = [
        "# Run comparison",
        f"Before: {sides[0]}. After: {sides[1]}. Questions: {found['category']}.",
        *(f"**{sentence}**" for sentence in _warnings(found)),
        *(["## Limits", "\n".join([*map(_limit_line, found["limits"]), *failed])] if found["limits"] else []),
        "## Outputs",
        _outputs(found),
        "## What differs",
        "\n".join(differs) or "Nothing: machine, versions and settings are the same.",
        "## Figures",
        "Over the questions that a method answered in both runs. Ratios have their 95 % interval over questions in "
        "brackets and are bold where it excludes 1. The intervals do not include drifts of the machine's speed.",
        _figures(found["methods"]),
    ]
    return "\n\n".join(parts) + "\n"


def _warnings(found: Mapping[str, Any]) -> list[str]:
    """Reasons why the figures may mislead."""
    before, after, differs, texts = found["before"], found["after"], found["differs"], list[str]()
    machine = [key for key in MACHINE if key in differs]
    if machine:
        keys = ", ".join(machine)
        texts.append(f"Absolute speeds do not compare ({keys}): look at speedups, each over its own run's baseline.")
    if "model" in differs or "questions_sha256" in differs:
        texts.append("Other questions or another model: questions are paired by id, category and number of turns.")
    if before["baseline"] != after["baseline"]:
        texts.append("The runs' speedups are over different methods: name one with --baseline.")
    texts += [
        f"{side['path']} is not finished: only its answers so far are compared."
        for side in (before, after)
        if not side["complete"]
    ]
    for method in found["methods"]:
        name, other = method["method"], method["num_other_outputs"]
        if method["num_lost"]:
            texts.append(f"{name}: {method['num_lost']} questions answered before have no answer now.")
        if other and found["is_greedy"]:
            total = method["num_questions"]
            texts.append(f"{name}: other tokens in {other} of {total} questions, though both runs are greedy.")
    return texts


def _limit_line(limit: Mapping[str, Any]) -> str:
    name, a, b, share = (limit[key] for key in ("metric", "before", "after", "share"))
    if limit["missing"]:
        return f"- **Failed**: `{limit['method']}` {name}: {limit['missing']}."
    moved = "stayed" if shown(name, a) == shown(name, b) else "rose to" if b > a else "fell to"
    clear = {None: "", True: ", whose interval excludes 1", False: ", whose interval includes 1"}
    values = f"{shown(name, a)} {moved} {shown(name, b)}, ratio {_ratio(limit)}{clear[limit['is_clear']]}"
    state = "**Failed**" if limit["has_failed"] else "Held"
    return f"- {state}: `{limit['method']}` {name}: {values}; limit {share:.3g}."


def _outputs(found: Mapping[str, Any]) -> str:
    how = "greedy" if found["is_greedy"] else "sampled"
    other = [(method["method"], method["num_other_outputs"], method["num_questions"]) for method in found["methods"]]
    texts = [f"- `{name}`: **other tokens in {num} of {of} questions** ({how})." for name, num, of in other if num]
    return "\n".join(texts) or "Every output is what it was, token for token."


def _figures(methods: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for method in methods:
        for name, change in method["metrics"].items():
            if not change["before"] is change["after"] is None:
                values = shown(name, change["before"]), shown(name, change["after"]), _ratio(change)
                rows.append([f"`{method['method']}`", str(method["num_questions"]), name.replace("_", " "), *values])
    return table(["method", "questions", "metric", "before", "after", "after / before"], rows)


def _ratio(change: Mapping[str, Any]) -> str:
    text = "" if change["ratio"] is None else f"{change['ratio']:.3f}"
    if change["is_clear"] is None:
        return text
    text = f"{text} ({change['low']:.3f}..{change['high']:.3f})"
    return f"**{text}**" if change["is_clear"] else text
