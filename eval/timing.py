"""Interleaved timing: what drifts while a benchmark runs (clock speed, other programs) reaches all methods alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from eval.methods import Answer, Ids, Method

Result = TypeVar("Result")
Say = Callable[[str], None]  # progress, for people


class Sample(NamedTuple):
    """One timed call of a method."""

    method: str
    repeat: int
    item: int  # index of the prompts it was given
    seconds: float
    answers: list[Answer]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


class Timings(NamedTuple):
    """All timed calls of a stage, and why methods that are missing from it failed."""

    samples: list[Sample]
    errors: dict[str, str]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked for; a clock read before that measures launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    synchronize(device)
    start = perf_counter()
    result = call()
    synchronize(device)
    return result, perf_counter() - start


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside: it would charge one method for another's rubbish."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rotated(methods: Sequence[Result], by: int) -> list[Result]:
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


def interleave(
    methods: Sequence[Method],
    items: Sequence[Ids],
    max_new_tokens: int,
    repeats: int,
    warmup_tokens: int,
    device: torch.device,
    say: Say,
) -> Timings:
    """Time every method on every item (a batch of prompts), item by item, in an order that rotates, and all again.

    A method of transformers that fails in its warm-up is left out, with the reason; selfspec's own may not fail.
    """
    errors: dict[str, str] = {}
    for method in methods:
        try:
            method(items[0], min(warmup_tokens, max_new_tokens))
        except Exception as problem:
            if method.family in ("plain", "fixed"):
                raise
            errors[method.name] = f"{type(problem).__name__}: {problem}"
    running = [method for method in methods if method.name not in errors]
    samples = []
    for repeat in range(repeats):
        with quiet():
            for i, item in enumerate(items):
                for method in rotated(running, repeat + i):
                    answers, seconds = timed(lambda m=method, p=item: m(p, max_new_tokens), device)  # type: ignore[misc]
                    samples.append(Sample(method.name, repeat, i, seconds, answers))
        say(f"repeat {repeat + 1} of {repeats}")
    return Timings(samples, errors)
