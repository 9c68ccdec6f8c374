"""Where a decoding's wall time goes: by stage, as the engine's own clock has it, and inside or outside the model.

The stages `draft` and `verify` hold the layers and the packing of their inputs, `head` the final norm and the
vocabulary product, `pick` the argmax and the copy to the host, `rest` plans, acceptance, stops and bookkeeping. A
second clock around every call into the model's layers and head tells how much of the whole call, prefill and set-up
included, is Python outside the model's forward. Off the CPU the engine's clock measures launches; the second one waits
for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.methods import Ids, SelfSpec, watch
from eval.summary import spread
from eval.timing import quiet, synchronize, timed

STAGES = ("draft", "verify", "head", "pick", "rest")


class Profile(NamedTuple):
    """One repeat over all items."""

    seconds: dict[str, float]  # by stage of a round
    inside: float  # seconds inside the model's layers and head
    wall: float  # seconds of the whole calls
    rounds: int

    @property
    def total(self) -> float:
        """Seconds of all rounds without the reading of prompts."""
        return sum(self.seconds[stage] for stage in STAGES)


class ForwardClock:
    """Adds up the time spent inside a stack's `run` and `logits`, on a copy: the stack itself is left alone."""

    def __init__(self, stack: Any) -> None:
        self.seconds = 0.0
        self._device: torch.device = stack.device
        self.stack = copy.copy(stack)
        for name in ("run", "logits"):
            setattr(self.stack, name, self._timed(getattr(stack, name)))

    def _timed(self, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            synchronize(self._device)
            start = perf_counter()
            result = call(*args, **kwargs)
            synchronize(self._device)
            self.seconds += perf_counter() - start
            return result

        return watched


def profile(method: SelfSpec, items: Sequence[Ids], max_new_tokens: int) -> Profile:
    """Decode every item once and add up where the time went."""
    clock = ForwardClock(method.target.stack)
    watched = replace(method, target=watch(method.target, clock.stack))
    seconds = dict.fromkeys((*STAGES, "prefill"), 0.0)
    wall, rounds = 0.0, 0
    for item in items:
        done, took = timed(lambda p=item: list(watched.rounds(p, max_new_tokens)), clock.stack.device)  # type: ignore[misc]
        wall += took
        for round_ in done:
            rounds += round_.plan is not None
            for stage in seconds:
                seconds[stage] += getattr(round_.seconds, stage)
    return Profile(seconds, clock.seconds, wall, rounds)


def attribute(
    methods: Sequence[tuple[SelfSpec, Sequence[Ids]]], max_new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Profiles of every method, interleaved, each as a record; the first, untimed pass of each is a warm-up."""
    profiles: dict[str, list[Profile]] = {}
    for method, items in methods:
        profile(method, items[:1], max_new_tokens)
    for _ in range(repeats):
        with quiet():
            for method, items in methods:
                profiles.setdefault(method.name, []).append(profile(method, items, max_new_tokens))
    return [_record(name, taken) for name, taken in profiles.items()]


def _record(name: str, taken: Sequence[Profile]) -> dict[str, Any]:
    shares = {stage: spread(p.seconds[stage] / p.total for p in taken)._asdict() for stage in STAGES}
    return {
        "method": name,
        "num_rounds": taken[0].rounds,
        "milliseconds_per_round": spread(1e3 * p.total / p.rounds for p in taken)._asdict(),
        "shares": shares,
        "pick_and_rest_share": spread((p.seconds["pick"] + p.seconds["rest"]) / p.total for p in taken)._asdict(),
        "prefill_share_of_call": spread(p.seconds["prefill"] / p.wall for p in taken)._asdict(),
        "outside_forward_share_of_call": spread(1 - p.inside / p.wall for p in taken)._asdict(),
    }
