"""What exact mode costs: plain and speculative decoding with it and without, in turn, on a synthetic target.

    python -m eval exact --shape qwen3-0.6b --dtype bfloat16

Tokens and logits of both are compared too: how many rows of speculation differ from plain decoding in some bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from eval.environment import device, machine
from eval.shapes import SHAPES
from eval.targets import Synthetic, random_prompts, synthetic_target
from eval.timing import quiet, synchronize
from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Completion
from selfspec.errors import NoCompilerError
from selfspec.executors.cpu.install import ENGINES
from selfspec.model.exact import ExactStack

PLANS: dict[str, dict[str, Any]] = {"plain": {"policy": "plain"}, "speculative": {"num_draft_tokens": 4}}


class Timed(NamedTuple):
    """One run: seconds of its rounds, once all prompts are read, and what it wrote."""

    seconds_per_token: float
    done: list[Completion]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval exact", description=__doc__)
    parser.add_argument("--shape", default="tiny", help=f"{', '.join(SHAPES)}, or a config.json; default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--engine", choices=ENGINES, default="auto", help="default: %(default)s; compiled, it is exact as it is"
    )
    parser.add_argument("--acceptance", type=float, default=0.8, help="of the exit; default: %(default)s")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4], help="default: 1 4")
    parser.add_argument("--context", type=int, default=96, help="prompt tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per row; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    return parser.parse_args(arguments)


def clock_of(where: torch.device) -> tuple[str, Callable[[], float]]:
    """CPU seconds where one thread does it all, which other programs do not disturb; else wall time."""
    if where.type == "cpu" and torch.get_num_threads() == 1:
        return "CPU seconds of one thread", process_time
    return "wall seconds", perf_counter


def run(target: Synthetic, prompts: list[list[int]], plan: str, exact: bool, tokens: int, now: Any) -> Timed:
    """Read the prompts, and time the rounds after the first."""
    options = dict(PLANS[plan])
    if plan == "speculative":
        options |= {"policy": "fixed", "exit_layer": target.made.exit_layer}
    room = len(prompts) * (-(-(len(prompts[0]) + tokens) // 64) * 64)
    engine = Engine(target, max_batch_size=len(prompts), max_cached_tokens=room, exact=exact, burst=0.0, **options)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=tokens, keep_logits=True)
    rounds = []
    while not any(row.tokens for round_ in rounds for row in round_.rows):
        rounds += engine.step()
    where = target.stack.device
    with quiet():
        synchronize(where)
        start = now()
        timed = list(engine.run())
        synchronize(where)
        seconds = now() - start
    emitted = sum(len(row.tokens) for round_ in timed for row in round_.rows)
    rows = [row.completion for round_ in [*rounds, *timed] for row in round_.rows]
    done = sorted((one for one in rows if one is not None), key=lambda one: one.request_id)
    return Timed(seconds / emitted, done)


def num_differing(one: Sequence[Completion], other: Sequence[Completion]) -> dict[str, int]:
    """Rows whose tokens differ, and rows with any bit of any logit differing."""
    pairs = list(zip(one, other, strict=True))
    same = [
        all(torch.equal(x, y) for x, y in zip(a.logits or [], b.logits or [], strict=False)) and a.tokens == b.tokens
        for a, b in pairs
    ]
    return {"tokens": sum(a.tokens != b.tokens for a, b in pairs), "bits": same.count(False), "rows": len(pairs)}


def compared(target: Synthetic, prompts: list[list[int]], tokens: int, now: Any) -> dict[str, Any]:
    """Plain and speculative decoding in both modes, in turn: seconds of exact over ordinary, and rows that differ."""
    ways = {(plan, e): run(target, prompts, plan, e, tokens, now) for e in (False, True) for plan in PLANS}
    return {
        "cost": {p: ways[p, True].seconds_per_token / ways[p, False].seconds_per_token for p in PLANS},
        "differing": {
            name: num_differing(ways["plain", e].done, ways["speculative", e].done)
            for name, e in (("ordinary", False), ("exact", True))
        },
    }


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All batch sizes; ratios are medians over repeats in which the four ways run in turn."""
    where = torch.device(options.device)
    say(f"making a target of shape {options.shape}")
    dtype = getattr(torch, options.dtype)
    target = synthetic_target(
        options.shape, dtype=dtype, device=where, acceptance=options.acceptance, engine=options.engine
    )
    name, now = clock_of(where)
    batches = []
    for size in options.batch_sizes:
        prompts = random_prompts(target.stack.vocab_size, size, options.context)
        found = []
        for repeat in range(options.repeats):
            say(f"batch {size}, repeat {repeat + 1} of {options.repeats}")
            found.append(compared(target, prompts, options.tokens, now))
        spread = {}
        for plan in PLANS:
            ratios = [one["cost"][plan] for one in found]
            spread[plan] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        batches.append({"batch_size": size, "cost": spread, "differing": found[-1]["differing"]})
    stack = target.exact_stack
    blocks = {"rows": stack.rows, "wide": stack.wide} if isinstance(stack, ExactStack) else None
    return {
        "benchmark": "exact mode",
        "environment": {**machine(), **device(where)},
        "clock": name,
        "target": target.about(),
        "engine": target.engine,
        "blocks": blocks,  # None: the engine is exact as it is
        "config": vars(options),
        "batches": batches,
    }


def render(record: dict[str, Any]) -> str:
    target = record["target"]
    lines = [f"synthetic {target['shape']}, {target['dtype']}, engine {record['engine']}; {record['clock']} per token"]
    lines.append("batch   plain: exact/ordinary   speculative  rows unlike plain decoding: ordinary, exact")
    for batch in record["batches"]:
        cost, differs = batch["cost"], batch["differing"]
        told = ", ".join(f"{differs[key]['bits']}/{differs[key]['rows']}" for key in ("ordinary", "exact"))
        plain, speculative = cost["plain"]["median"], cost["speculative"]["median"]
        lines.append(f"{batch['batch_size']:>5}  {plain:>22.2f}  {speculative:>12.2f}  {told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        record = measure(options, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, AttributeError, NoCompilerError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    print(render(record), end="\n\n")
    print(json.dumps(record))
    return 0
