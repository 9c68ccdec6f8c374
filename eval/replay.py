"""Replay: run a policy on recorded traces, at any cost table, without a model.

The simulator admits rows, prefills, plans and accepts as the engine does; a test compares the two round by round.
Where a trace has no drafts of copied layers, copies are assumed to draft as the layers do. Second choices of copies are
always assumed to be those of the layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eval.methods import MethodName, parse_method
from eval.traces import Bools, Floats, Trace, draft, draft_lengths, lookup_outcome
from selfspec.control.costs import Costs
from selfspec.control.plan import SEED_POSITIONS, Plan, Policy
from selfspec.control.registry import POLICIES, make_policy
from selfspec.control.rows import RoundOutcome, RowOutcome, RowState, Shadow, StageSeconds
from selfspec.decoding.checked import CheckedPolicy
from selfspec.drafting.row_lookup import RowLookup
from selfspec.executors.prefill import shares
from selfspec.executors.program import RoundDraft, next_draft

PREFILL_CHUNK = 512  # the engine's default
DEADLINE = 0.25  # seconds after which a program begins no further round; that of `generate`


class Overhead(NamedTuple):
    """Seconds per round spent in the interpreter."""

    control: float = 0.0  # in the policy
    rest: float = 0.0  # around a round's forwards
    between: float = 0.0  # between rounds; no policy observes these


Overheads = Mapping[bool, Overhead]  # True: of rounds that draft, False: of plain rounds


class ReplayedRow(NamedTuple):
    """The counts of one row in a round."""

    request_id: int
    num_drafted: int
    num_accepted: int
    num_emitted: int


class ReplayedRound(NamedTuple):
    """One round; `plan` is the plan of this round only."""

    plan: Plan
    rows: tuple[ReplayedRow, ...]
    seconds: float


@dataclass(slots=True)
class Replayed:
    """The rounds of a policy over some traces, and their predicted seconds."""

    rounds: list[ReplayedRound] = field(default_factory=list)
    seconds: float = 0.0  # of rounds and shadow picks at prompts, without prefill
    plain_seconds: float = 0.0  # of plain decoding for the same tokens in the same batches
    control: float = 0.0  # measured seconds of the policy itself; not part of the other figures

    @property
    def num_tokens(self) -> int:
        return sum(row.num_emitted for round_ in self.rounds for row in round_.rows)

    @property
    def round_seconds(self) -> float:
        """Seconds of the rounds, without shadow picks at prompts."""
        return sum(round_.seconds for round_ in self.rounds)


@dataclass(slots=True)
class SimulatedRow:
    """A row that decodes the output of a trace."""

    request_id: int
    trace: Trace
    at: int = 0  # tokens emitted
    num_cached: int = 0  # prompt tokens in the KV cache
    content: list[int] = field(init=False)
    lookup: RowLookup = field(init=False)

    def __post_init__(self) -> None:
        self.content = list(self.trace.prompt)
        self.lookup = RowLookup(self.content)

    @property
    def room(self) -> int:  # `next_draft` reads it: the number of tokens left
        return len(self.trace.tokens) - self.at

    @property
    def state(self) -> RowState:
        length, is_sampled = self.trace.prompt_length + self.at, self.trace.is_sampled
        return RowState(self.request_id, length, self.room, self.lookup, is_sampled=is_sampled)


def replay(
    traces: Sequence[Trace],
    policy: Policy,
    costs: Costs,
    batch_size: int = 1,
    prefill_chunk: int = PREFILL_CHUNK,
    overheads: Overheads = MappingProxyType({}),
    deadline: float = DEADLINE,
) -> Replayed:
    """Simulate decoding the traces in order with this policy.

    Args:
        batch_size: rows decoded together; when a row ends, the next trace is admitted.
        prefill_chunk: maximum prompt tokens of the prefill between two programs of rounds.
        overheads: seconds of the interpreter; where there is no entry, those of the cost table.
        deadline: seconds after which a program begins no further round, where its plan has no deadline.
    """
    done = Replayed()
    waiting = deque(SimulatedRow(i, trace) for i, trace in enumerate(traces))
    rows: list[SimulatedRow] = []
    checked = CheckedPolicy(policy, traces[0].num_layers if traces else 1)
    while waiting or rows:
        while waiting and len(rows) < batch_size:
            rows.append(waiting.popleft())
        done.seconds += prefill(rows, prefill_chunk, policy, costs)
        ready = [row for row in rows if row.num_cached == row.trace.prompt_length - 1]
        if ready:
            run_program(ready, len(ready) < len(rows), checked, costs, done, overheads, deadline)
        rows = [row for row in rows if row.at < len(row.trace.tokens)]
    return done


def prefill(rows: Sequence[SimulatedRow], budget: int, policy: Policy, costs: Costs) -> float:
    """Prefill up to `budget` prompt tokens, and seed the policy with its shadow picks, in the engine's order.

    Returns:
        Seconds of the shadow picks.
    """
    seeds: list[tuple[RowState, Shadow]] = []
    lacking = [row.trace.prompt_length - 1 - row.num_cached for row in rows]
    for row, count in zip(rows, shares(lacking, budget), strict=True):
        if count <= 0:
            continue
        end = row.trace.prompt_length - 1
        first = max(row.num_cached, end - SEED_POSITIONS)
        row.num_cached += count
        if first >= row.num_cached:
            continue
        layers = tuple(policy.seed_layers(row.state))
        if layers:
            hits, confidences = row.trace.prompt_hits, row.trace.prompt_confidences
            base = end - hits.shape[1]
            start, stop = max(0, first - base), max(0, row.num_cached - base)  # a trace may have fewer positions
            if start < stop:
                seeds.append((row.state, _shadow_of(hits, confidences, layers, start, stop)))
    seconds = 0.0
    for state, shadow in seeds:
        policy.seed(state, shadow)
        seconds += costs.seed(len(shadow.layers), len(shadow.hits[0]))
    return seconds


def run_program(
    ready: Sequence[SimulatedRow],
    is_single: bool,
    checked: CheckedPolicy,
    costs: Costs,
    done: Replayed,
    overheads: Overheads,
    deadline: float,
) -> None:
    """Run one program of rounds; `is_single`: of one round, since other rows still need prefill."""
    clock = StageSeconds()
    plan = checked.plan(ready)
    clock.lap("control")
    rounds, begin = list[RoundOutcome](), done.seconds
    deadline = deadline if plan.deadline is None else plan.deadline
    while len(rounds) < (1 if is_single else plan.num_rounds):
        draft = next_draft(ready, plan)
        rounds.append(_round(ready, draft, costs, done, overheads))
        is_over = draft.plan.shadow is not None or any(not row.room for row in ready)
        if is_over or done.seconds - begin >= deadline:
            break
    clock.lap("rest")
    checked.policy.observe(plan, rounds)
    clock.lap("control")
    done.control += clock.control


def _round(
    ready: Sequence[SimulatedRow], draft: RoundDraft, costs: Costs, done: Replayed, overheads: Overheads
) -> RoundOutcome:
    plan = draft.plan
    context = costs.context_of([row.state.content_length for row in ready])
    outcomes = _outcomes(ready, draft)
    took = _seconds(plan, outcomes, context, costs)
    overhead, between = overheads.get(plan.exit_layer is not None), 0.0
    if overhead is not None:
        took.control, took.rest, between = overhead
    replayed = tuple(_advance(row, outcome) for row, outcome in zip(ready, outcomes, strict=True))
    done.rounds.append(ReplayedRound(plan, replayed, took.total + between))
    done.seconds += took.total + between
    longest = max(row.num_emitted for row in replayed)
    emitting = (sum(row.num_emitted > i for row in replayed) for i in range(longest))
    done.plain_seconds += sum(costs.plain_round(rows, context + i) for i, rows in enumerate(emitting))
    drafted = any(outcome.num_drafted for outcome in outcomes)
    return RoundOutcome(plan.exit_layer if drafted else None, outcomes, took)


def _seconds(plan: Plan, outcomes: Sequence[RowOutcome], context: float, costs: Costs) -> StageSeconds:
    """Seconds of a round whose rows hold `context` tokens each, see `Costs.context_of`."""
    drafted, second = [o.num_drafted for o in outcomes], [o.num_beside for o in outcomes]
    second, copies = second if any(second) else [], plan.draft_bits is not None
    took = StageSeconds(**costs.stages(plan.exit_layer, drafted, context, second, copies=copies))
    if plan.shadow is not None:
        num_judged = sum(len(o.shadow.hits[0]) for o in outcomes if o.shadow is not None)
        took.shadow = costs.shadow(len(plan.shadow.layers), num_judged, plan.shadow.exact)
    return took


def _outcomes(ready: Sequence[SimulatedRow], draft: RoundDraft) -> list[RowOutcome]:
    if draft.given is not None:
        pairs = zip(ready, draft.given, strict=True)
        return [lookup_outcome(row.request_id, guess, row.trace.tokens[row.at :]) for row, guess in pairs]
    lengths = draft_lengths([(row.trace, row.at) for row in ready], draft.plan)
    return [_outcome(row, i, draft.plan, length) for i, (row, length) in enumerate(zip(ready, lengths, strict=True))]


def _outcome(row: SimulatedRow, index: int, plan: Plan, length: int) -> RowOutcome:
    outcome, shadow = draft(row.trace, row.at, plan, length), None
    if plan.shadow is not None and index in plan.shadow.rows and plan.shadow.max_columns > 0:
        stop = row.at + min(outcome.num_emitted, plan.shadow.max_columns)
        trace, exact = row.trace, plan.shadow.exact
        hits = trace.hits if exact else trace.short_hits
        confidences = trace.confidences if exact else trace.short_confidences
        shadow = _shadow_of(hits, confidences, plan.shadow.layers, row.at, stop)
    return outcome._replace(request_id=row.request_id, shadow=shadow)


def _advance(row: SimulatedRow, outcome: RowOutcome) -> ReplayedRow:
    emitted = outcome.num_emitted
    row.content += row.trace.tokens[row.at : row.at + emitted]
    row.at += emitted
    return ReplayedRow(row.request_id, outcome.num_drafted + outcome.num_beside, emitted - 1, emitted)


def _shadow_of(hits: Bools, confidences: Floats, layers: Sequence[int], start: int, stop: int) -> Shadow:
    index = np.array(layers) - 1
    return Shadow(tuple(layers), hits[index, start:stop], confidences[index, start:stop])


def parse_policy(name: str) -> MethodName:
    """Parse a policy's name, such as `del`, `fixed:4,4` or `adaptive:exit+tree`.

    Raises:
        ValueError: it is no policy of selfspec.
    """
    method = parse_method(name)
    if not method.is_ours:
        raise ValueError(f"policies must be among {', '.join(POLICIES)}, or such as adaptive:exit+tree, got {name!r}")
    return method


def make(
    name: str, costs: Costs, exit_layer: int | None = None, num_draft_tokens: int | None = None, prior: object = None
) -> Policy:
    """Make a new policy by name, with these costs.

    Args:
        exit_layer, num_draft_tokens: used where the name has none and the policy does not choose them.
        prior: initial acceptance statistics.

    Raises:
        ValueError: the name is unknown, or the exit layer or draft length is not possible.
    """
    own = parse_policy(name).settings
    exit_layer, num_draft_tokens = (
        own.get("exit_layer", exit_layer),
        own.get("num_speculative_tokens", num_draft_tokens),
    )
    drafts = own.get("drafters")
    made = make_policy(own["policy"], costs.num_layers, exit_layer, num_draft_tokens, lambda: costs, prior, drafts)
    made.set_copies(costs.copies is not None)
    return made
