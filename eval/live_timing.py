"""Time calls of live decoding, with stages, plans and output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

from eval.measurement import Say, no_garbage_collection, rotated, synchronize
from eval.models import Ids, decode, measured_costs, with_policy
from eval.replay import Overhead, Overheads
from eval.tasks import trace_of
from eval.traces import Trace
from selfspec import LLM, SamplingParams
from selfspec.calibrate.readings import mean
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.core import RoundOutput, StageSeconds
from selfspec.decoding.outputs import SpecStats

COST_REPEATS = 3  # of the cost measurement before every repeat; with 1, predictions varied by a fifth
STAGES = ("draft", "verify", "head", "pick", "shadow", "control", "rest")


class Method(NamedTuple):
    """A method to time. Every call makes a new policy, so that no call profits from another one's texts."""

    name: str
    kind: str  # "plain", "adaptive", "fixed", or "other"
    make: Callable[[], Policy]
    settings: Mapping[str, int]
    exact: bool = False  # decoded in exact mode


class Workload(NamedTuple):
    """A model, its prompts, and the traces of plain decoding of each prompt."""

    llm: LLM
    prompts: Ids
    traces: Sequence[Trace]
    costs: Costs

    def filled(self, batch_size: int) -> Workload:
        """Repeat the prompts in order until they fill whole batches, at least two.

        A batch that is not full would be measured as a full one.
        """
        least = max(len(self.prompts), 2 * batch_size)
        order = [i % len(self.prompts) for i in range(least + -least % batch_size)]
        return self._replace(prompts=[self.prompts[i] for i in order], traces=[self.traces[i] for i in order])


def workload_of(llm: LLM, prompts: Ids, num_tokens: int, costs: Costs, task: str, say: Say) -> Workload:
    """Decode every prompt plainly, up to `num_tokens` or the end of the context, and record the traces."""
    say(f"{task}: decoding and recording {len(prompts)} prompts")
    traces = [trace_of(llm, prompt, num_tokens, SamplingParams(), task) for prompt in prompts]
    return Workload(llm, prompts, traces, costs)


@dataclass(frozen=True, slots=True)
class Call:
    """One call over all prompts of a workload."""

    wall: float  # seconds of the whole call
    before: float  # seconds before the first round: weights are checked, requests are made
    prefill: float
    seconds: dict[str, float]  # by stage of a round
    rounds: int
    exits: Counter[int | None]  # rounds by planned exit layer; None is plain
    drafting_rows: int  # rows of all rounds that draft
    stats: SpecStats
    tokens: list[list[int]]  # per prompt
    overheads: Overheads
    correction: Any = None  # the adaptive policy's cost correction when the call began
    costs: Costs | None = None  # measured right before the call's repeat

    @property
    def decoding(self) -> float:
        """Seconds of the rounds, as in replay: without the time before them and without prefill."""
        return self.wall - self.before - self.prefill


def call(
    workload: Workload,
    method: Method,
    batch_size: int,
    max_tokens: int | None = None,
    corrections: dict[str, Any] | None = None,
    costs: Costs | None = None,
) -> Call:
    """Decode all prompts, each to its trace's length or `max_tokens`; when a row ends, the next prompt is admitted.

    Args:
        corrections: by method, the cost correction of its latest adaptive policy, from which the next one starts;
            updated in place.
        costs: the current cost table, stored with the call.
    """
    policy, device = method.make(), workload.llm.target.split.device
    correction = None if corrections is None else corrections.get(method.name)
    if isinstance(policy, Adaptive) and correction is not None:
        policy.set_correction(correction)
    limits = [min(len(trace.tokens), max_tokens or len(trace.tokens)) for trace in workload.traces]
    llm = with_policy(workload.llm, policy=policy, max_num_seqs=batch_size, exact=method.exact)
    done, times = list[RoundOutput](), list[float]()

    def on_round(round_: RoundOutput) -> None:
        times.append(perf_counter())
        done.append(round_)

    synchronize(device)
    start = perf_counter()
    outputs = decode(llm, workload.prompts, limits, on_round=on_round)
    synchronize(device)
    wall = perf_counter() - start
    if corrections is not None and isinstance(policy, Adaptive):
        corrections[method.name] = policy.state()["correction"]
    planned = [round_ for round_ in done if round_.plan is not None]
    first = next((i for i, round_ in enumerate(done) if i and not round_.round_index), len(done))  # of program 2
    before = times[0] - start - sum(round_.seconds.total for round_ in done[:first])
    between = (wall - before - sum(round_.seconds.total for round_ in done)) / max(1, len(planned))
    return Call(
        wall,
        before,
        sum(round_.seconds.prefill for round_ in done),
        {stage: sum(getattr(round_.seconds, stage) for round_ in done) for stage in STAGES},
        len(planned),
        Counter(r.exit_layer for r in planned),
        sum(len(r.rows) for r in planned if r.exit_layer is not None),
        sum((output.stats or SpecStats() for output in outputs), SpecStats()),
        [output.token_ids for output in outputs],
        _overheads(planned, between),
        correction,
        costs,
    )


def _overheads(planned: Sequence[RoundOutput], between: float) -> Overheads:
    """Mean overheads of rounds that draft and of plain rounds; where there are none of one kind, those of the other."""
    taken: dict[bool, list[StageSeconds]] = {}
    for each in planned:
        taken.setdefault(each.exit_layer is not None, []).append(each.seconds)
    known = {
        drafts: Overhead(fmean([one.control for one in of]), fmean([one.rest for one in of]), between)
        for drafts, of in taken.items()
    }
    return {kind: known.get(kind, known.get(not kind, Overhead())) for kind in (False, True)}


def interleave(
    workload: Workload, methods: Sequence[Method], batch_size: int, repeats: int, warmup_tokens: int, say: Say
) -> dict[str, list[Call]]:
    """Every method's timed calls, one per repeat, in rotating order, after a short untimed call of each.

    A policy starts with the cost correction of the method's last policy, as between calls of the library: it depends on
    the machine, not on texts. Costs are measured again before every repeat, since ratios between pieces of a round
    change by a tenth within minutes when other programs use the memory.
    """
    corrections: dict[str, Any] = {}
    for method in methods:
        call(workload, method, batch_size, warmup_tokens, corrections)
    calls: dict[str, list[Call]] = {method.name: [] for method in methods}
    for repeat in range(repeats):
        costs = measured_costs(workload.llm, (batch_size,), COST_REPEATS, counts=mean)
        with no_garbage_collection():
            for method in rotated(methods, repeat):
                calls[method.name].append(call(workload, method, batch_size, corrections=corrections, costs=costs))
        say(f"repeat {repeat + 1} of {repeats}")
    return calls
