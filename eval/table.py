"""The record of a benchmark as Markdown tables, aligned for reading in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

WORDS = ("", "method", "figure", "of")  # columns that hold no numbers


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of words are flush left, numbers are flush right."""
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    words = [column in WORDS for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if left else c.rjust(w) for c, w, left in zip(cells, widths, words, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, words, strict=True)]
    return "\n".join([line(columns), line(rule), *map(line, rows)])


def render(record: dict[str, Any]) -> str:
    """All tables of a benchmark's record, with a line that says what each shows."""
    return "\n\n".join(_parts(record))


def _parts(record: dict[str, Any]) -> Iterator[str]:
    env, config, prompts = record["environment"], record["config"], record["prompts"]
    machine = f"{env.get('gpu') or env['cpu']}, {env['threads']} threads on {env['cpu_cores']} cores"
    yield (
        f"{env['model']}: {env['architecture']}, {env['num_layers']} layers, "
        f"{env['num_parameters'] / 1e6:.1f} M parameters, {env['dtype']}\n{machine}, "
        f"load average {env['load_average']} to {env['load_average_at_end']}; torch {env['torch']}, "
        f"transformers {env['transformers']} ({env['attention_of_transformers']})\n{prompts['count']} prompts of "
        f"{prompts['shortest']} to {prompts['longest']} tokens, {config['max_new_tokens']} new tokens each, greedy"
    )
    coarse = f"Coarse pass, {config['coarse_questions']} prompts once: tokens/s (tokens per round), * goes on"
    yield f"{coarse}\n\n{_grid(record['coarse'])}"
    yield f"Batch 1, {config['repeats']} interleaved repeats\n\n{_methods(record['comparison'])}"
    yield f"A ragged batch, {config['batch_repeats']} interleaved repeats\n\n{_methods(record['batch'])}"
    yield f"Share of a round's time by stage\n\n{_attribution(record['attribution'])}"
    yield f"Figures; a ratio is of speeds, paired within each repeat\n\n{_figures(record['figures'])}"


def _grid(rows: Sequence[dict[str, Any]]) -> str:
    fixed = [row for row in rows if row["family"] == "fixed"]
    exits = sorted({row["settings"]["exit_layer"] for row in fixed})
    lengths = sorted({row["settings"]["num_draft_tokens"] for row in fixed})
    cells = {(row["settings"]["exit_layer"], row["settings"]["num_draft_tokens"]): _cell(row) for row in fixed}
    body = [[f"fixed, E = {e}", *(cells[e, d] for d in lengths)] for e in exits]
    others = [[row["method"], _cell(row)] for row in rows if row["family"] != "fixed"]
    return f"{table(['', *(f'D = {d}' for d in lengths)], body)}\n\n{table(['method', 'tokens/s'], others)}"


def _cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    stats = row["stats"]
    length = f" ({stats['mean_acceptance_length']:.2f})" if stats and stats["num_spec_steps"] else ""
    return f"{row['tokens_per_second']:.1f}{length}{' *' if row['goes_on'] else ''}"


def _methods(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["method", "tokens/s", "min..max of repeats", "tokens per round", "differing prompts"]
    return table(columns, [_method(row) for row in rows])


def _method(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["method"], "failed", "", "", ""]
    by_repeat, stats = row["tokens_per_second_by_repeat"], row["stats"]
    length = f"{stats['mean_acceptance_length']:.2f}" if stats else ""
    around = f"{by_repeat['low']:.1f}..{by_repeat['high']:.1f}"
    return [row["method"], f"{row['tokens_per_second']:.1f}", around, length, str(row["differing_prompts"])]


def _attribution(rows: Sequence[dict[str, Any]]) -> str:
    stages = list(rows[0]["shares"])
    columns = ["method", "rounds", "ms per round", *stages, "pick + rest", "outside forward"]
    body = [
        [
            row["method"],
            str(row["num_rounds"]),
            f"{row['milliseconds_per_round']['median']:.2f}",
            *(f"{row['shares'][stage]['median']:.1%}" for stage in stages),
            f"{row['pick_and_rest_share']['median']:.1%}",
            f"{row['outside_forward_share_of_call']['median']:.1%}",
        ]
        for row in rows
    ]
    return table(columns, body)


def _figures(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        of = f"{row['of']} / {row['over']}" if row.get("over") else row["of"]
        around = f"{row['low']:.3f}..{row['high']:.3f}" if "low" in row else ""
        value = f"{row['median']:.3f}" if isinstance(row["median"], float) else str(row["median"])
        body.append([row["figure"], value, around, of])
    return table(["figure", "median", "min..max", "of"], body)
