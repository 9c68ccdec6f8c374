"""Policies under load: requests arrive at a server, from idle to saturation: `python -m eval serve`.

Every policy gets the same prompts, output lengths and arrival times. The rates are shares of the requests per second
that the first policy completes when all arrive at once. Loads are interleaved: at each rate, every policy in turn, by a
server of its own. `--server URL` measures a server that runs already, of any engine. The folder has a line per load,
and a run that was stopped is resumed by the same command. Tables go to standard output, progress to standard error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from eval import measurement
from eval.config import Common, config_of, parser_of
from eval.questions import is_file
from eval.records import write_file
from eval.replay import parse_policy
from eval.serve_client import Live
from eval.serve_load import arrival_times, as_rows, figures_of, parse_goals
from eval.serve_report import render, summarise
from eval.session import Resumable
from train.configuration import check, check_least, flags_given, option


@dataclass(frozen=True, slots=True)
class ServeConfig(Common):
    """The configuration of `python -m eval serve`."""

    model: str = option("smollm2", "Model that the servers open.")
    command: str = option(
        "{python} -m selfspec serve {model} --host 127.0.0.1 --port {port} {speculation}",
        "Command line of a server; the words in braces are filled in, {speculation} by the flags of the policy.",
    )
    server: str = option("", "URL of a running OpenAI-compatible server, instead of starting any.")
    api_key_variable: str = option("OPENAI_API_KEY", "Environment variable with the API key, if there is one.")
    chat: bool = option(False, "Send the questions as chats, not as completions.")
    policies: tuple[str, ...] = option(
        ("plain", "fixed", "synergy", "smartspec", "dsde", "adaptive"),
        "Policies to compare; ratios are over the first. With --server, one name for it.",
    )
    questions: str = option("", "Question file or set, whose first turns are prompts; empty: random.", is_file=is_file)
    questions_path: str = option("", "File of a named set; named sets are not part of the repository.", is_file=is_file)
    num_requests: int = option(200, "Requests of every load; prompts repeat where there are fewer.")
    prompt_tokens: tuple[int, ...] = option((64, 512), "Least and most tokens of random prompts.")
    vocab_size: int = option(1000, "Random token ids are below this number.")
    output_tokens: tuple[int, ...] = option((32, 128), "Least and most tokens per output.")
    rates: tuple[float, ...] = option((), "Requests per second; empty: the shares of `loads`.")
    loads: tuple[float, ...] = option(
        (0.02, 0.25, 0.5, 0.75, 0.9, 1.1), "Rates as shares of what the first policy completes when all arrive at once."
    )
    burstiness: tuple[float, ...] = option(
        (1.0, 0.25), "Shapes of the Gamma distribution of gaps: 1 is Poisson; 0.25 has a coefficient of variation of 2."
    )
    goodput: tuple[str, ...] = option(
        ("ttft:500", "tpot:2x"),
        "Objectives of a request: most ms of its ttft, tpot or e2el, or times the first policy's median when idle.",
    )
    seed: int = option(0, "Seed of prompts, lengths and arrivals.")
    warmups: int = option(4, "Requests before every load, one at a time, that are not counted.")
    time_limit: float = option(600.0, "Seconds of a request, after which it counts as failed.")
    start_limit: float = option(300.0, "Seconds in which a server must be ready.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "num_requests", "vocab_size")
        check_least(self, 0, "seed", "warmups")
        for name in ("prompt_tokens", "output_tokens"):
            least = getattr(self, name)
            fits = len(least) == 2 and 1 <= least[0] <= least[1]
            check(fits, name, "two numbers, the least and the most", list(least))
        for name in ("rates", "loads", "burstiness", "policies"):
            values = getattr(self, name)
            fits = len(set(values)) == len(values) and (bool(values) or name == "rates")
            check(fits, name, "different values, at least one", list(values))
        for name in ("rates", "loads", "burstiness"):
            values = getattr(self, name)
            check(all(0 < v < inf for v in values), name, "numbers above 0", list(values))
        check(self.time_limit > 0 and self.start_limit > 0, "time_limit and start_limit", "above 0", self.time_limit)
        parse_goals(self.goodput)
        if self.server:
            check(len(self.policies) == 1, "policies", "one name for the running server", list(self.policies))
            return
        for name in self.policies:
            parse_policy(name)


class Session(Resumable[ServeConfig]):
    """A run folder, and the loads that it does not hold yet.

    Raises:
        ValueError: the folder holds a run of another configuration, or a file, model or server cannot be used.
    """

    may_change = ("output", "goodput", "policies", "rates", "loads", "burstiness")
    file = "loads.jsonl"

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config, config.output)
        self.source = Live(config, self.folder)

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
        found = next((cell for cell in self.lines if about.items() <= cell.items()), None)
        if found is not None:
            return found
        config = self.config
        arrivals = arrival_times(config.num_requests, rate or inf, burstiness, config.seed)
        served = self.source.serve(policy, arrivals)
        figures = figures_of(served)
        cell = {**about, "figures": measurement.rounded(figures), "requests": as_rows(served)}
        self.keep(cell)
        at = "all at once" if rate is None else f"{rate:g} requests/s, burstiness {burstiness:g}"
        speed = f"{figures['output_throughput']:.4g} tokens/s, {figures['failed']} failed"
        self.say(f"{policy}, {at}: {speed}")
        return cell

    def finish(self) -> str:
        """Write record and tables of the loads so far; returns the tables."""
        config = self.config
        cells = [cell for cell in self.lines if cell["policy"] in config.policies]
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
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code.

    Raises:
        ValueError, OSError: an option, file, model or server cannot be used.
    """
    options = parser_of("serve", ServeConfig, __doc__).parse_args(arguments)
    config = config_of(ServeConfig, options.config, flags_given(options))
    return Session(config).complete()
