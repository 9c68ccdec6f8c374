"""Policies under load: requests arrive at a server, from idle to saturation: `python -m eval serve`.

Every policy gets the same prompts, output lengths and arrival times. The rates are shares of the requests per second
that the first policy completes when all arrive at once. Loads are interleaved: at each rate, every policy in turn, by a
server of its own. `--server URL` measures a server that runs already, of any engine; `--simulate` serves in virtual
time, at the costs of a GPU or of a file, without a model. The folder has a line per load, and a run that was stopped is
resumed by the same command. Tables go to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from eval import measurement
from eval.config import FOLDER, add_flags, check, flags_given, read_config
from eval.figures import check_plots
from eval.records import append_line, read_lines, write_file
from eval.serve_config import NOT_RECORDED, ServeConfig
from eval.serve_figures import as_rows, figures_of
from eval.serve_live import Live
from eval.serve_load import arrival_times
from eval.serve_report import plot, render, summarise
from eval.serve_simulate import Simulated


class Session:
    """A run folder, and the loads that it does not hold yet.

    Raises:
        ValueError: the folder holds a run of another configuration, or a file, model or server cannot be used.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.folder, self._start = config, Path(config.output), perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.cells = read_lines(self.folder / "loads.jsonl", repair=True)
        self.source: Live | Simulated = Simulated(config) if config.simulate else Live(config, self.folder)

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self._start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def _claim(self) -> None:
        values = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in NOT_RECORDED}
        record, file = json.loads(json.dumps(values)), self.folder / "config.yaml"
        old = yaml.safe_load(file.read_text("utf-8")) if file.exists() else record
        differ = [key for key in {**old, **record} if old.get(key) != record.get(key)]
        check(not differ, "output", f"a folder of a run with the same {', '.join(differ)}", str(self.folder))
        write_file(file, yaml.safe_dump(record, sort_keys=False))

    def run(self) -> None:
        """Serve all loads; those of a rate by every policy in turn."""
        config = self.config
        rates = config.rates or self._shares()
        for burstiness in config.burstiness:
            for rate in rates:
                for policy in config.policies:
                    self._load(policy, rate, burstiness)

    def _shares(self) -> list[float]:
        """Rates as shares of what the first policy completes per second when all requests arrive at once."""
        most = self._load(self.config.policies[0], None, 1.0)["figures"]["request_throughput"]
        check(most > 0, "the first policy", "able to complete requests", self.config.policies[0])
        return [float(f"{share * most:.3g}") for share in self.config.loads]

    def _load(self, policy: str, rate: float | None, burstiness: float) -> dict[str, Any]:
        """A load's row, from the folder or served now; a rate of None: all requests arrive at once."""
        about = {"policy": policy, "rate": rate, "burstiness": burstiness}
        found = next((cell for cell in self.cells if about.items() <= cell.items()), None)
        if found is not None:
            return found
        config = self.config
        arrivals = arrival_times(config.num_requests, rate or inf, burstiness, config.seed)
        served = self.source.serve(policy, arrivals)
        figures = figures_of(served)
        cell = {**about, "figures": measurement.rounded(figures), "requests": as_rows(served)}
        append_line(self.folder / "loads.jsonl", cell)
        self.cells.append(cell)
        at = "all at once" if rate is None else f"{rate:g} requests/s, burstiness {burstiness:g}"
        speed = f"{figures['output_throughput']:.4g} tokens/s, {figures['failed']} failed"
        self.say(f"{policy}, {at}: {speed}")
        return cell

    def finish(self) -> str:
        """Write record, tables and figure of the loads so far; returns the tables."""
        config = self.config
        cells = [cell for cell in self.cells if cell["policy"] in config.policies]
        cells.sort(key=lambda cell: config.policies.index(cell["policy"]))
        summary = summarise(cells, config.goodput)
        record = {
            "benchmark": "serve",
            "title": self.source.title,
            "environment": measurement.machine(),
            "config": dataclasses.asdict(config),
            "summary": summary,
        }
        text = render(record)
        write_file(self.folder / "serve.json", json.dumps(measurement.rounded(record)) + "\n")
        write_file(self.folder / "serve.md", text)
        if summary["loads"]:
            plot(summary, self.folder / "serve.svg")
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code.

    Raises:
        ValueError, OSError: an option, file, model or server cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m eval serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = str(FOLDER / "serve.yaml")
    parser.add_argument(
        "config", nargs="?", default=default, help="YAML file with the keys below; default: %(default)s"
    )
    add_flags(parser, ServeConfig)
    options = parser.parse_args(arguments)
    config = read_config(ServeConfig, options.config, flags_given(options, ServeConfig))
    config = dataclasses.replace(config, output=config.output or str(Path("runs") / Path(options.config).stem))
    check_plots()
    session, code = Session(config), 0
    try:
        session.run()
    except KeyboardInterrupt:
        code = 130
    print(session.finish(), end="")
    print(f"{'stopped; run the same command to resume: ' if code else ''}{config.output}", file=sys.stderr)
    return code
