"""Decode a question file with several methods, question by question in turn, and write everything into a folder.

The report goes to standard output, progress to standard error. Exit codes: 0; 1 (the disk was full: run the same
command again to go on); 2 (something asked for is not possible, in one sentence); 130 (Ctrl-C; the report of what was
answered so far is there, and the same command goes on).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import environment
from eval.answers import Method, Skipped
from eval.asking import Progress, Shared, ask_all, warm_up
from eval.config import add_flags, flags_given
from eval.external import External
from eval.llama_cpp import LlamaCpp
from eval.methods import LLAMA_CPP, file_name, parse_method
from eval.models import Endless, measured_costs, open_target
from eval.ours import Ours
from eval.peers import Transformers
from eval.questions import encoded, fingerprint, read_questions
from eval.records import RunFolder, read_object, write_file
from eval.report import publish
from eval.run_config import AUTO, RUN, RunConfig, as_record, read_run_config
from eval.studies import make_studies
from eval.summary import compare_outputs, fastest_plain, summarise
from selfspec.control.costs import Costs
from selfspec.control.registry import NEEDS_COSTS

COST_SECONDS = 10.0  # no further repeat of a measurement of costs begins after these
TEMPLATE_TOKENS = 64  # at most, that a chat template adds to a turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", nargs="?", default=str(RUN), help="YAML file with the keys below; default: %(default)s"
    )
    add_flags(parser, RunConfig)
    options = parser.parse_args(arguments)
    config = read_run_config(options.config, flags_given(options, RunConfig))
    session, code = Session(config), 0
    with contextlib.closing(session):
        try:
            session.run()
        except KeyboardInterrupt:
            code = 130
        print(session.finish(), end="")
    print(f"{'stopped; go on with the same command: ' if code else ''}{config.output}", file=sys.stderr)
    return code


class Session:
    """One session at a run folder: everything that is asked, and everyone who answers.

    Raises:
        ValueError: a question file, model or folder that cannot be used, or a method that this model does not allow.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, path = config, Path(config.output)
        self.asked = read_questions(
            config.questions,
            config.num_questions,
            path=config.questions_path,
            columns=config.columns,
            per_category=config.per_category,
        )
        record = {**as_record(config), "questions_sha256": fingerprint(self.asked)}
        self.folder = RunFolder(path, record, config.methods)
        self.methods: list[Method] = []
        self.skipped: dict[str, str] = {}  # methods that cannot run here, and why
        errors = [name for name, _ in self.folder.errors]
        done = {name: len(self.folder.answers[name]) + errors.count(name) for name in config.methods}
        self.progress = Progress(config.methods, len(self.asked), done)
        self.is_asked = all(number >= len(self.asked) for number in done.values())
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        config = self.config
        self.progress.say(f"opening {config.model}")
        self.target = open_target(config.model, config)
        if self.target.tokenizer is None:
            raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
        limit = self.target.stack.context_limit
        self.shared = Shared(self.target.tokenizer, limit, config.max_new_tokens, config.seed)
        now = environment.environment(self.target, config.model)
        self.environment = read_object(self.folder.path / "environment.json") or now
        if self.is_asked:
            return
        if self.environment is not now:
            self.environment["resumed"] = [*self.environment.get("resumed", []), now]
        elif now["dirty"]:
            write_file(self.folder.path / "dirty.diff", environment.difference())
        costs = self._costs()
        if costs is not None:
            now["costs"] = costs.as_dict()  # what this session's policies decide by
        write_file(self.folder.path / "environment.json", json.dumps(self.environment, indent=1) + "\n")
        for name in config.methods:
            try:
                self.methods.append(self._made(name, costs))
            except Skipped as problem:
                self.skipped[name] = str(problem)
                self.progress.say(f"skipped: {problem}")

    def _costs(self) -> Costs | None:
        """Measured for this run or taken from the user's cache; None where no method asks for any."""
        repeats = self.config.cost_repeats
        if not any(parse_method(name).kind in NEEDS_COSTS for name in self.config.methods):
            return None
        if repeats:
            self.progress.say(f"measuring costs of a round's pieces, up to {COST_SECONDS:g} s")
            return measured_costs(self.target, (1,), repeats, COST_SECONDS)
        self.progress.say("costs: taken from the user's cache, or measured for a few seconds where it has none")
        return self.target.costs(1)

    def _made(self, name: str, costs: Costs | None) -> Method:
        """A method of the run, over the model that all share."""
        config, method, tokenizer = self.config, parse_method(name), self.target.tokenizer
        eos = frozenset[int]() if config.ignore_eos else self.target.eos_token_ids
        limits = config.temperature, config.time_limit
        if method.kind == "external":
            command, log = config.externals[method.option], self.folder.path / f"{file_name(name)}.log"
            return External(name, command, tokenizer, log, eos, *limits)
        if method.kind == LLAMA_CPP:
            return LlamaCpp(config.model, method, self._longest_context(), eos, *limits)
        own = Endless(self.target, eos, costs)
        own.prior = None  # a run depends on itself alone
        if method.is_ours:
            return Ours(own, method, *limits, keep_rounds=config.keep_rounds)
        return Transformers(own, tokenizer, method, *limits)

    def _longest_context(self) -> int:
        """Most tokens that a question takes with its answers."""
        more = self.config.max_new_tokens + TEMPLATE_TOKENS
        tokens = (sum(len(encoded(self.shared.tokenizer, t)) + more for t in question.turns) for question in self.asked)
        return min(self.shared.context_limit, max(tokens))

    def run(self) -> None:
        """Ask what is not answered yet, then make the studies that are not there yet."""
        if not self.is_asked:
            self.progress.say("warming up")
            warm_up(self.methods, self.asked[0], self.shared, self.config.warmups)
            self.progress.begin()
            ask_all(self.methods, self.asked, self.shared, self.folder, self.progress)
        make_studies(self.config, self.target, self.asked, self.shared, self.progress.say)

    def finish(self) -> str:
        """Write summary and report of what has been answered so far; the report's text."""
        config, is_auto, is_greedy = self.config, self.config.baseline == AUTO, self.config.temperature == 0
        names = [name for name in config.methods if name not in self.skipped]
        order = [question.question_id for question in self.asked]
        rows = {name: self.folder.answers[name] for name in names}
        answers = {name: {key: of[key] for key in order if key in of} for name, of in rows.items()}
        found = summarise(
            answers,
            self.folder.errors.values(),
            fastest_plain(answers) if is_auto else config.baseline,
            num_questions=len(self.asked),
            resamples=config.resamples,
            seed=config.seed,
        )
        if config.check:  # sampled output of others has the same distribution, but other numbers
            compared = [name for name in names if is_greedy or parse_method(name).is_ours]
            target = self.target if is_greedy else None
            found["check"] = compare_outputs(answers, compared, self.asked, self.shared, target)
        more: dict[str, Any] = {"is_auto": is_auto, "metrics": list(config.metrics), "skipped": self.skipped}
        return publish(self.folder.path, {"check": None, **found, **more, "environment": self.environment})

    def close(self) -> None:
        for method in self.methods:
            method.close()
        self.folder.close()
