"""The report of a run, in Markdown, and its figure: both are made from `summary.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import figures
from eval.figures import table
from eval.metrics import METRICS, TABLE
from eval.records import write_file

ENVIRONMENT = (
    *("model", "architecture", "num_layers", "num_parameters", "dtype", "device", "gpu", "cpu", "cpu_cores", "threads"),
    *("selfspec", "torch", "transformers", "python", "commit", "dirty", "command", "time"),
)
SHOWN_DIFFERENCES = 5


def publish(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write `summary.json`, `report.md` and `figures/`; returns the report.

    Raises:
        FullError: a file cannot be written.
    """
    write_file(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    figure, missing = None, ""
    try:
        figure = figures.speedup_by_category(summary)
    except ImportError:
        missing = "There is no figure: it needs matplotlib."
    text = render(summary, figure, missing)
    write_file(folder / "report.md", text)
    if figure is not None:
        write_file(folder / "figures" / f"{figures.NAME}.svg", figure.svg)
    return text


def render(summary: Mapping[str, Any], figure: figures.Figure | None = None, note: str = "") -> str:
    """The report; `<` outside of code is escaped, so that data cannot form HTML tags."""
    parts = ["# Run report", *_opening(summary), note, *_sections(summary, figure)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    text = re.sub(r"`[^`\n]+`|<", lambda found: found[0] if found[0] != "<" else "\\<", text)
    return text.encode("utf-8", "replace").decode()  # lone surrogates become question marks


def _opening(summary: Mapping[str, Any]) -> list[str]:
    """The first paragraphs: size, completeness, baseline, skipped methods."""
    number, base = summary["num_questions"], summary["baseline"]
    missing = max((method["num_missing"] for method in summary["methods"]), default=0)
    said = [f"{number} questions, {len(summary['methods'])} methods, interleaved question by question."]
    if missing > 0:
        said.append(f"**Partial: up to {missing} of {number} questions are still to be asked.**")
    if base:
        fastest = ", the fastest plain decoding of the run" if summary["is_auto"] else ""
        said.append(f"Speedups are over `{base}`{fastest}.")
    else:
        said.append("No baseline.")
    if summary["harness_share"] is not None:
        said.append(f"The harness took {summary['harness_share']:.2%} of the measured time, between calls.")
    return [" ".join(said), *(f"Skipped: {_data(reason)}." for reason in summary["skipped"].values())]


def _sections(summary: Mapping[str, Any], figure: figures.Figure | None) -> Iterator[str]:
    columns, methods = summary["metrics"] or TABLE, summary["methods"]
    groups = list(dict.fromkeys(name for method in methods for name in method["groups"] if name != "overall"))
    yield "## Outputs"
    yield from _outputs(summary["check"])
    yield "## Overall"
    rows = [[_code(method["method"]), *(_of(method, "overall", name) for name in columns)] for method in methods]
    yield table(["method", *(name.replace("_", " ") for name in columns)], rows)
    yield "## Speedup by category"
    rows = [[_code(m["method"]), *(_of(m, name, "speedup") for name in [*groups, "overall"])] for m in methods]
    yield table(["method", *groups, "overall"], rows)
    if figure is not None:
        yield f"![{figure.title}](figures/{figures.NAME}.svg)"
        yield figure.caption
    overall = {method["method"]: method["groups"].get("overall") or {} for method in methods}
    shares = {name: found["stage_shares"] for name, found in overall.items() if found.get("stage_shares")}
    if shares:
        stages = list(next(iter(shares.values())))
        yield "## Where the time goes"
        yield "Share of a round's time by stage, by the engine's own clock."
        rows = [[_code(name), *(f"{share.get(stage, 0):.0%}" for stage in stages)] for name, share in shares.items()]
        yield table(["method", *stages], rows)
    failed = [[_code(m["method"]), kind, str(count)] for m in methods for kind, count in m["errors"].items()]
    if failed:
        yield "## Errors"
        yield "Questions without an answer; each is a row of errors.jsonl."
        yield table(["method", "kind", "questions"], failed)
    about = summary["environment"]
    yield "## Environment"
    known = (key for key in ENVIRONMENT if about.get(key) is not None)
    yield "\n".join(f"- {key.replace('_', ' ')}: {_data(about[key])}" for key in known)
    yield "## Definitions"
    yield "\n".join(f"- `{name}`: {METRICS[name].meaning}." for name in columns)


def _outputs(check: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    if check is None:
        yield "Not compared with plain decoding."
        return
    exact = [method for method in check if not method.get("is_other_arithmetic")]
    if any(method["num_different"] for method in exact):
        yield "**Outputs differ from plain decoding's.**"
    else:
        counts = ", ".join(f"{_code(method['method'])} {method['num_compared']}" for method in exact) or "none"
        yield f"Every output compared is plain decoding's, token for token (questions: {counts})."
    for method in check:
        if method.get("is_other_arithmetic"):
            other = f"{_code(method['method'])} computes with other arithmetic, so its tokens may differ"
            yield f"{other}: they do in {method['num_different']} of {method['num_compared']} questions."
    rows = [_difference_row(method) for method in check if method["num_different"]]
    if rows:
        yield table(["method", "questions compared", "different", "of them ties", "first differences"], rows)


def _difference_row(method: Mapping[str, Any]) -> list[str]:
    ties = "" if method["num_ties"] is None else str(method["num_ties"])
    first = "; ".join(_difference(d) for d in method["differences"][:SHOWN_DIFFERENCES])
    return [_code(method["method"]), str(method["num_compared"]), str(method["num_different"]), ties, first]


def _difference(d: Mapping[str, Any]) -> str:
    gap = "" if d["gap"] is None else f", logit gap {d['gap']:.2g}"
    return f"question {_data(d['question_id'])}, turn {d['turn'] + 1}, token {d['position'] + 1}{gap}"


def _of(method: Mapping[str, Any], group: str, name: str) -> str:
    found = method["groups"].get(group)
    return shown(name, found[name] if found else None)


def shown(name: str, value: Any) -> str:
    """Format a figure: three digits, its interval in brackets; short times in milliseconds."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(f"{each['joint']:.2f}/{each['conditional']:.2f}" for each in value)
    if isinstance(value, Mapping):
        if "value" not in value:
            return ", ".join(f"{key} {share:.0%}" for key, share in value.items())
        return f"{shown(name, value['value'])} ({shown(name, value['low'])}..{shown(name, value['high'])})"
    if METRICS[name].unit == "s" and name != "seconds":
        return f"{1e3 * value:.3g} ms"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _code(name: str) -> str:
    return f"`{name.replace('`', chr(39))}`"


def _data(value: object) -> str:
    """Text from outside in one line."""
    return " ".join(str(value).split())
