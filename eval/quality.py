"""Scores of lm-evaluation-harness tasks, decoded by selfspec.

Every policy answers every request, and all are compared with the first. A table goes to standard output, with one JSON
document as its last line; progress goes to standard error. Exit codes: 0 (all policies gave the same texts), 1 (some
differ), 2 (invalid input).

    python -m eval quality --tasks gsm8k --model smollm2 --limit 50
    python -m eval quality --tasks own --include-path my_tasks --policies plain adaptive fixed:4,4
    HF_ALLOW_CODE_EVAL=1 python -m eval quality --tasks humaneval --run-code --model ./my-model

humaneval runs the model's code with the metric code_eval of the package `evaluate`, which needs HF_ALLOW_CODE_EVAL=1.
It limits time but is no sandbox; use a container for models that you do not trust.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from eval.figures import table
from eval.methods import parse_method

NO_HARNESS = "quality needs the package lm_eval: pip install 'lm_eval[hf]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if find_spec("lm_eval") is None:
        raise ValueError(NO_HARNESS)
    options = _parse(given)
    for name in options.policies:
        if not parse_method(name).is_ours:
            raise ValueError(f"--policies takes methods of selfspec, such as adaptive or fixed:4,4, got {name!r}")
    if options.run_code and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise ValueError("--run-code runs the model's code: set HF_ALLOW_CODE_EVAL=1 to allow it")
    record = evaluate(options)
    print(render(record), end="\n\n")
    print(json.dumps(record))
    return int(any(row["num_different"] for row in record["policies"]))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks of lm_eval (lm_eval ls tasks lists them)")
    parser.add_argument("--model", default="demo", help="model to open; default: %(default)s")
    parser.add_argument("--policies", nargs="+", default=["plain", "adaptive"], help="default: plain adaptive")
    parser.add_argument("--limit", type=int, help="questions of every task, from the first on; default: all")
    parser.add_argument("--num-fewshot", type=int, help="worked examples before a question; default: the task's own")
    parser.add_argument("--apply-chat-template", action="store_true", help="format prompts with the chat template")
    parser.add_argument("--include-path", help="a folder of other tasks, as YAML files")
    parser.add_argument("--max-gen-toks", type=int, help="tokens per text; default: the task's own, or 256")
    parser.add_argument("--batch-size", type=int, default=8, help="rows decoded together; default: %(default)s")
    parser.add_argument("--device", help="where the model runs; default: a GPU where there is one")
    parser.add_argument("--dtype", default="float32", help="of the weights; default: %(default)s")
    parser.add_argument("--run-code", action="store_true", help="WARNING: allows tasks that run code of the model")
    return parser.parse_args(arguments)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The record: a row per policy with its scores by task and metric, and the number of texts that differ.

    Raises:
        ValueError: a task is unknown, or the model cannot be used.
    """
    import lm_eval  # slow to import, as the other two
    from lm_eval.tasks import TaskManager

    from eval.harness import SelfSpecLM

    manager = TaskManager(include_path=options.include_path, include_defaults=not options.include_path)
    if options.include_path and _unknown(manager, options.tasks):  # loading lm_eval's own tasks takes ten seconds
        manager = TaskManager(include_path=options.include_path)
    if unknown := _unknown(manager, options.tasks):
        raise ValueError(f"lm_eval has no task {', '.join(unknown)}; name a folder of other tasks with --include-path")
    wanted: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "batch_size": options.batch_size}
    lm = SelfSpecLM(options.model, **wanted)
    rows: list[dict[str, Any]] = []
    reference: dict[str, Any] = {}
    for policy in dict.fromkeys(options.policies):
        print(f"{policy}: {', '.join(options.tasks)}", file=sys.stderr, flush=True)
        lm.settings = parse_method(policy).settings
        found: Any = lm_eval.simple_evaluate(
            model=lm,
            tasks=options.tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            task_manager=manager,
            gen_kwargs={"max_gen_toks": options.max_gen_toks} if options.max_gen_toks else None,
            confirm_run_unsafe_code=options.run_code,
        )
        texts = _answers(found["samples"])
        reference = reference or texts
        different = sum(texts[key] != reference[key] for key in reference)
        rows.append({"policy": policy, "scores": _scores(found["results"]), "num_different": different})
    return {"model": options.model, "tasks": options.tasks, "num_requests": len(reference), "policies": rows}


def _unknown(manager: Any, tasks: Sequence[str]) -> list[str]:
    return [name for name in tasks if not manager.match_tasks([name])]


def _answers(samples: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to every request: texts, or whether the scored continuation is the greedy one."""
    found = {}
    for task, of_task in samples.items():
        for sample in of_task:
            answer = [[each if isinstance(each, str) else each[-1:] for each in some] for some in sample["resps"]]
            found[f"{task} {sample['doc_id']} {sample.get('filter')}"] = answer
    return found


def _scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    def is_score(name: str, value: Any) -> bool:
        return isinstance(value, int | float) and name != "sample_len" and "stderr" not in name

    return {task: {n: float(v) for n, v in of_task.items() if is_score(n, v)} for task, of_task in results.items()}


def render(record: Mapping[str, Any]) -> str:
    """The record as a table."""
    names = [(task, metric) for task, found in record["policies"][0]["scores"].items() for metric in found]
    heads = [f"{task}, {metric.partition(',')[0]}" for task, metric in names]
    rows = []
    for row in record["policies"]:
        scores = [f"{row['scores'][task].get(metric, float('nan')):.4g}" for task, metric in names]
        rows.append([row["policy"], *scores, str(row["num_different"])])
    first = record["policies"][0]["policy"]
    about = f"{record['model']}, {record['num_requests']} requests"
    return f"{about}\n\n{table(['policy', *heads, f'answers different from {first}'], rows)}"
