"""selfspec's policies as methods: one prompt at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from eval.answers import Prompt, Steps, Turn
from eval.methods import MethodName, check_exit_layer
from eval.models import Endless, FirstRoundAlone, rounds
from selfspec.control.rows import StageSeconds
from selfspec.decoding.results import Round

STAGES = tuple(key.name for key in dataclasses.fields(StageSeconds) if not key.name.startswith("_"))


class Ours:
    """A policy; what it learns goes from one question to its next, as between calls of the library.

    Args:
        target: with the ends of text of the run; its acceptance statistics start empty.
        limit: seconds per prompt, looked at after every program of rounds.
        keep_rounds: hand over every round's counts, too.
    """

    def __init__(
        self, target: Endless, method: MethodName, temperature: float, limit: float, keep_rounds: bool = False
    ) -> None:
        settings, self.num_layers = method.settings, target.stack.num_layers
        check_exit_layer(method, settings.get("exit_layer"), self.num_layers)
        self.name, self.target, self.limit = method.name, target, limit
        self.temperature, self.keep_rounds = temperature, keep_rounds
        self.policy = FirstRoundAlone(target, **settings)

    def __call__(self, prompt: Prompt) -> Turn:
        steps, done = Steps(self.limit), list[Round]()
        prompts = [prompt.ids]
        coming = rounds(
            self.target,
            prompts,
            prompt.max_new_tokens,
            policy=self.policy.begin(prompts),
            temperature=self.temperature,
            seeds=prompt.seed,
        )
        for round_ in coming:
            done.append(round_)
            if round_.rows:
                steps.add(len(round_.rows[0].tokens))
        return self._turn(done, steps, perf_counter() - steps.start)

    def _turn(self, done: list[Round], steps: Steps, seconds: float) -> Turn:
        (completion,) = (row.completion for round_ in done for row in round_.rows if row.completion is not None)
        stages = {stage: sum(getattr(round_.seconds, stage) for round_ in done) for stage in STAGES}
        return Turn(
            completion.tokens,
            seconds,
            accept_lengths=steps.sizes,
            step_seconds=shared(steps.seconds, [round_ for round_ in done if round_.rows]),
            prefill_seconds=stages["prefill"],
            stage_seconds=stages,
            layer_passes=sum(layer_passes(round_, self.num_layers) for round_ in done),
            stats=completion.stats,
            rounds=[_record(round_) for round_ in done] if self.keep_rounds else [],
        )

    def close(self) -> None:
        pass


def layer_passes(round_: Round, num_layers: int) -> int:
    """Layers that run one after another in a round of one row: all of them once, and the early ones again per draft."""
    if round_.plan is None:
        return 0
    return num_layers + (round_.exit_layer or 0) * len(round_.rows[0].drafted)


def shared(stamped: Sequence[float], done: Sequence[Round]) -> list[float]:
    """Seconds of every step by the clock. The rounds of one program come at once: each gets its share of the program's
    time, by what the engine says that it took."""
    found, at = list(stamped), 0
    while at < len(done):
        end = at + 1
        while end < len(done) and done[end].program_index:
            end += 1
        own = [round_.seconds.total for round_ in done[at:end]]
        if sum(own) > 0:
            scale = sum(stamped[at:end]) / sum(own)
            found[at:end] = [scale * seconds for seconds in own]
        at = end
    return found


def _record(round_: Round) -> dict[str, Any]:
    row = round_.rows[0] if round_.rows else None
    return {
        "exit_layer": round_.exit_layer,
        "num_drafted": len(row.drafted) if row else 0,
        "num_accepted": row.num_accepted if row else 0,
        "num_tokens": len(row.tokens) if row else 0,
        "seconds": {stage: round(getattr(round_.seconds, stage), 7) for stage in STAGES},
    }
