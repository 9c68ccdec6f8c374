"""The configuration of `python -m eval serve`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from eval.config import Common, check, check_least, known, option
from eval.replay import parse_policy
from eval.serve_figures import parse_goals
from eval.serve_synthetic import GPUS

NOT_RECORDED = ("output", "goodput", "policies", "rates", "loads", "burstiness")  # they may change on resuming


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
    questions: str = option("", "Question file or set whose first turns are prompts; empty: random ids.", is_file=True)
    questions_path: str = option("", "File of a named set; named sets are not part of the repository.", is_file=True)
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
    simulate: bool = option(False, "Serve in virtual time.")
    shape: str = option("llama-3-8b", "Simulated model: a shape of eval.synthetic or a config.json.")
    gpu: str = option("h200", f"Simulated device, whose costs are computed: {', '.join(GPUS)}.")
    costs: str = option("", "JSON file with the costs to simulate at, such as `replay --output` writes.", is_file=True)
    acceptance: float = option(0.8, "Mean acceptance at a quarter of the layers of random simulated outputs.")
    traces: str = option("", "File of `replay --record-traces` to simulate instead of random outputs.", is_file=True)
    max_batch_size: int = option(64, "Simulated rows decoded together.")
    max_cached_tokens: int = option(0, "Simulated cached tokens; 0: no limit.")
    exit_layer: int = option(0, "Exit layer of simulated policies that do not choose it; 0: a quarter of the layers.")
    num_draft_tokens: int = option(0, "Draft length of such policies; 0: 4.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "num_requests", "vocab_size", "max_batch_size")
        check_least(self, 0, "seed", "warmups", "max_cached_tokens", "exit_layer", "num_draft_tokens")
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
        check(0 < self.acceptance < 1, "acceptance", "above 0 and below 1", self.acceptance)
        check(self.time_limit > 0 and self.start_limit > 0, "time_limit and start_limit", "above 0", self.time_limit)
        known("gpu", self.gpu, GPUS)
        parse_goals(self.goodput)
        if self.server:
            check(not self.simulate, "server", "left out where simulate is on", self.server)
            check(len(self.policies) == 1, "policies", "one name for the running server", list(self.policies))
            return
        for name in self.policies:
            parse_policy(name)
