"""The report of a run, made from `summary.json` and the studies.

It is a list of sections with Markdown texts, a table and a figure each; two templates render it as Markdown and as one
self-contained HTML file.
"""

from __future__ import annotations

import argparse
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from eval import figures, studies
from eval.figures import table
from eval.metrics import METRICS, TABLE
from eval.records import answers_path, by_question, read_lines, read_object, write_file
from eval.summary import summarise
from train.configuration import check_known

SPEC_BENCH = ("mean_accepted_tokens", *(name for name in METRICS if name.startswith("spec_bench")))
ENVIRONMENT = (
    *("model", "architecture", "num_layers", "num_parameters", "dtype", "device", "gpu", "cpu", "cpu_cores", "threads"),
    *("selfspec", "torch", "transformers", "python", "commit", "dirty", "command", "time"),
)
SHOWN_DIFFERENCES = 5


@dataclass
class Section:
    """A section of the report; texts, table cells and items are Markdown with only `code` and **bold**."""

    title: str
    texts: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: figures.Figure | None = None
    items: Sequence[str] = ()
    figure_name: str = figures.NAME


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a run folder's summary and report again, or print a report of answer files."""
    parser = argparse.ArgumentParser(prog="python -m eval report", description=main.__doc__)
    parser.add_argument("paths", nargs="+", help="a run folder, or answer files in Spec-Bench's format")
    parser.add_argument("--baseline", help="method (for files: a name without .jsonl) that speedups are over")
    options = parser.parse_args(arguments)
    paths = [Path(path) for path in options.paths]
    if len(paths) == 1 and (paths[0] / "summary.json").is_file():
        print(_rewrite(paths[0], options.baseline), end="")
        return 0
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{str(path)!r} is neither a run folder with a summary nor an answer file")
    answers = {path.stem: by_question(read_lines(path)) for path in paths}
    base = options.baseline or paths[0].stem
    check_known("baseline", base, answers)
    summary = summarise(answers, [], base, num_questions=max(len(rows) for rows in answers.values()))
    print(render("md", list(sections(summary, None)), "", opening_of(summary)), end="")
    return 0


def _rewrite(folder: Path, baseline: str | None) -> str:
    """Write a run folder's report from its rows; the comparison of outputs is taken from the old summary."""
    before = read_object(folder / "summary.json")
    names = [method["method"] for method in before["methods"]]
    if baseline:
        check_known("baseline", baseline, names)
    answers = {name: by_question(read_lines(answers_path(folder, name))) for name in names}
    errors = list(by_question(read_lines(folder / "errors.jsonl")).values())
    same = {key: before[key] for key in ("num_questions", "resamples", "seed")}
    found = summarise(answers, errors, baseline or before["baseline"], **same)
    kept = {key: before.get(key) for key in ("check", "metrics", "environment", "skipped")}
    return publish(folder, {**found, **kept, "is_auto": before.get("is_auto") and not baseline})


def publish(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write `summary.json`, `report.md`, `report.html` and `figures/`; returns the report as Markdown.

    Raises:
        FullError: a file cannot be written.
    """
    write_file(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    opening, figure = opening_of(summary), None
    try:
        figure = figures.speedup_by_category(summary)
    except ImportError:
        opening.append("There is no figure: it needs matplotlib (pip install matplotlib; then run report).")
    made = [*sections(summary, figure), *studies.sections(folder, Section)]
    about = str((summary.get("environment") or {}).get("model") or "")
    text = render("md", made, about, opening)
    write_file(folder / "report.md", text)
    write_file(folder / "report.html", render("html", made, about, opening))
    if figure is not None:
        write_file(folder / "figures" / f"{figures.NAME}.svg", figure.svg)
    return text


def render(form: str, made: Sequence[Section], about: str, opening: Sequence[str]) -> str:
    """Render the report as "md" or "html"."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder, autoescape=form == "html", undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"inline": _inline, "markdown": _markdown, "base64": _base64}
    environment.globals["table"] = table
    template = environment.get_template(f"report.{form}.jinja")
    shown = [section for section in made if section.texts or section.rows or section.items or section.figure]
    text = template.render(title="Run report", about=about, opening=opening, sections=shown).rstrip() + "\n"
    return text.encode("utf-8", "replace").decode()  # lone surrogates become question marks


def _markdown(text: str) -> str:
    """Escape `<` outside of code, so that data cannot form HTML tags."""
    return re.sub(r"`[^`]+`|<", lambda found: found[0] if found[0] != "<" else "\\<", text)


def _base64(text: str) -> str:
    return b64encode(text.encode("utf-8", "replace")).decode()


def _inline(text: str) -> Markup:
    """Convert one line of Markdown to HTML."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", marked))


def sections(summary: Mapping[str, Any], figure: figures.Figure | None) -> Iterator[Section]:
    """The sections made from the summary."""
    columns = summary.get("metrics") or TABLE
    methods = summary["methods"]
    groups = list(dict.fromkeys(name for method in methods for name in method["groups"] if name != "overall"))
    yield _outputs(summary.get("check"))
    yield Section("Overall", [], *_overall(methods, columns))
    rows = [[_code(m["method"]), *(_of(m, name, "speedup") for name in [*groups, "overall"])] for m in methods]
    yield Section("Speedup by category", [], ["method", *groups, "overall"], rows, figure)
    yield Section("Spec-Bench's figures", [], *_overall(methods, SPEC_BENCH))
    ours = [method for method in methods if (method["groups"].get("overall") or {}).get("stage_shares")]
    stages = list(ours[0]["groups"]["overall"]["stage_shares"]) if ours else []
    shares = [(method["method"], method["groups"]["overall"]["stage_shares"]) for method in ours]
    rows = [[_code(name), *(f"{share.get(stage, 0):.0%}" for stage in stages)] for name, share in shares]
    texts = ["Share of a round's time by stage, by the engine's own clock."] if rows else []
    yield Section("Where the time goes", texts, ["method", *stages], rows)
    failed = [[_code(m["method"]), kind, str(count)] for m in methods for kind, count in m["errors"].items()]
    texts = ["Questions without an answer; each is a row of errors.jsonl."] if failed else []
    yield Section("Errors", texts, ["method", "kind", "questions"], failed)
    about = summary.get("environment") or {}
    items = [f"{key.replace('_', ' ')}: {_data(about[key])}" for key in ENVIRONMENT if about.get(key) is not None]
    yield Section("Environment", items=items)
    names = dict.fromkeys([*columns, *SPEC_BENCH])
    yield Section("Definitions", items=[f"`{name}`: {METRICS[name].meaning}." for name in names])


def opening_of(summary: Mapping[str, Any]) -> list[str]:
    """The report's first paragraphs: size, completeness, baseline, skipped methods."""
    number, base = summary["num_questions"], summary["baseline"]
    missing = max((method["num_missing"] for method in summary["methods"]), default=0)
    said = [f"{number} questions, {len(summary['methods'])} methods, interleaved question by question."]
    if missing > 0:
        said.append(f"**Partial: up to {missing} of {number} questions are still to be asked.**")
    if base:
        fastest = ", the fastest plain decoding of the run" if summary.get("is_auto") else ""
        said.append(f"Speedups are over `{base}`{fastest}.")
    else:
        said.append("No baseline.")
    if summary.get("harness_share") is not None:
        said.append(f"The harness took {summary['harness_share']:.2%} of the measured time, between calls.")
    return [" ".join(said), *(f"Skipped: {_data(reason)}." for reason in (summary.get("skipped") or {}).values())]


def _outputs(check: Sequence[Mapping[str, Any]] | None) -> Section:
    if check is None:
        return Section("Outputs", ["Not compared with plain decoding."])
    texts, exact = list[str](), [method for method in check if not method.get("is_other_arithmetic")]
    if any(method["num_different"] for method in exact):
        texts.append("**Outputs differ from plain decoding's.**")
    else:
        counts = ", ".join(f"{_code(method['method'])} {method['num_compared']}" for method in exact) or "none"
        texts.append(f"Every output compared is plain decoding's, token for token (questions: {counts}).")
    for method in check:
        if method.get("is_other_arithmetic"):
            other = f"{_code(method['method'])} computes with other arithmetic, so its tokens may differ"
            texts.append(f"{other}: they do in {method['num_different']} of {method['num_compared']} questions.")
    columns = ["method", "questions compared", "different", "of them ties", "first differences"]
    rows = [_difference_row(method) for method in check if method["num_different"]]
    return Section("Outputs", texts, columns, rows)


def _difference_row(method: Mapping[str, Any]) -> list[str]:
    ties = "" if method["num_ties"] is None else str(method["num_ties"])
    first = "; ".join(_difference(d) for d in method["differences"][:SHOWN_DIFFERENCES])
    return [_code(method["method"]), str(method["num_compared"]), str(method["num_different"]), ties, first]


def _difference(d: Mapping[str, Any]) -> str:
    gap = "" if d["gap"] is None else f", logit gap {d['gap']:.2g}"
    return f"question {_data(d['question_id'])}, turn {d['turn'] + 1}, token {d['position'] + 1}{gap}"


def _overall(methods: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    rows = [[_code(method["method"]), *(_of(method, "overall", name) for name in columns)] for method in methods]
    return ["method", *(name.replace("_", " ") for name in columns)], rows


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
