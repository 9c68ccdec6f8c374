"""`report.md`: whether outputs are equal, how fast, what failed, where and with what; from `summary.json` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.run.config import TABLE
from eval.run.metrics import METRICS

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


def render(summary: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    columns = summary.get("metrics") or TABLE
    parts = [
        "# Run report",
        _state(summary),
        "## Outputs",
        _check(summary.get("check")),
        "## Overall",
        _overall(summary, columns),
        "## Speedup by category",
        _by_category(summary),
        "## Spec-Bench's figures",
        _overall(summary, SPEC_BENCH),
        *_errors(summary["methods"]),
        *_environment(summary.get("environment") or {}),
        "## Definitions",
        "\n".join(f"- `{name}`: {METRICS[name][1]}." for name in dict.fromkeys([*columns, *SPEC_BENCH])),
    ]
    return "\n\n".join(parts) + "\n"


def _state(summary: Mapping[str, Any]) -> str:
    number, base = summary["num_questions"], summary["baseline"]
    missing = max(method["num_missing"] for method in summary["methods"])
    over = f"Speedups are over `{base}`{', the fastest plain decoding of the run' if summary.get('is_auto') else ''}."
    sentences = [f"{number} questions, {len(summary['methods'])} methods, interleaved question by question."]
    if missing > 0:
        sentences.append(f"**Partial: up to {missing} of {number} questions are still to be asked.**")
    sentences.append(over if base else "No baseline.")
    if summary["harness_share"] is not None:
        inside = summary["harness_share_inside"] or 0
        shares = f"{summary['harness_share']:.2%} between calls and {inside:.4%} inside them"
        sentences.append(f"The harness itself took, as a share of the time measured, {shares}.")
    return " ".join(sentences)


def _check(check: Sequence[Mapping[str, Any]] | None) -> str:
    if check is None:
        return "Not compared with plain decoding."
    if not any(method["num_different"] for method in check):
        compared = ", ".join(f"`{method['method']}` {method['num_compared']}" for method in check)
        return f"Every output compared is plain decoding's, token for token (questions: {compared or 'none'})."
    rows = [
        [
            f"`{method['method']}`",
            str(method["num_compared"]),
            str(method["num_different"]),
            "" if method["num_ties"] is None else str(method["num_ties"]),
            "; ".join(_difference(d) for d in method["differences"][:SHOWN_DIFFERENCES]),
        ]
        for method in check
    ]
    head = ["method", "questions compared", "different", "of them ties", "first differences"]
    return f"**Outputs differ from plain decoding's.**\n\n{_table(head, rows)}"


def _difference(d: Mapping[str, Any]) -> str:
    gap = "" if d["gap"] is None else f", logit gap {d['gap']:.2g}"
    return f"question {d['question_id']}, turn {d['turn'] + 1}, token {d['position'] + 1}{gap}"


def _overall(summary: Mapping[str, Any], columns: Sequence[str]) -> str:
    rows = []
    for method in summary["methods"]:
        group = method["groups"].get("overall")
        rows.append([f"`{method['method']}`", *(shown(name, group[name]) if group else "" for name in columns)])
    return _table(["method", *(name.replace("_", " ") for name in columns)], rows)


def _by_category(summary: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(name for method in summary["methods"] for name in method["groups"]))
    names = [name for name in names if name != "overall"] + ["overall"]
    rows = []
    for method in summary["methods"]:
        found = (method["groups"].get(name) for name in names)
        rows.append(
            [f"`{method['method']}`", *(shown("speedup", group["speedup"]) if group else "" for group in found)]
        )
    return _table(["method", *names], rows)


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


def _errors(methods: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        [f"`{method['method']}`", kind, str(count)] for method in methods for kind, count in method["errors"].items()
    ]
    if not rows:
        return []
    return [
        "## Errors",
        "Questions without an answer; each is a row of errors.jsonl.",
        _table(["method", "kind", "questions"], rows),
    ]


def _environment(about: Mapping[str, Any]) -> list[str]:
    lines = [f"- {key.replace('_', ' ')}: {about[key]}" for key in (*ABOUT, *VERSIONS) if about.get(key) is not None]
    return ["## Environment", "\n".join(lines)] if lines else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
