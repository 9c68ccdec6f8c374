"""A comparison of two runs as Markdown: first why its figures may mislead, then its limits and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report import shown
from eval.table import table

MACHINE = ("cpu", "cpu_cores", "device", "gpu", "threads")  # what an absolute speed depends on most


def render(found: Mapping[str, Any]) -> str:
    """What `eval.comparison.compare` has found, as Markdown."""
    sides = [f"`{found[side]['path']}`, speedups over `{found[side]['baseline']}`" for side in ("before", "after")]
    differs = [f"- `{key}`: {a!r}, then {b!r}" for key, (a, b) in found["differs"].items()]
    parts = [
        "# Run comparison",
        f"Before: {sides[0]}. After: {sides[1]}. Questions: {found['category']}.",
        *(f"**{sentence}**" for sentence in warnings(found)),
        *(["## Limits", "\n".join([*map(_told, found["limits"]), *_lost(found)])] if found["limits"] else []),
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
    """Why the figures may mislead, in sentences."""
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
        name, other = method["method"], method["num_other_outputs"]
        if method["num_lost"]:
            said.append(f"{name}: {method['num_lost']} questions answered before have no answer now.")
        if other and found["is_greedy"]:
            of = method["num_questions"]
            said.append(f"{name}: other tokens in {other} of {of} questions, though both runs are greedy.")
    return said


def _lost(found: Mapping[str, Any]) -> list[str]:
    lost = [(method["method"], method["num_lost"]) for method in found["methods"] if method["num_lost"]]
    return [f"- **Failed**: `{name}`: {num} questions answered before have no answer now." for name, num in lost]


def _told(limit: Mapping[str, Any]) -> str:
    name, a, b, share = (limit[key] for key in ("metric", "before", "after", "share"))
    if limit["lacking"]:
        return f"- **Failed**: `{limit['method']}` {name}: {limit['lacking']}."
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
    rows = []
    for method in methods:
        for name, change in method["metrics"].items():
            if not change["before"] is change["after"] is None:
                values = shown(name, change["before"]), shown(name, change["after"]), _ratio_of(change)
                rows.append([f"`{method['method']}`", str(method["num_questions"]), name.replace("_", " "), *values])
    return table(["method", "questions", "metric", "before", "after", "after / before"], rows)


def _ratio_of(change: Mapping[str, Any]) -> str:
    if change["ratio"] is None:
        return ""
    text = f"{change['ratio']:.3f}"
    if change["is_clear"] is None:
        return text
    text = f"{text} ({change['low']:.3f}..{change['high']:.3f})"
    return f"**{text}**" if change["is_clear"] else text
