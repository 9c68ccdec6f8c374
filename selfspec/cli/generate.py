"""`selfspec generate`: text to stdout, talk to stderr, and nothing written before everything is known to be right."""

from __future__ import annotations

import json
import sys
from typing import Any

from selfspec.cli.options import Generate
from selfspec.cli.prompts import read_prompts
from selfspec.cli.talk import Talk


def generate(options: Generate) -> None:
    """Continue one prompt, or a file of them."""
    options.check()
    prompts = read_prompts(options)
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec.cli.job import Job, keep
            from selfspec.kernels.machine import set_threads

        set_threads(options.threads)
        job = Job.make(options, prompts, talk)
        try:
            _run(job, options)
        finally:  # interrupted or not: what was learned is good
            keep(job.target, job.policy, job.learner, options, talk)


def _run(job: Any, options: Generate) -> None:
    from selfspec.cli.compare import compare
    from selfspec.cli.screen import Screen

    known = job.target.prior if options.compare else None
    rounds = job.rounds(learn=job.learner or False)
    screen = Screen(job, options)
    lines = _Lines(job)

    def show(round_: Any) -> None:
        screen.show(round_)
        if options.writes_lines:
            lines.take(round_)

    try:
        run = job.shown(rounds, show)
    finally:
        screen.end()
    comparison = None
    if options.compare:
        with job.talk.waiting("timing it again, plain decoding and transformers' generate beside it"):
            comparison = compare(job, run, known)
    if options.as_json and not options.writes_lines:
        document = _document(run.completions[0]) | {"policy": job.policy, "engine": job.target.engine}
        document |= {"plans": run.plans, "seconds": run.seconds, "seconds_by_stage": run.stages}
        if comparison is not None:
            document["compare"] = comparison.as_dict()
        _write(document)
    screen.close(run, comparison)


class _Lines:
    """One JSON line per completion, in the prompts' order, each as soon as it and all before it are done."""

    def __init__(self, job: Any) -> None:
        self._prompts, self._waiting, self._next = job.prompts, dict[int, Any](), 0

    def take(self, round_: Any) -> None:
        for row in round_.rows:
            if row.completion is not None:
                self._waiting[row.request_id] = row.completion
        while self._next in self._waiting:
            prompt = self._prompts[self._next]
            several = {} if prompt.of == 1 else {"index": prompt.index}
            _write({"id": prompt.id, **several} | _document(self._waiting.pop(self._next)))
            self._next += 1


def _document(completion: Any) -> dict[str, Any]:
    document = {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "stats": completion.stats.as_dict(),
    }
    if completion.logprobs is not None:
        document["logprobs"] = [one._asdict() for one in completion.logprobs]
    return document


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
