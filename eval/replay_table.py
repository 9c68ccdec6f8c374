"""The record of a comparison by replay as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from eval.compare import BY_EXIT, CLAIRVOYANT, STOPPED
from eval.config import MEASURED, STORED
from eval.sources import CHAIN
from eval.table import table


def render(record: dict[str, Any]) -> str:
    """Per length: every policy by task at the first head cost; its mean over tasks, and what that is of the bounds."""
    return "\n\n".join(_parts(record))


def _parts(record: dict[str, Any]) -> Iterator[str]:
    config = record["config"]
    picked = "greedy" if config["temperature"] == 0 else f"sampled at temperature {config['temperature']:g}"
    for task in record["tasks"]:
        name = (task["model"] or {}).get("model", "traces from a file")
        tokens = f"{task['num_prompts']} prompts, {task['num_tokens']} tokens"
        start = ", from the statistics stored with it" if task["has_prior"] and config["prior"] == STORED else ""
        renumbered = "" if config["renumbered"] == "no" else f", every token replaced by a {config['renumbered']} one"
        yield f"{task['name']}: {name}, {task['num_layers']} layers, {tokens}, {picked}{start}{renumbered}"
    for length in config["lengths"]:
        sections = [section for section in record["sections"] if section["length"] == length]
        first, several = sections[0], len(config["starts"]) > 1
        head = _head(first)
        yield f"{length} tokens, head: {head}; speedup over plain decoding in replay\n\n{_by_task(first, several)}"
        if len(sections) > 1:
            yield f"{length} tokens: mean over tasks by what the head costs, in layers\n\n{_by_head(sections, several)}"
        if config["renumbered"] != "no":
            yield from _of_chain(length, sections, several)
        beside = f"the mean beside that of the {STOPPED}, of the {BY_EXIT} and of the {CLAIRVOYANT}"
        yield f"{length} tokens: {beside}; by what the head costs, in layers\n\n{_of_bounds(sections, several)}"


def _by_task(section: dict[str, Any], several: bool) -> str:
    rows = section["rows"]
    names = list(rows[0]["speedup"])
    figures = [[*(row["speedup"][name] for name in names), row["mean"]] for row in rows]
    body = [[_name(row, several), *(f"{x:.3f}" for x in line)] for row, line in zip(rows, figures, strict=True)]
    return table(["", *names, "mean"], body)


def _by_head(sections: Sequence[dict[str, Any]], several: bool) -> str:
    body = [
        [_name(same[0], several), *(f"{row['mean']:.3f}" for row in same)]
        for same in zip(*(section["rows"] for section in sections), strict=True)
    ]
    return table(["", *map(_head, sections)], body)


def _of_bounds(sections: Sequence[dict[str, Any]], several: bool) -> str:
    means = [{row["name"]: row["mean"] for row in section["rows"] if row["kind"] == "bound"} for section in sections]
    body = [
        [_name(same[0], several), *(_shares(row, of) for row, of in zip(same, means, strict=True))]
        for same in zip(*(section["rows"] for section in sections), strict=True)
        if same[0]["kind"] == "policy"
    ]
    return table(["of", *map(_head, sections)], body)


def _of_chain(length: int, sections: Sequence[dict[str, Any]], several: bool) -> Iterator[str]:
    """What other sources cost where they find nothing."""
    lines: dict[str, list[str]] = {}
    for section in sections:
        chains = {row["start"]: row["tasks"] for row in section["rows"] if row["name"] == CHAIN}
        for row in section["rows"]:
            if row["start"] in chains and row["name"] != CHAIN:
                lines.setdefault(_name(row, several), []).append(_of(chains[row["start"]], row["tasks"]))
    if lines:
        told = f"speed beside {CHAIN}, in the mean over tasks, and the least of any prompt"
        yield f"{length} tokens: {told}; by what the head costs, in layers\n\n" + table(
            ["of", *map(_head, sections)], [[name, *cells] for name, cells in lines.items()]
        )


def _of(chain: dict[str, Any], other: dict[str, Any]) -> str:
    mean = fmean(chain[task]["seconds"] / other[task]["seconds"] for task in chain)
    pairs = [zip(chain[task]["seconds_by_prompt"], other[task]["seconds_by_prompt"], strict=True) for task in chain]
    return f"{mean:.3f}, {min(a / b for each in pairs for a, b in each):.3f}"


def _shares(row: dict[str, Any], bounds: dict[str, float]) -> str:
    return ", ".join(f"{row['mean'] / bounds[name]:.3f}" for name in (STOPPED, BY_EXIT, CLAIRVOYANT))


def _head(section: dict[str, Any]) -> str:
    layers = section["head_layers"]
    return MEASURED if layers == MEASURED else f"{layers:g}"


def _name(row: dict[str, Any], several: bool) -> str:
    return f"{row['name']}, {row['start']}" if several and row["start"] else str(row["name"])
