"""The report: are outputs equal, how fast, what failed, where and with what; of `summary.json` and the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.run.config import TABLE
from eval.run.drawing import Drawn
from eval.run.metrics import METRICS
from eval.run.page import markdown
from eval.run.page.blocks import (
    Aside,
    Block,
    Code,
    Figure,
    Listing,
    Page,
    Paragraph,
    Section,
    Strong,
    Table,
    Text,
    plain,
)

SPEC_BENCH = (
    "mean_accepted_tokens",
    "spec_bench_tokens_per_second",
    "spec_bench_speedup",
    "spec_bench_script_speedup",
)
SHOWN_DIFFERENCES = 5
ABOUT = (
    "model",
    "architecture",
    "num_layers",
    "num_parameters",
    "dtype",
    "device",
    "gpu",
    "cpu",
    "cpu_cores",
    "threads",
)
VERSIONS = ("selfspec", "torch", "transformers", "python", "commit", "dirty", "command", "time")
FIGURES = {  # sections of figures alone, after the tables
    "Where the time goes": ("stages",),
    "Acceptance": ("acceptance",),
    "Exit layer and draft length": ("grid",),
    "Batches": ("batch",),
    "Policies": ("policies",),
}


def render(summary: Mapping[str, Any]) -> str:
    """The report as Markdown, without figures."""
    return markdown.render(page(summary, Drawn()))


def page(summary: Mapping[str, Any], drawn: Drawn) -> Page:
    """The report, to be rendered as Markdown or HTML."""
    columns = summary.get("metrics") or TABLE
    about = summary.get("environment") or {}
    names = dict.fromkeys([*columns, *SPEC_BENCH])
    sections = [
        Section("Outputs", _check(summary.get("check"))),
        Section("Overall", [_overall(summary, columns)]),
        Section("Speedup by category", [_by_category(summary), *_figures(drawn, "speedup_by_category")]),
        Section("Spec-Bench's figures", [_overall(summary, SPEC_BENCH)]),
        *(Section(title, _figures(drawn, *of)) for title, of in FIGURES.items()),
        Section("Errors", _errors(summary["methods"])),
        Section("Environment", _environment(about)),
        Section("Definitions", [Listing([(Code(name), f": {METRICS[name][1]}.") for name in names])]),
    ]
    opening = [Paragraph(_state(summary)), *([Paragraph((drawn.remark,))] if drawn.remark else [])]
    return Page("Run report", str(about.get("model") or ""), opening, [each for each in sections if each.blocks])


def _figures(drawn: Drawn, *names: str) -> list[Block]:
    """Figures, or why they are not there."""
    blocks: list[Block] = []
    for name in names:
        if name in drawn.figures:
            figure = drawn.figures[name]
            blocks.append(Figure(name, figure.title, figure.caption, figure.svg))
        elif name in drawn.notes:
            blocks.append(Paragraph(plain(drawn.notes[name])))
    return blocks


def _state(summary: Mapping[str, Any]) -> Text:
    number, base = summary["num_questions"], summary["baseline"]
    missing = max(method["num_missing"] for method in summary["methods"])
    text = [f"{number} questions, {len(summary['methods'])} methods, interleaved question by question."]
    if missing > 0:
        text += [" ", Strong(f"Partial: up to {missing} of {number} questions are still to be asked.")]
    if base:
        fastest = ", the fastest plain decoding of the run" if summary.get("is_auto") else ""
        text += [" Speedups are over ", Code(base), f"{fastest}."]
    else:
        text.append(" No baseline.")
    if summary["harness_share"] is not None:
        inside = summary["harness_share_inside"] or 0
        shares = f"{summary['harness_share']:.2%} between calls and {inside:.4%} inside them"
        text.append(f" The harness itself took, as a share of the time measured, {shares}.")
    return tuple(text)


def _check(check: Sequence[Mapping[str, Any]] | None) -> list[Block]:
    if check is None:
        return [Paragraph(("Not compared with plain decoding.",))]
    if not any(method["num_different"] for method in check):
        text: list[str] = []
        for method in check:
            text += [", " if text else "", Code(method["method"]), f" {method['num_compared']}"]
        start = "Every output compared is plain decoding's, token for token (questions: "
        return [Paragraph((start, *(text or ["none"]), ")."))]
    rows: list[list[Text]] = [
        [
            (Code(method["method"]),),
            (str(method["num_compared"]),),
            (str(method["num_different"]),),
            ("" if method["num_ties"] is None else str(method["num_ties"]),),
            ("; ".join(_difference(d) for d in method["differences"][:SHOWN_DIFFERENCES]),),
        ]
        for method in check
    ]
    head = ["method", "questions compared", "different", "of them ties", "first differences"]
    return [Paragraph((Strong("Outputs differ from plain decoding's."),)), Table(head, rows)]


def _difference(d: Mapping[str, Any]) -> str:
    gap = "" if d["gap"] is None else f", logit gap {d['gap']:.2g}"
    return f"question {d['question_id']}, turn {d['turn'] + 1}, token {d['position'] + 1}{gap}"


def _overall(summary: Mapping[str, Any], columns: Sequence[str]) -> Table:
    rows = []
    for method in summary["methods"]:
        group = method["groups"].get("overall")
        rows.append([(Code(method["method"]),), *(_cell(name, group[name] if group else None) for name in columns)])
    return Table(["method", *(name.replace("_", " ") for name in columns)], rows)


def _by_category(summary: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(name for method in summary["methods"] for name in method["groups"]))
    names = [name for name in names if name != "overall"] + ["overall"]
    rows = []
    for method in summary["methods"]:
        found = (method["groups"].get(name) for name in names)
        cells = (_cell("speedup", group["speedup"] if group else None) for group in found)
        rows.append([(Code(method["method"]),), *cells])
    return Table(["method", *names], rows)


def _cell(name: str, value: Any) -> Text:
    """A figure as `shown`, its interval apart."""
    first, bracket, interval = shown(name, value).partition(" (")
    return (first, Aside(bracket + interval)) if interval else (first,)


def shown(name: str, value: Any) -> str:
    """A figure for people: three digits, its interval in brackets; short times in milliseconds."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(f"{each['joint']:.2f}/{each['conditional']:.2f}" for each in value)
    if isinstance(value, Mapping):
        if "value" not in value:
            return ", ".join(f"{key} {share:.0%}" for key, share in value.items())
        return f"{shown(name, value['value'])} ({shown(name, value['low'])}..{shown(name, value['high'])})"
    if METRICS[name][0] == "s" and name != "seconds":
        return f"{1e3 * value:.3g} ms"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _errors(methods: Iterable[Mapping[str, Any]]) -> list[Block]:
    rows: list[list[Text]] = [
        [(Code(method["method"]),), (kind,), (str(count),)]
        for method in methods
        for kind, count in method["errors"].items()
    ]
    if not rows:
        return []
    text = "Questions without an answer; each is a row of errors.jsonl."
    return [Paragraph((text,)), Table(["method", "kind", "questions"], rows)]


def _environment(about: Mapping[str, Any]) -> list[Block]:
    keys = [key for key in (*ABOUT, *VERSIONS) if about.get(key) is not None]
    return [Listing([(f"{key.replace('_', ' ')}: {about[key]}",) for key in keys])] if keys else []
