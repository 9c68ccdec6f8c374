"""The record of `python -m eval serve` as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from eval.figures import table
from eval.serve_load import goodput, limits_of, parse_goals

Cell = dict[str, Any]
SHOWN = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "p50_e2el_ms", "p99_e2el_ms")


def summarise(cells: Sequence[Cell], objectives: Sequence[str]) -> dict[str, Any]:
    """Figures of every load with its goodput, and every policy compared with the first one over all rates.

    Args:
        cells: a row per load: policy, rate, burstiness, figures, requests. Loads of an infinite rate are left out.
        objectives: of goodput; multiples are of the first policy at the lowest rate.
    """
    loads = sorted([cell for cell in cells if cell["rate"] is not None], key=lambda c: (-c["burstiness"], c["rate"]))
    if not loads:
        return {"limits": {}, "loads": [], "policies": []}
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    base = policies[0]
    reference = min((c for c in loads if c["policy"] == base), key=lambda c: c["rate"], default=loads[0])
    limits = limits_of(parse_goals(objectives), reference["figures"])
    rows = []
    for cell in loads:
        figures = cell["figures"]
        good = goodput(cell["requests"], figures["duration"], limits)
        rows.append(
            {**{name: cell[name] for name in ("policy", "rate", "burstiness")}, "request_goodput": good, **figures}
        )
    rows.sort(key=lambda row: (-row["burstiness"], row["rate"], policies.index(row["policy"])))
    return {"limits": limits, "loads": rows, "policies": [_compared(name, base, rows) for name in policies]}


def _compared(name: str, base: str, rows: Sequence[Cell]) -> Cell:
    """A policy over all loads that the base served, too."""
    by_load = {(r["burstiness"], r["rate"]): r for r in rows if r["policy"] == base}
    pairs = [(r, by_load[at]) for r in rows if r["policy"] == name and (at := (r["burstiness"], r["rate"])) in by_load]
    lowest = min((own["rate"] for own, _ in pairs), default=0.0)
    good = [_ratio(own["request_goodput"], of["request_goodput"]) for own, of in pairs]
    tpot = [_ratio(own["p50_tpot_ms"], of["p50_tpot_ms"]) for own, of in pairs if own["rate"] == lowest]
    return {
        "policy": name,
        "mean_request_goodput": fmean(own["request_goodput"] for own, _ in pairs) if pairs else None,
        "lowest_goodput_over_base": min((one for one in good if one is not None), default=None),
        "tpot_over_base_at_lowest_rate": max((one for one in tpot if one is not None), default=None),
        "failed": sum(own["failed"] for own, _ in pairs),
    }


def _ratio(own: float | None, of: float | None) -> float | None:
    """None where there is nothing to compare with."""
    return own / of if own is not None and of else None


def render(record: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    return "\n\n".join(_parts(record)) + "\n"


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    summary, config = record["summary"], record["config"]
    limits = ", ".join(f"{name.upper()} {most:.4g} ms" for name, most in summary["limits"].items()) or "none"
    yield f"{record['title']}; {config['num_requests']} requests per load; objectives of goodput: {limits}"
    if not summary["loads"]:
        yield "no load was measured yet"
        return
    columns = ["policy", "requests/s", "goodput", "output tokens/s", *(_name(one) for one in SHOWN), "failed"]
    for burstiness in dict.fromkeys(row["burstiness"] for row in summary["loads"]):
        kind = "Poisson" if burstiness == 1 else f"bursty (coefficient of variation {burstiness**-0.5:.3g})"
        rows = [row for row in summary["loads"] if row["burstiness"] == burstiness]
        body = [
            [r["policy"], f"{r['rate']:.3g}", f"{r['request_goodput']:.3g}", f"{r['output_throughput']:.4g}"]
            + [_shown(r[one]) for one in SHOWN]
            + [str(r["failed"])]
            for r in rows
        ]
        yield f"{kind} arrivals; times in ms\n\n{table(columns, body)}"
    base = summary["policies"][0]["policy"]
    columns = [
        "policy",
        "mean goodput",
        f"lowest goodput over {base}",
        f"TPOT over {base} at the lowest rate",
        "failed",
    ]
    names = ("mean_request_goodput", "lowest_goodput_over_base", "tpot_over_base_at_lowest_rate")
    body = [[p["policy"], *(_shown(p[one], 3) for one in names), str(p["failed"])] for p in summary["policies"]]
    yield f"over all rates\n\n{table(columns, body)}"


def _name(figure: str) -> str:
    percentile, name, _ = figure.split("_")
    return f"{name.upper()} {percentile}"


def _shown(value: float | None, digits: int = 4) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"
