"""Figures of a CPU, interleaved, medians: forwards by tokens and layers, and whole outputs beside other decoders'.

    python -m eval cpu --threads 1 --llama-python ~/llama/bin/python --output cpu

Tables for people go to standard output, with one JSON document as the last line; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

QUESTIONS = Path(__file__).parents[2] / "configs" / "eval" / "questions.jsonl"
REPEATS = 15  # of the embedded model's pieces
FREQUENT = 16384  # tokens that a synthetic target writes, where its vocabulary is larger: text does not use all either


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval cpu", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="demo", help="demo or a folder; none leaves it out")
    add("--shape", help="also a target of this shape with random weights, such as llama-3.2-1b")
    add("--engine", default="auto", help="auto, views or compiled; default: %(default)s")
    add("--threads", type=int, default=0, help="0: torch's own number")
    add("--questions", default=str(QUESTIONS), help="question file; default: the one of python -m eval run")
    add("--per-category", type=int, default=1, help="questions of each category; default: %(default)s")
    add("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    add("--shape-tokens", type=int, default=48, help="new tokens of the synthetic target; default: %(default)s")
    add("--repeats", type=int, default=3, help="default: %(default)s")
    add("--rivals", action=argparse.BooleanOptionalAction, default=True, help="transformers' own decoding beside it")
    add("--llama-python", metavar="PYTHON", help="an interpreter with llama-cpp-python: llama.cpp beside it")
    add("--output", metavar="FOLDER", help="a folder to write cpu.json into as well")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers.utils import logging

    from eval.environment import load_average, machine

    logging.set_verbosity_error()
    start = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    if options.threads:
        torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"environment": machine(), "options": vars(options), "pieces": [], "decoding": []}
    if options.model != "none":
        _embedded(options, record, say)
    if options.shape:
        _synthetic(options, record, say)
    record["environment"]["load_average_at_end"] = load_average()
    return record


def _embedded(options: argparse.Namespace, record: dict[str, Any], say: Any) -> None:
    from eval.cpu import decoding
    from eval.methods import Endless
    from eval.questions import encode, read_questions
    from selfspec.legacy import opened as load

    target = load(options.model, device="cpu", engine=options.engine)
    _measure(target, options.model, max(1, target.stack.num_layers // 4), REPEATS, record, say)
    by_category: dict[str, list[Any]] = defaultdict(list)
    for question in read_questions(options.questions):
        if len(by_category[question.category]) < options.per_category:
            by_category[question.category].append(question)
    questions = [question for some in by_category.values() for question in some]
    prompts, endless = encode(questions, target.tokenizer), Endless(target)
    tokens = options.max_new_tokens
    ours = [decoding.Ours(endless, "plain", "plain"), decoding.Ours(endless, "adaptive", "adaptive")]
    with TemporaryDirectory() as folder:
        rivals = _rivals(options, target, prompts, Path(folder), say)
        timings, rows = decoding.compare(ours, rivals, prompts, tokens, options.repeats, say)
        _close(rivals)
    about = {"target": options.model, "threads": record["pieces"][-1]["threads"], "num_tokens": tokens}
    batch = decoding.batch(endless, prompts, min(tokens, 128), options.repeats, say)
    record["decoding"].append({**about, "category": "all categories", "rows": rows, "batch": batch})
    for category in by_category:
        items = [i for i, question in enumerate(questions) if question.category == category]
        some = [sample for sample in timings.samples if sample.item in items]
        record["decoding"].append({**about, "category": category, "rows": _of_category(some, [*ours, *rivals])})


def _of_category(samples: Sequence[Any], tried: Sequence[Any]) -> list[dict[str, Any]]:
    from eval.cpu.decoding import ratio_by_item
    from eval.summary import of_method, spread, tokens_per_second

    rows = []
    for method in tried:
        own = of_method(samples, method.name)
        if own:
            speed, ratios = tokens_per_second(own), ratio_by_item(samples, method.name, tried[0].name)
            figures = {"milliseconds_per_token": 1e3 / speed, "over_plain": spread(ratios)._asdict()}
            rows.append({"method": method.name, "tokens_per_second": speed, **figures, "differing_prompts": 0})
    return rows


def _rivals(options: argparse.Namespace, target: Any, prompts: Any, folder: Path, say: Any) -> list[Any]:
    from eval import methods
    from eval.cpu import decoding
    from eval.cpu.llamacpp import LlamaCpp

    made: list[Any] = []
    model, tokens = target.stack.model, options.max_new_tokens
    if options.rivals:
        layers = target.stack.num_layers
        made = [methods.generate(model), decoding.static(model)]
        made.append(decoding.early_exit(model, layers, prompts[0], tokens, say))
        made.append(decoding.prompt_lookup(model, prompts[0], tokens, say))
    if options.llama_python:
        longest = max(map(len, prompts)) + tokens
        made += LlamaCpp.all(options.llama_python, model, folder, longest + -longest % 256)
    return made


def _close(rivals: Sequence[Any]) -> None:
    for rival in rivals:
        if hasattr(rival, "close"):
            rival.close()


def _synthetic(options: argparse.Namespace, record: dict[str, Any], say: Any) -> None:
    import torch

    from eval.cpu import decoding
    from eval.cpu.llamacpp import LlamaCpp
    from eval.targets import synthetic_target
    from selfspec.control.fixed import Fixed

    say(f"making {options.shape}")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}  # as llama.cpp is told here
    target: Any = synthetic_target(options.shape, max_position_embeddings=4096, frequent=FREQUENT, **rope)
    made, exit_layer = target.made, target.made.exit_layer
    _measure(target, made.label, exit_layer, 3, record, say)
    prompts = torch.randint(FREQUENT, (2, 24), generator=torch.Generator().manual_seed(3)).tolist()
    ours = [decoding.Ours(target, "plain", "plain"), decoding.Ours(target, "adaptive", "adaptive")]
    for length in (3, 5):
        whole, small = Fixed(exit_layer, length), Fixed(exit_layer, length, draft_vocab=FREQUENT)
        ours.append(decoding.Ours(target, f"fixed, {exit_layer} layers, {length} tokens", whole))
        ours.append(decoding.Ours(target, f"{length} over {FREQUENT} of the vocabulary", small))
        ours.append(decoding.Ours(target, f"{length} by copies in 4 bits, over as many", replace(small, draft_bits=4)))
    with TemporaryDirectory() as folder:
        rivals: list[Any] = []
        if options.llama_python:
            rivals += LlamaCpp.all(options.llama_python, target.stack.model, Path(folder), 256)
        tokens, repeats = options.shape_tokens, max(1, options.repeats - 1)
        _, rows = decoding.compare(ours, rivals, prompts, tokens, repeats, say)
        _close(rivals)
    about = {"target": made.label, "threads": record["pieces"][-1]["threads"], "num_tokens": tokens}
    record["decoding"].append({**about, "category": "random tokens", "rows": rows})


def _measure(target: Any, name: str, exit_layer: int, repeats: int, record: dict[str, Any], say: Any) -> None:
    import torch

    from eval.cpu.pieces import pieces

    say(f"pieces of {name}")
    found = pieces(target.stack, exit_layer, repeats)
    threads = torch.get_num_threads()
    record["pieces"].append({"target": name, "engine": target.engine, "threads": threads, **found})


def main(arguments: Sequence[str] | None = None) -> int:
    from eval.cpu.table import render
    from eval.digits import rounded
    from selfspec.errors import UnsupportedModelError

    options = parse_arguments(arguments)
    try:
        record = rounded(run(options))
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    document = json.dumps({"benchmark": "cpu", **record})
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.json").write_text(document + "\n", "utf-8")
    print(render(record), end="\n\n")
    print(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
