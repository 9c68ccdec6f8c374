"""Timed live decoding: what one call of a policy took, by stage, what it planned, and what it wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from eval.methods import Endless, Ids
from eval.replay import Beside
from eval.tasks import trace_of
from eval.timing import Say, quiet, rotated, timed
from eval.traces import Trace
from selfspec.calibrate.measure import measure
from selfspec.calibrate.readings import mean
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.control.rows import StageSeconds
from selfspec.decoding.results import Round
from selfspec.decoding.stats import SpecStats
from selfspec.executors.pick import Sampling
from selfspec.target import WHOLE_BURST

COST_REPEATS = 3  # beside every repeat: of one, a slow minute of the machine moved predictions by a fifth
STAGES = ("draft", "verify", "head", "pick", "shadow", "control", "rest")


class Way(NamedTuple):
    """A way to decode. Its policy is made anew for every call, so that none knows of another's texts; see `call`."""

    name: str
    kind: str  # "plain", "adaptive", "fixed", or "other"
    make: Callable[[], Policy]
    settings: Mapping[str, int]


class Scene(NamedTuple):
    """A target and its prompts, with what plain decoding writes after each of them alone."""

    target: Endless
    prompts: Ids
    traces: Sequence[Trace]
    costs: Costs
    temperature: float = 0.0
    seeds: Sequence[int] = ()  # per prompt, of sampled output; none given: 0

    def only(self, index: int) -> Scene:
        """One prompt of the scene."""
        return self._ordered([index])

    def _ordered(self, order: Sequence[int]) -> Scene:
        prompts, traces = [self.prompts[i] for i in order], [self.traces[i] for i in order]
        return self._replace(prompts=prompts, traces=traces, seeds=[self.seeds[i] for i in order if self.seeds])

    def filled(self, batch_size: int) -> Scene:
        """All prompts, from the first on again and again, until there are two full batches or more, the last one full.

        A batch that begins half empty would be measured as if it were full.
        """
        least = max(len(self.prompts), 2 * batch_size)
        return self._ordered([i % len(self.prompts) for i in range(least + -least % batch_size)])


class Call(NamedTuple):
    """One call over all prompts of a scene."""

    wall: float
    seconds: dict[str, float]  # by stage of a round
    before: float  # seconds before the first round, in which weights are checked and requests made
    prefill: float
    rounds: int
    exits: Counter[int | None]  # rounds by planned exit layer; None is plain
    rows: int  # rows of drafting rounds, added up
    stats: SpecStats
    tokens: list[list[int]]  # per prompt
    beside: Beside = MappingProxyType({})  # what the interpreter took per round
    correction: Any = None  # what the clock had told earlier policies, of one that minds it
    costs: Costs | None = None  # of this machine, measured right before the repeat it is of

    @property
    def decoding(self) -> float:
        """Seconds of rounds alone, as replay has them: without what precedes them and the reading of prompts."""
        return self.wall - self.before - self.prefill


def scene_of(target: Endless, prompts: Ids, num_tokens: int, costs: Costs, task: str, say: Say) -> Scene:
    """Decode every prompt by itself, plainly, as far as the model's context lets it, and record its trace."""
    say(f"{task}: decoding and recording {len(prompts)} prompts")
    traces = [trace_of(target, prompt, num_tokens, Sampling(), task) for prompt in prompts]
    return Scene(target, prompts, traces, costs)


def call(
    scene: Scene, way: Way, batch_size: int, most: int | None = None, corrections: dict[str, Any] | None = None
) -> Call:
    """Decode all prompts, as many tokens each as its trace has, or `most`; rows join as others end.

    Args:
        corrections: by way, what the clock told earlier policies here: where they start, brought up to date.
    """
    policy = way.make()
    correction = None if corrections is None else corrections.get(way.name)
    if isinstance(policy, Adaptive) and correction is not None:
        policy.set_correction(correction)
    room = [min(len(trace.tokens), most or len(trace.tokens)) for trace in scene.traces]
    sampling = {"temperature": scene.temperature, "seed": scene.seeds or 0}
    options = {"policy": policy, "max_batch_size": batch_size, "max_new_tokens": room, "burst": WHOLE_BURST, **sampling}
    stream = scene.target.stream
    device = scene.target.stack.device
    coming, before = timed(lambda: stream(scene.prompts, **options), device)  # type: ignore[arg-type]
    rounds, after = timed(lambda: list(coming), device)
    if corrections is not None and isinstance(policy, Adaptive):
        corrections[way.name] = policy.state()["correction"]
    return _call(rounds, before, after)._replace(correction=correction)


def _call(rounds: Sequence[Round], before: float, after: float) -> Call:
    rows = [row for round_ in rounds for row in round_.rows]
    done = sorted((row.completion for row in rows if row.completion is not None), key=lambda c: c.request_id)
    planned = [round_ for round_ in rounds if round_.plan is not None]
    return Call(
        before + after,
        seconds={stage: sum(getattr(round_.seconds, stage) for round_ in rounds) for stage in STAGES},
        before=before,
        prefill=sum(round_.seconds.prefill for round_ in rounds),
        rounds=len(planned),
        exits=Counter(r.exit_layer for r in planned),
        rows=sum(len(r.rows) for r in planned if r.exit_layer is not None),
        stats=sum((completion.stats for completion in done), SpecStats()),
        tokens=[completion.tokens for completion in done],
        beside=_beside(planned, (after - sum(round_.seconds.total for round_ in rounds)) / max(1, len(planned))),
    )


def _beside(rounds: Sequence[Round], between: float) -> dict[bool, tuple[float, float, float]]:
    """See `Call.beside`; where no round is of a kind, as of the other one.

    Args:
        between: seconds between two rounds.
    """
    taken: dict[bool, list[StageSeconds]] = {}
    for each in rounds:
        if each.plan is not None:
            taken.setdefault(each.exit_layer is not None, []).append(each.seconds)
    told = {
        drafts: (fmean([one.control for one in of]), fmean([one.rest for one in of]), between)
        for drafts, of in taken.items()
    }
    return {kind: told.get(kind, told.get(not kind, (0.0, 0.0, 0.0))) for kind in (False, True)}


def interleave(
    scene: Scene, ways: Sequence[Way], batch_size: int, repeats: int, warmup_tokens: int, say: Say
) -> dict[str, list[Call]]:
    """Every way's timed calls, one per repeat, in an order that rotates; a short call of each goes before, untimed.

    A policy starts with what the clock told the one before it, as `generate` has it: of the machine, not of the texts.
    Before every repeat costs are measured anew, briefly: what a part of a round takes beside another differs by a tenth
    from one minute to the next where others use the memory. Their means count, since calls meet others, too.
    """
    corrections: dict[str, Any] = {}
    for way in ways:
        call(scene, way, batch_size, warmup_tokens, corrections)
    calls: dict[str, list[Call]] = {way.name: [] for way in ways}
    for repeat in range(repeats):
        costs = measure(scene.target.stack, (batch_size,), COST_REPEATS, within=None, counts=mean)
        with quiet():
            for way in rotated(ways, repeat):
                calls[way.name].append(call(scene, way, batch_size, corrections=corrections)._replace(costs=costs))
        say(f"repeat {repeat + 1} of {repeats}")
    return calls
