"""Whole outputs: plain and speculative decoding of selfspec beside transformers' and llama.cpp's, prompt by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

from eval import methods
from eval.cpu.llamacpp import LlamaCpp
from eval.cpu.pieces import clock
from eval.methods import Answer, Endless, Ids, Method, Transformers
from eval.summary import differences, of_method, spread, tokens_per_second
from eval.timing import Sample, Say, Timings, quiet, rotated
from selfspec.control.plan import Policy

EARLY_EXITS = (1, 2, 4)  # eighths of the layers at which transformers' early exit is tried
LOOKUPS = (3, 10)  # tokens of its prompt lookup
BATCH = 16


@dataclass(frozen=True, slots=True)
class Ours:
    """selfspec under any policy."""

    target: Endless
    name: str
    policy: str | Policy
    together: int = 1
    family: str = "plain"
    settings: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, prompts: Ids, max_new_tokens: int) -> list[Answer]:
        batch = {"max_batch_size": len(prompts), "max_new_tokens": max_new_tokens}
        done = self.target.generate(prompts, policy=self.policy, **batch)  # type: ignore[arg-type]
        return [Answer(completion.tokens, completion.stats) for completion in done]


def static(model: Any) -> Transformers:
    """transformers' static cache, whose forward it compiles."""
    from transformers import CompileConfig

    config = CompileConfig()
    config._compile_all_devices = True  # it compiles on accelerators only, unless told
    settings: dict[str, Any] = {"cache_implementation": "static", "compile_config": config}
    return Transformers(model, "transformers static cache, compiled", "generate", settings)


def in_turn(
    tried: Sequence[Method], items: Sequence[Ids], tokens: int, repeats: int, warmup: int, say: Say = lambda text: None
) -> Timings:
    """As `eval.timing.interleave`, by the clock of `pieces.clock`, or the peer's own where it has one."""
    wall = clock()[0] == "wall time"
    read = perf_counter if wall else process_time
    errors: dict[str, str] = {}
    for method in tried:
        try:
            method(items[0], warmup)
        except Exception as problem:
            if method.family == "plain":
                raise
            errors[method.name] = f"{type(problem).__name__}: {problem}"
    running = [method for method in tried if method.name not in errors]
    samples = []
    for repeat in range(repeats):
        with quiet():
            for i, item in enumerate(items):
                for method in rotated(running, repeat + i):
                    start = read()
                    answers = method(item, tokens)
                    taken = read() - start
                    if isinstance(method, LlamaCpp):
                        taken = method.seconds if wall else method.processor
                    samples.append(Sample(method.name, repeat, i, taken, answers))
        say(f"repeat {repeat + 1} of {repeats}")
    return Timings(samples, errors)


def compare(
    ours: Sequence[Method], rivals: Sequence[Method], prompts: Ids, tokens: int, repeats: int, say: Say
) -> tuple[Timings, list[dict[str, Any]]]:
    """Every method on every prompt, in turn; the first method's outputs are what the others are compared with."""
    running = [*ours, *rivals]
    for method in running:  # a static cache compiles anew for some lengths
        if "static" in method.name:
            say("transformers compiles")
            warm(method, prompts, tokens)
    timings = in_turn(running, [[prompt] for prompt in prompts], tokens, repeats, tokens, say)
    reference = [s.answers[0].tokens for s in of_method(timings.samples, ours[0].name) if s.repeat == 0]
    rows = []
    for method in running:
        samples = of_method(timings.samples, method.name)
        if not samples:
            rows.append({"method": method.name, "error": timings.errors[method.name]})
            continue
        ratios = list(ratio_by_item(timings.samples, method.name, ours[0].name))
        told = {"method": method.name, "tokens_per_second": tokens_per_second(samples)}
        told |= {"milliseconds_per_token": 1e3 / tokens_per_second(samples), "over_plain": spread(ratios)._asdict()}
        rows.append({**told, "differing_prompts": len(differences(samples, reference))})
    return timings, rows


def warm(method: Method, prompts: Ids, tokens: int) -> None:
    try:
        method(prompts[:1], tokens)
        method(prompts[1:2] or prompts[:1], tokens)
    except Exception:
        return  # the comparison reports why


def ratio_by_item(samples: Sequence[Sample], name: str, base: str) -> Iterator[float]:
    """How many times faster a method is than another, for every prompt: median seconds over median seconds."""
    items = sorted({sample.item for sample in samples})
    for item in items:
        a, b = (statistics.median(s.seconds for s in of_method(samples, m) if s.item == item) for m in (name, base))
        yield b / a


def early_exit(model: Any, num_layers: int, prompt: Sequence[int], tokens: int, say: Say) -> Method:
    """transformers' early exit at the exit that is fastest on one prompt."""
    exits = sorted({max(1, num_layers * eighths // 8) for eighths in EARLY_EXITS})
    return _fastest([methods.early_exit(model, e, 0) for e in exits], prompt, tokens, say)


def prompt_lookup(model: Any, prompt: Sequence[int], tokens: int, say: Say) -> Method:
    return _fastest([methods.prompt_lookup(model, n) for n in LOOKUPS], prompt, tokens, say)


def _fastest(tried: Sequence[Method], prompt: Sequence[int], tokens: int, say: Say) -> Method:
    timings = in_turn(tried, [[prompt]], tokens, 1, 8)
    done = [method for method in tried if method.name not in timings.errors]
    if not done:
        return tried[0]
    best = max(done, key=lambda method: tokens_per_second(of_method(timings.samples, method.name)))
    say(f"{best.name} is the fastest of {len(tried)}")
    return best


def batch(target: Endless, prompts: Ids, tokens: int, repeats: int, say: Say) -> dict[str, Any]:
    """Tokens per second of 16 rows together over those of one."""
    many = [list(prompts[i % len(prompts)]) for i in range(BATCH)]
    alone, joined = Ours(target, "one row", "plain"), Ours(target, f"{BATCH} rows", "plain")
    one = in_turn([alone], [many[:1]], tokens, repeats, tokens)
    all_of_them = in_turn([joined], [many], tokens, repeats, tokens, say)
    a, b = tokens_per_second(one.samples), tokens_per_second(all_of_them.samples)
    return {"tokens_per_second": {"1": a, str(BATCH): b}, "ratio": b / a}
