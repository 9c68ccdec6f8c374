"""One session at a run: load, go on from what is there, compare, and write down what it comes to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from eval import environment
from eval.questions import Question
from eval.run import check, publish, questions, records, summary
from eval.run.config import AUTO, STUDY_SIZES, RunConfig, as_record
from eval.run.external import External
from eval.run.lines import replace_text
from eval.run.loop import Scene, run, warm_up
from eval.run.names import file_name, parse_method
from eval.run.ours import Bare, Ours
from eval.run.peers import Transformers
from eval.run.progress import Progress
from eval.run.studies.material import material
from eval.run.studies.runner import missing, run_studies
from eval.run.turns import Method
from eval.timing import Say
from selfspec.control.costs import Costs
from selfspec.control.registry import NEEDS_COSTS
from selfspec.legacy import opened as load


class Session:
    """A run folder with everything that is asked and everyone who answers.

    Raises:
        ValueError: a question file, model or folder that cannot be used, or a method that this model does not allow.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.asked = questions.read(config.questions, config.questions_path, config.columns, config.num_questions)
        record = {**as_record(config), "questions_sha256": questions.fingerprint(self.asked)}
        self.folder = records.RunFolder(Path(config.output), record, config.methods, config.keep_rounds)
        self.methods: list[Method] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        logging.set_verbosity_error()  # transformers remarks upon its own assisted calls
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.target = load(self.config.model, device=self.config.device or None, dtype=self.config.dtype)
        if self.target.tokenizer is None:
            raise ValueError("the model has no tokenizer, and questions are text; put one beside the model")
        limit = self.target.stack.context_limit
        self.scene = Scene(self.target.tokenizer, limit, self.config.max_new_tokens, self.config.seed)
        self.bare = Bare(self.target, self._eos(), self.config.cost_repeats)
        self.methods = make_methods(self.config, self.bare, self.target.tokenizer, self.folder.path)
        self.environment = self._environment()
        self._write_environment()

    def _eos(self) -> frozenset[int]:
        return frozenset() if self.config.ignore_eos else self.target.eos_token_ids

    def _environment(self) -> dict[str, Any]:
        """The first session's, with those that resumed it."""
        path = self.folder.path / "environment.json"
        now = {**environment.environment(self.target, self.config.model), **_driver(self.target.stack.device)}
        if path.exists():
            first = json.loads(path.read_text("utf-8"))
            now = {**first, "resumed": [*first.get("resumed", []), now]}
        elif now["dirty"]:
            replace_text(self.folder.path / "dirty.diff", _diff())
        return now

    def _write_environment(self) -> None:
        replace_text(self.folder.path / "environment.json", json.dumps(self.environment, indent=1) + "\n")

    def _costs(self, say: Say) -> Costs:
        """Measured at the first call; what this session's policies decide by belongs to its environment."""
        session = self.environment.get("resumed", [self.environment])[-1]
        if "costs" not in session:
            say("measuring costs")
            session["costs"] = self.bare.costs().as_dict()
            self._write_environment()
        return self.bare.costs()

    def run(self) -> None:
        """Ask what is not answered yet, then make the studies that are not there yet."""
        names, folder = self.config.methods, self.folder
        failed = [name for name, _ in folder.errors]
        done = {name: len(folder.answers[name]) + failed.count(name) for name in names}
        with Progress(names, len(self.asked), done) as progress:
            if any(number < len(self.asked) for number in done.values()):
                if any(parse_method(name).kind in NEEDS_COSTS for name in names):
                    self._costs(progress.say)
                progress.say("warming up")
                warm_up(self.methods, self.asked[0], self.scene, self.config.warmups)
                progress.begin()
                run(self.methods, self.asked, self.scene, folder, progress)
            self._study(progress.say)

    def _study(self, say: Say) -> None:
        sizes = {key: getattr(self.config, key) for key in STUDY_SIZES}
        names = missing(self.folder.path, self.config.studies, sizes)
        costs = partial(self._costs, say)
        opened = partial(material, self.target, self.asked, self.scene, self.config, costs, say)
        run_studies(self.folder.path, names, sizes, opened, say)

    def finish(self) -> str:
        """Write summary and report of what has been answered so far; the report's text."""
        answers, names = self.folder.answers, self.config.methods
        answers = {name: _in_order(answers[name], self.asked) for name in names}
        is_auto = self.config.baseline == AUTO
        base = summary.fastest_plain(answers) if is_auto else self.config.baseline
        found = summary.summarise(
            answers,
            self.folder.errors.values(),
            base,
            num_questions=len(self.asked),
            resamples=self.config.resamples,
            seed=self.config.seed,
        )
        found["check"] = self._compared(answers) if self.config.check else None
        found.update(is_auto=is_auto, metrics=list(self.config.metrics), environment=self.environment)
        return publish.write(self.folder.path, found)

    def _compared(self, answers: dict[str, Any]) -> list[dict[str, Any]]:
        greedy = self.config.temperature == 0
        # Sampled output of others follows the same distribution, but draws other numbers.
        names = [name for name in self.config.methods if greedy or parse_method(name).is_ours]
        return check.compare(answers, names, self.asked, self.scene, self.target if greedy else None)

    def close(self) -> None:
        for method in self.methods:
            method.close()
        self.folder.close()


def make_methods(config: RunConfig, bare: Bare, tokenizer: Any, folder: Path) -> list[Method]:
    """The methods of a configuration, over one model."""
    eos = bare.eos_token_ids
    made: list[Method] = []
    for name in config.methods:
        method = parse_method(name)
        if method.is_ours:
            made.append(Ours(bare, method, config.temperature, config.time_limit, config.keep_rounds))
        elif method.kind == "external":
            command = config.externals[method.options[0]]
            log = folder / f"{file_name(name)}.log"
            limits: dict[str, Any] = {"temperature": config.temperature, "eos": eos, "limit": config.time_limit}
            made.append(External(name, command, tokenizer, log, **limits))
        else:
            made.append(Transformers(bare, tokenizer, method, eos, config.temperature, config.time_limit))
    return made


def _in_order(rows: dict[Any, Any], asked: Sequence[Question]) -> dict[Any, Any]:
    return {question.question_id: rows[question.question_id] for question in asked if question.question_id in rows}


def _diff() -> str:
    done = subprocess.run(["git", "diff", "HEAD"], cwd=environment.ROOT, capture_output=True, check=False)
    return done.stdout.decode("utf-8", "replace")


def _driver(device: torch.device) -> dict[str, Any]:
    """The accelerator's driver, where there is one."""
    if device.type != "cuda":
        return {}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {"driver": None}
    return {"driver": done.stdout.split("\n")[0].strip()}
