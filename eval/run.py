"""Decode a question file with several methods, question by question in turn, and write everything into a folder.

The report goes to standard output, progress to standard error. Exit codes: 0; 1 (the disk was full: run the same
command again to resume); 2 (invalid input, explained in one sentence); 130 (Ctrl-C: the report covers the answers so
far, and the same command resumes the run). A finished run's report is written again, over another `baseline` or with
other `metrics`, where these are given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import measurement
from eval.answers import Method, Skipped
from eval.asking import Progress, Shared, ask_all, warm_up
from eval.config import AUTO, RunConfig, as_record, config_of, parser_of
from eval.decoders import LlamaCpp, Ours, Transformers
from eval.methods import LLAMA_CPP, parse_method
from eval.models import open_llm
from eval.questions import encoded, fingerprint, read_questions
from eval.records import RunFolder, read_object, write_file
from eval.report import publish
from eval.session import complete
from eval.summary import compare_outputs, fastest_plain, summarise
from selfspec.control.registry import NEEDS_COSTS
from train.configuration import flags_given

TEMPLATE_TOKENS = 64  # upper bound of the tokens that a chat template adds to a turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code."""
    options = parser_of("run", RunConfig, __doc__).parse_args(arguments)
    config = config_of(RunConfig, options.config, flags_given(options))
    with contextlib.closing(Session(config)) as session:
        return complete(session, config.output)


class Session:
    """One session with a run folder: its questions, its model and its methods.

    Raises:
        ValueError: a question file, model or folder cannot be used, or the model does not support a method.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.questions = read_questions(
            config.questions,
            config.num_questions,
            path=config.questions_path,
            columns=config.columns,
            per_category=config.per_category,
        )
        record = {**as_record(config), "questions_sha256": fingerprint(self.questions)}
        self.folder = RunFolder(Path(config.output), record, config.methods)
        self.methods: list[Method] = []
        self.skipped: dict[str, str] = {}  # methods that cannot run here, and why
        errors = [name for name, _ in self.folder.errors]
        done = {name: len(self.folder.answers[name]) + errors.count(name) for name in config.methods}
        self.progress = Progress(config.methods, len(self.questions), done)
        self.is_complete = all(number >= len(self.questions) for number in done.values())
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        config = self.config
        self.progress.say(f"opening {config.model}")
        self.llm = open_llm(config.model, config)
        if self.llm.tokenizer is None:
            raise ValueError("the model has no tokenizer, and questions are text; put one into the model's folder")
        limit = self.llm.target.split.context_limit
        self.shared = Shared(self.llm.tokenizer, limit, config.max_new_tokens, config.seed)
        now = measurement.environment(self.llm, config.model)
        self.environment = read_object(self.folder.path / "environment.json") or now
        if self.is_complete:
            return
        if self.environment is not now:
            self.environment["resumed"] = [*self.environment.get("resumed", []), now]
        elif now["dirty"]:
            write_file(self.folder.path / "dirty.diff", measurement.difference())
        if any(parse_method(name).kind in NEEDS_COSTS for name in config.methods):
            self.progress.say("costs: taken from the user's cache, or measured for a few seconds where it has none")
            now["costs"] = self.llm.target.costs(1).as_dict()
        write_file(self.folder.path / "environment.json", json.dumps(self.environment, indent=1) + "\n")
        for name in config.methods:
            try:
                self.methods.append(self._make_method(name))
            except Skipped as problem:
                self.skipped[name] = str(problem)
                self.progress.say(f"skipped: {problem}")

    def _make_method(self, name: str) -> Method:
        """A method of the run; all share the model's weights."""
        config, method = self.config, parse_method(name)
        eos = frozenset[int]() if config.ignore_eos else self.llm.target.eos_token_ids
        limits = config.temperature, config.time_limit
        if method.kind == LLAMA_CPP:
            return LlamaCpp(config.model, method, self._longest_context(), eos, *limits)
        if method.is_ours:
            return Ours(self.llm, method, eos, *limits, config.reuse_responses)
        return Transformers(self.llm, method, eos, *limits)

    def _longest_context(self) -> int:
        """Upper bound of the tokens of a question with its answers."""
        more = self.config.max_new_tokens + TEMPLATE_TOKENS
        tokens = (sum(len(encoded(self.shared.tokenizer, t)) + more for t in q.turns) for q in self.questions)
        return min(self.shared.context_limit, max(tokens))

    def run(self) -> None:
        """Ask the questions that the folder has no row for yet."""
        if not self.is_complete:
            self.progress.say("warming up")
            warm_up(self.methods, self.questions[0], self.shared, self.config.warmups)
            self.progress.begin()
            ask_all(self.methods, self.questions, self.shared, self.folder, self.progress)

    def finish(self) -> str:
        """Write summary and report of the answers so far; returns the report's text."""
        config, is_auto, is_greedy = self.config, self.config.baseline == AUTO, self.config.temperature == 0
        names = [name for name in config.methods if name not in self.skipped]
        order = [question.question_id for question in self.questions]
        rows = {name: self.folder.answers[name] for name in names}
        answers = {name: {key: of[key] for key in order if key in of} for name, of in rows.items()}
        summary = summarise(
            answers,
            self.folder.errors.values(),
            fastest_plain(answers) if is_auto else config.baseline,
            num_questions=len(self.questions),
            resamples=config.resamples,
            seed=config.seed,
        )
        if config.check:  # sampled output of other engines has the same distribution, but other tokens
            compared = [name for name in names if is_greedy or parse_method(name).is_ours]
            llm = self.llm if is_greedy else None
            summary["check"] = compare_outputs(answers, compared, self.questions, self.shared, llm)
        more: dict[str, Any] = {"is_auto": is_auto, "metrics": list(config.metrics), "skipped": self.skipped}
        return publish(self.folder.path, {"check": None, **summary, **more, "environment": self.environment})

    def close(self) -> None:
        for method in self.methods:
            method.close()
        self.folder.close()
