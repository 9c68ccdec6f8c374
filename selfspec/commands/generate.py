"""`selfspec generate`: text to stdout, talk to stderr, and nothing written before everything is known to be right."""

from __future__ import annotations

import json
import sys
from typing import Any

from selfspec.commands.failure import RUN, Failure
from selfspec.commands.options import Generate
from selfspec.commands.prompts import read_prompts
from selfspec.commands.threads import set_threads


def generate(options: Generate) -> None:
    """Continue one prompt, or a file of them."""
    options.check()
    prompts = read_prompts(options)
    from selfspec.commands.job import Job  # torch and transformers, from here on

    set_threads(options.threads)
    job = Job.make(options, prompts)
    try:
        if options.prompts is not None:
            _write_lines(job, options)
        else:
            _write_one(job, options)
    finally:  # interrupted or not: what was learned is good
        _keep_heads(job, options)
    if job.policy != "plain":
        job.target.save_prior()


def _keep_heads(job: Any, options: Generate) -> None:
    """Save what was learned, and say how much it was."""
    from selfspec import show

    learner = job.learner
    if learner is None:
        return
    try:
        learner.save()
    except OSError as problem:
        raise Failure(f"--learn {options.learn} cannot be written to ({problem.strerror})", RUN) from problem
    if not options.as_json:
        share = learner.seconds / max(learner.decoding_seconds, 1e-9)
        line = f"learned from {learner.num_lessons} refused drafts in {learner.num_updates} updates, "
        line += f"{learner.seconds:.2f} s ({share:.1%} of decoding); saved in {options.learn}"
        show.make_console(sys.stderr, quiet=options.quiet).print(line, style="dim", soft_wrap=True, highlight=False)


def _write_one(job: Any, options: Generate) -> None:
    from selfspec.commands.compare import compare
    from selfspec.commands.job import consume
    from selfspec.commands.screen import Screen

    rounds = job.rounds(learn=job.learner or False)
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
        document = _document(run.completions[0]) | {
            "policy": job.policy,
            "engine": job.target.engine,
            "plans": run.plans,
        }
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

    rounds = job.rounds(learn=job.learner or False)
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
