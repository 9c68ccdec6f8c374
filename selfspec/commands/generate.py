"""`selfspec generate`: text to stdout, talk to stderr, and nothing written before everything is known to be right."""

from __future__ import annotations

import json
import sys
from typing import Any

from selfspec.commands.options import Generate
from selfspec.commands.prompts import read_prompts


def generate(options: Generate) -> None:
    """Continue one prompt, or a file of them."""
    options.check()
    prompts = read_prompts(options)
    from selfspec.commands.job import Job  # torch and transformers, from here on

    job = Job.make(options, prompts)
    if options.prompts is not None:
        _write_lines(job, options)
    else:
        _write_one(job, options)
    if job.policy != "plain":
        job.target.save_prior()


def _write_one(job: Any, options: Generate) -> None:
    from selfspec.commands.compare import compare
    from selfspec.commands.job import consume
    from selfspec.commands.screen import Screen

    rounds = job.rounds()
    screen = Screen(job, options)
    try:
        run = consume(rounds, screen.show)
    finally:
        screen.end()
    comparison = None
    if options.compare:
        with screen.waiting("timing it again, and plain decoding beside it ..."):
            comparison = compare(job, run)
    if options.as_json:
        document = _document(run.completions[0]) | {"policy": job.policy, "plans": run.plans}
        document |= {"seconds": run.seconds, "seconds_by_stage": run.stages}
        if comparison is not None:
            document["compare"] = comparison.as_dict()
        _write(json.dumps(document))
    screen.close(run, comparison)


def _write_lines(job: Any, options: Generate) -> None:
    """One line per prompt, in their order, each as soon as it and all before it are done."""
    from selfspec.commands.compare import compare
    from selfspec.commands.job import consume
    from selfspec.commands.screen import Screen

    waiting: dict[int, str] = {}
    at = 0

    def show(round_: Any) -> None:
        nonlocal at
        screen.show(round_)
        for row in round_.rows:
            if row.completion is not None:
                line = {"id": job.prompts[row.request_id].id} | _document(row.completion)
                waiting[row.request_id] = json.dumps(line)
        while at in waiting:
            _write(waiting.pop(at))
            at += 1

    rounds = job.rounds()
    screen = Screen(job, options)
    run = consume(rounds, show)
    comparison = None
    if options.compare:
        with screen.waiting("timing them again, and plain decoding beside them ..."):
            comparison = compare(job, run)
    screen.close(run, comparison)


def _document(completion: Any) -> dict[str, Any]:
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": completion.stats.as_dict(),
    }


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
