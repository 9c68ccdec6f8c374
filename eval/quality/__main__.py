"""Score policies on GSM8K or HumanEval and show that all of them write the same tokens.

Every question is decoded greedily with every policy. A table goes to standard output, with one JSON document as its
last line; progress goes to standard error. Exit code 0: all outputs are plain decoding's token by token; 1: some
differ; 2: something asked for is not possible. `--run-code` runs code that the model wrote: read
eval/quality/sandbox.py first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from eval.quality import gsm8k, humaneval
from eval.quality.sandbox import Limits, Verdict
from selfspec.errors import UnsupportedModelError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.quality", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, about in (("gsm8k", "exact match of the final number"), ("humaneval", "pass@1 by running the tests")):
        task = tasks.add_parser(name, help=about, description=about)
        task.add_argument("--model", default="demo", help="what selfspec.load opens; default: %(default)s")
        task.add_argument("--questions", required=True, metavar="FILE", help="JSON lines in the data set's own fields")
        task.add_argument(
            "--policy",
            nargs="+",
            default=["plain", "adaptive"],
            help="policies by name, or fixed:E,D; plain is always decoded, as the reference; default: plain adaptive",
        )
        task.add_argument("--num-questions", type=int, default=0, help="from the first on; default 0: all")
        task.add_argument("--max-new-tokens", type=int, default=256, help="per question; default: %(default)s")
        task.add_argument("--device", help="where the model runs; default: selfspec.load chooses")
        task.add_argument("--dtype", default="float32", help="of the weights; default: %(default)s")
        if name == "humaneval":
            _add_limits(task)
    return parser.parse_args(arguments)


def _add_limits(task: argparse.ArgumentParser) -> None:
    usual = Limits()
    task.add_argument("--run-code", action="store_true", help="WARNING: runs code that the model wrote, for the score")
    task.add_argument("--seconds", type=float, default=usual.seconds, help="per program; default: %(default)s")
    task.add_argument("--memory", type=int, default=usual.memory, help="bytes per program; default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Decode with every policy, compare, score, print. Returns the exit code.

    Raises:
        ValueError: an option, the question file or the model's answers do not allow it.
    """
    for name, least in (("num_questions", 0), ("max_new_tokens", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    if options.task == "humaneval" and min(options.seconds, options.memory) <= 0:
        raise ValueError(f"--seconds and --memory must be above 0, got {options.seconds:g} and {options.memory}")
    task: Any = gsm8k if options.task == "gsm8k" else humaneval
    questions = task.read(options.questions, options.num_questions)
    record = decode_all(options, task, questions)
    document = json.dumps(record)
    print(render(record), end="\n\n")
    print(document)
    return int(any(row["differing"] for row in record["policies"]))


def decode_all(options: argparse.Namespace, task: Any, questions: Sequence[Any]) -> dict[str, Any]:
    """One record of plain numbers: a row per policy, plain first, and what was left out."""
    from eval.quality import decode  # heavy: torch, transformers
    from selfspec.legacy import opened as load

    chosen = [decode.choice(text) for text in dict.fromkeys(["plain", *options.policy])]
    target = load(options.model, device=options.device, dtype=options.dtype)
    prompts = [decode.encode(target.tokenizer, each.prompt, chat=task is gsm8k) for each in questions]
    kept = decode.fitting(target, prompts, options.max_new_tokens)
    if not kept:
        limit = target.stack.context_limit
        raise ValueError(f"no question fits the model's context of {limit} tokens; lower --max-new-tokens")
    asked, scorer = [questions[i] for i in kept], scorer_of(options)
    rows: list[dict[str, Any]] = []
    reference = None
    for each in chosen:
        print(f"{each.name}: {len(kept)} questions", file=sys.stderr, flush=True)
        outputs = decode.decode(target, [prompts[i] for i in kept], each, options.max_new_tokens, task.STOPS)
        reference = reference or outputs
        different = decode.differing(outputs, reference)
        scored = scorer(asked, [output.text for output in outputs])
        where = [kept[i] + 1 for i in different]  # in the file, blank lines not counted, from 1
        rows.append({"policy": each.name, **scored, "differing": len(different), "differing_questions": where})
    left = len(questions) - len(kept)
    return {"task": options.task, "model": options.model, "questions": len(kept), "too_long": left, "policies": rows}


def scorer_of(options: argparse.Namespace) -> Any:
    """A function of questions and texts that returns `score`, 0 to 1 or None where code may not be run, and more."""
    if options.task == "gsm8k":
        return lambda asked, texts: {"score": gsm8k.score(texts, [question.answer for question in asked])}
    if not options.run_code:
        return lambda asked, texts: {"score": None}
    limits = Limits(seconds=options.seconds, memory=options.memory)

    @cache  # the same text is run once, so that a slow machine cannot make equal outputs differ in score
    def check(problem: humaneval.Problem, text: str) -> Verdict:
        return humaneval.check(problem, text, limits)

    def score(asked: Sequence[humaneval.Problem], texts: Sequence[str]) -> dict[str, Any]:
        verdicts = [check(problem, text) for problem, text in zip(asked, texts, strict=True)]
        found = humaneval.score([[verdict] for verdict in verdicts])
        return {"score": found, "isolated": all(verdict.isolated for verdict in verdicts)}

    return score


def render(record: dict[str, Any]) -> str:
    """The record as a table for people."""
    metric = {"gsm8k": "exact match", "humaneval": "pass@1"}[record["task"]]
    rows = record["policies"]
    width = max(6, *(len(row["policy"]) for row in rows))
    lines = [f"{record['task']}, {record['questions']} questions, greedy, model {record['model']}"]
    if record["too_long"]:
        lines.append(f"{record['too_long']} questions left out: too long for the model's context")
    lines.append(f"{'policy':<{width}}  {metric:>11}  outputs that differ from plain")
    for row in rows:
        score = "not run" if row["score"] is None else f"{row['score']:.2%}"
        lines.append(f"{row['policy']:<{width}}  {score:>11}  {row['differing']}")
    if any(row["score"] is None for row in rows):
        lines.append("pass@1 needs --run-code, which runs code that the model wrote.")
    if not all(row.get("isolated", True) for row in rows):
        lines.append("The system allows no namespaces: the network was closed to Python code only.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where outputs differ, or 2 with one sentence when something asked for is not possible."""
    options = parse_arguments(arguments)
    try:
        return run(options)
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval.quality: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
