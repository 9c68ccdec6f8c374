"""selfspec's policies as methods."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from eval.methods import Endless
from eval.run.names import MethodName
from eval.run.turns import Prompt, Steps, Turn
from eval.timing import timed
from selfspec.calibrate.measure import measure
from selfspec.control.costs import Costs
from selfspec.control.rows import StageSeconds
from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round
from selfspec.legacy import WHOLE_BURST
from selfspec.legacy import LoadedTarget as Target

STAGES = tuple(key.name for key in dataclasses.fields(StageSeconds) if not key.name.startswith("_"))


class Bare(Endless):
    """A target that writes tokens only, no text, as transformers' `generate` does; its ends of text are given.

    What earlier programs have seen of the model's acceptance is left out, so that a run depends on itself alone.

    Args:
        cost_repeats: how often every piece of a round is timed, when a policy first asks; 0: the user's own table.
    """

    def __init__(self, target: Target, eos: frozenset[int], cost_repeats: int = 0) -> None:
        super().__init__(target)
        self._eos, self.cost_repeats = eos, cost_repeats
        self._measured: list[Costs] = []  # one, shared with those that are apart
        self.prior = None

    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs:
        """Seconds of the pieces of a round, measured once for all methods of the run."""
        if not self.cost_repeats or exact:
            return super().costs(batch_size, exact)
        if not self._measured:
            self._measured.append(measure(self.stack, repeats=self.cost_repeats, within=None))
        return self._measured[0]

    def apart(self) -> Self:
        """The same target, whose calls know nothing of this one's."""
        other = copy.copy(self)
        other.remembered = self.remembered.copy()
        return other

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos


class Ours:
    """A policy through the public `stream`, one row at a time.

    What a method's policy learns goes from one question to its next, as it does for every caller of `Target.generate`.
    """

    def __init__(self, target: Bare, method: MethodName, temperature: float, limit: float, keep_rounds: bool) -> None:
        self.name, self.target, self.temperature, self.limit = method.name, target.apart(), temperature, limit
        self.keep_rounds = keep_rounds
        self.settings: dict[str, Any] = {"policy": method.kind}
        if method.kind == "adaptive" and method.options:
            self.settings["drafts"] = method.options
        elif method.options:
            self.settings["exit_layer"], self.settings["num_draft_tokens"] = method.numbers
            layers = target.stack.num_layers
            if not self.settings["exit_layer"] < layers:
                raise ValueError(f"method {self.name!r}: the exit layer must lie in 1..{layers - 1} for this model")

    def __call__(self, prompt: Prompt) -> Turn:
        (rounds, steps), seconds = timed(lambda: self._decode(prompt), self.target.stack.device)
        return self._turn(rounds, steps, seconds)

    def close(self) -> None:
        pass

    def _decode(self, prompt: Prompt) -> tuple[list[Round], Steps]:
        steps, rounds = Steps(self.limit), []
        sampling = {"temperature": self.temperature, "seed": prompt.seed}
        # As `generate` decodes, since nobody waits for a round; the others are asked for whole outputs, too.
        length = {"max_new_tokens": prompt.max_new_tokens, "max_batch_size": 1, "burst": WHOLE_BURST}
        stream = self.target.stream([prompt.ids], **self.settings, **sampling, **length)  # type: ignore[arg-type]
        for round_ in stream:
            rounds.append(round_)
            if round_.rows:
                steps.add(len(round_.rows[0].tokens))
        return rounds, steps

    def _turn(self, rounds: list[Round], steps: Steps, seconds: float) -> Turn:
        done = self._completion(rounds)
        stages = {stage: sum(getattr(round_.seconds, stage) for round_ in rounds) for stage in STAGES}
        layers = self.target.stack.num_layers
        return Turn(
            done.tokens,
            seconds,
            accept_lengths=steps.sizes,
            step_seconds=shared(steps.seconds, [round_ for round_ in rounds if round_.rows]),
            prefill_seconds=stages["prefill"],
            stage_seconds=stages,
            layer_passes=sum(layer_passes(round_, layers) for round_ in rounds),
            stats=done.stats,
            rounds=[_record(round_) for round_ in rounds] if self.keep_rounds else [],
        )

    @staticmethod
    def _completion(rounds: list[Round]) -> Completion:
        (done,) = (row.completion for round_ in rounds for row in round_.rows if row.completion is not None)
        return done


def layer_passes(round_: Round, num_layers: int) -> int:
    """Layers that run one after another in a round of one row: all of them once, and the early ones again per draft."""
    if round_.plan is None:
        return 0
    exit_layer = round_.exit_layer or 0
    return num_layers + exit_layer * len(round_.rows[0].drafted)


def shared(stamped: list[float], rounds: Sequence[Round]) -> list[float]:
    """Seconds of every step, by the clock; rounds that came at once share theirs by what each took itself."""
    shared, at = list(stamped), 0
    while at < len(rounds):
        end = at + 1
        while end < len(rounds) and rounds[end].program_index:
            end += 1
        own = [round_.seconds.total for round_ in rounds[at:end]]
        if at and sum(own) > 0:  # the first of all has read the prompt, and comes alone
            scale = sum(stamped[at:end]) / sum(own)
            shared[at:end] = [scale * seconds for seconds in own]
        at = end
    return shared


def _record(round_: Round) -> dict[str, Any]:
    row = round_.rows[0] if round_.rows else None
    return {
        "exit_layer": round_.exit_layer,
        "num_drafted": len(row.drafted) if row else 0,
        "num_accepted": row.num_accepted if row else 0,
        "num_tokens": len(row.tokens) if row else 0,
        "seconds": {stage: round(getattr(round_.seconds, stage), 7) for stage in STAGES},
    }
