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

from eval.config import add_flags, flags_given
from eval.run_config import AUTO, RUN, RunConfig, as_record, read_run_config

COST_SECONDS = 10.0  # no further measurement of costs begins after these


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
    """A run folder with everything that is asked and everyone who answers.

    Raises:
        ValueError: a question file, model or folder that cannot be used, or a method that this model does not allow.
    """

    def __init__(self, config: RunConfig) -> None:
        from eval.questions import fingerprint, read_questions
        from eval.records import RunFolder

        self.config = config
        self.asked = read_questions(
            config.questions, config.num_questions, path=config.questions_path, columns=config.columns
        )
        record = {**as_record(config), "questions_sha256": fingerprint(self.asked)}
        self.folder = RunFolder(Path(config.output), record, config.methods)
        self.methods: list[Any] = []
        self.skipped: dict[str, str] = {}  # methods that cannot run here, and why
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        from eval.asking import Shared
        from eval.models import open_target
        from eval.progress import Progress

        config, errors = self.config, [name for name, _ in self.folder.errors]
        done = {name: len(self.folder.answers[name]) + errors.count(name) for name in config.methods}
        self.progress = Progress(config.methods, len(self.asked), done)
        self.is_asked = all(number >= len(self.asked) for number in done.values())
        self.progress.say(f"opening {config.model}")
        self.target = open_target(config.model, config)
        if self.target.tokenizer is None:
            raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
        self.eos = frozenset[int]() if config.ignore_eos else self.target.eos_token_ids
        limit = self.target.stack.context_limit
        self.shared = Shared(self.target.tokenizer, limit, config.max_new_tokens, config.seed)
        self.environment = self._environment()
        if not self.is_asked:
            self._make_methods()
            self._write_environment()

    def _make_methods(self) -> None:
        from eval.turns import Skipped

        costs = self._costs()
        for name in self.config.methods:
            try:
                self.methods.append(self._made(name, costs))
            except Skipped as problem:
                self.skipped[name] = str(problem)
                self.progress.say(f"skipped: {problem}")

    def _made(self, name: str, costs: Any) -> Any:
        from eval.external import External
        from eval.llama_cpp import LlamaCpp
        from eval.methods import LLAMA_CPP, file_name, parse_method
        from eval.models import Endless
        from eval.ours import Ours
        from eval.peers import Transformers

        config, method = self.config, parse_method(name)
        if method.kind == "external":
            command, log = config.externals[method.option], self.folder.path / f"{file_name(name)}.log"
            limits: dict[str, Any] = {"temperature": config.temperature, "eos": self.eos, "limit": config.time_limit}
            return External(name, command, self.target.tokenizer, log, **limits)
        if method.kind == LLAMA_CPP:
            context = min(self.shared.context_limit, self._longest_prompt() + config.max_new_tokens)
            return LlamaCpp(config.model, method, context, self.eos, config.temperature, config.time_limit)
        own = Endless(self.target, self.eos, costs)
        own.prior = None  # a run depends on itself alone
        if method.is_ours:
            return Ours(own, method, config.temperature, config.time_limit, config.keep_rounds)
        return Transformers(own, self.target.tokenizer, method, config.temperature, config.time_limit)

    def _longest_prompt(self) -> int:
        """Tokens of the longest conversation, answers included but for the last."""
        from eval.questions import encoded

        tokens = [
            sum(len(encoded(self.shared.tokenizer, turn)) + self.config.max_new_tokens + 64 for turn in question.turns)
            for question in self.asked
        ]
        return max(tokens)

    def _costs(self) -> Any:
        """The costs that this session's policies decide by, or None where none of them asks for any."""
        from eval.methods import parse_method
        from eval.models import measured_costs
        from selfspec.control.registry import NEEDS_COSTS

        repeats = self.config.cost_repeats
        if not any(parse_method(name).kind in NEEDS_COSTS for name in self.config.methods):
            return None
        if repeats:
            self.progress.say(f"measuring costs of a round's pieces, up to {COST_SECONDS:g} s")
            costs = measured_costs(self.target, (1,), repeats, COST_SECONDS)
        else:
            self.progress.say("costs: taken from the user's cache, or measured for a few seconds where it has none")
            costs = self.target.costs(1)
        self.environment.get("resumed", [self.environment])[-1]["costs"] = costs.as_dict()
        return costs

    def _environment(self) -> dict[str, Any]:
        """The first session's, with those that resumed it."""
        from eval.environment import difference, driver, environment
        from eval.records import read_object, write_file

        first = read_object(self.folder.path / "environment.json")
        now = {**environment(self.target, self.config.model), **driver(self.target.stack.device)}
        if first:
            return {**first, "resumed": [*first.get("resumed", []), now]}
        if now["dirty"]:
            write_file(self.folder.path / "dirty.diff", difference())
        return now

    def _write_environment(self) -> None:
        from eval.records import write_file

        write_file(self.folder.path / "environment.json", json.dumps(self.environment, indent=1) + "\n")

    def run(self) -> None:
        """Ask what is not answered yet, then make the studies that are not there yet."""
        from eval.asking import ask_all, warm_up
        from eval.studies import make_studies

        if not self.is_asked:
            self.progress.say("warming up")
            warm_up(self.methods, self.asked[0], self.shared, self.config.warmups)
            self.progress.begin()
            ask_all(self.methods, self.asked, self.shared, self.folder, self.progress)
        make_studies(self.config, self.target, self.asked, self.shared, self.progress.say)

    def finish(self) -> str:
        """Write summary and report of what has been answered so far; the report's text."""
        from eval.methods import parse_method
        from eval.outputs import compare_outputs
        from eval.report import publish
        from eval.summarise import fastest_plain, summarise

        config, is_auto = self.config, self.config.baseline == AUTO
        names = [name for name in config.methods if name not in self.skipped]
        rows = {name: self.folder.answers[name] for name in names}
        order = [question.question_id for question in self.asked]
        answers = {name: {key: of[key] for key in order if key in of} for name, of in rows.items()}
        found = summarise(
            answers,
            self.folder.errors.values(),
            fastest_plain(answers) if is_auto else config.baseline,
            num_questions=len(self.asked),
            resamples=config.resamples,
            seed=config.seed,
        )
        is_greedy = config.temperature == 0  # sampled output of others has the same distribution, but other numbers
        compared = [name for name in names if is_greedy or parse_method(name).is_ours]
        target = self.target if is_greedy else None
        found["check"] = compare_outputs(answers, compared, self.asked, self.shared, target) if config.check else None
        found |= {"is_auto": is_auto, "metrics": list(config.metrics), "environment": self.environment}
        return publish(self.folder.path, {**found, "skipped": self.skipped})

    def close(self) -> None:
        for method in self.methods:
            method.close()
        self.folder.close()
