"""Replay: run a policy on recorded traces, at any cost table, without a model.

The simulator admits rows, prefills, plans and accepts as the engine does; a test compares the two round by round.
Where a trace has no drafts of copied layers, copies are assumed to draft as the layers do.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from eval.methods import MethodName, parse_method
from eval.traces import Bools, Floats, Trace, draft, draft_lengths, lookup_round
from selfspec.control.costs import Costs
from selfspec.control.plan import SEED_POSITIONS, Policy
from selfspec.control.registry import POLICIES, make_policy
from selfspec.core import Plan, Request, RoundOutput, RowRound, Sequence, ShadowPicks, StageSeconds
from selfspec.decoding.checks import CheckedPolicy
from selfspec.drafting.lookup import RowLookup
from selfspec.executors.base import RoundDraft, next_draft
from selfspec.executors.prefill import shares
from selfspec.params import SamplingParams

PREFILL_CHUNK = 512  # the engine's default
DEADLINE = 0.25  # seconds after which a program begins no further round; that of `generate`


class Overhead(NamedTuple):
    """Seconds per round spent in the interpreter."""

    control: float = 0.0  # in the policy
    rest: float = 0.0  # around a round's forwards
    between: float = 0.0  # between rounds; no policy observes these


Overheads = Mapping[bool, Overhead]  # True: of rounds that draft, False: of plain rounds


@dataclass(slots=True)
class Replayed:
    """The rounds of a policy over some traces, and their predicted seconds."""

    rounds: list[RoundOutput] = field(default_factory=list)  # each with the plan of this round only
    seconds: float = 0.0  # of rounds and shadow picks at prompts, without prefill
    plain_seconds: float = 0.0  # of plain decoding for the same tokens in the same batches
    control: float = 0.0  # measured seconds of the policy itself; not part of the other figures
    observing: float = 0.0  # of them, those of taking the outcomes of the last program

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for round_ in self.rounds for row in round_.rows)


class SimulatedRow(NamedTuple):
    """A sequence that decodes the output of a trace."""

    sequence: Sequence
    trace: Trace

    @classmethod
    def of(cls, seq_id: int, trace: Trace) -> SimulatedRow:
        params = SamplingParams(temperature=float(trace.is_sampled))
        request, length = Request(list(trace.prompt), params), trace.prompt_length + len(trace.tokens)
        return cls(Sequence(seq_id, request, list(trace.prompt), length, new_lookup=RowLookup), trace)

    @property
    def at(self) -> int:
        """Tokens emitted."""
        return self.sequence.num_tokens - self.trace.prompt_length


def replay(
    traces: abc.Sequence[Trace],
    policy: Policy,
    costs: Costs,
    batch_size: int = 1,
    prefill_chunk: int = PREFILL_CHUNK,
    overheads: Overheads = MappingProxyType({}),
    deadline: float = DEADLINE,
    is_timed: bool = False,
) -> Replayed:
    """Simulate decoding the traces in order with this policy.

    Args:
        batch_size: rows decoded together; when a row ends, the next trace is admitted.
        prefill_chunk: maximum prompt tokens of the prefill between two programs of rounds.
        overheads: seconds of the interpreter; where there is no entry, those of the cost table.
        deadline: seconds after which a program begins no further round, where its plan has no deadline.
        is_timed: rounds hold the policy's measured seconds, as the engine's do; its plans then depend on the machine.
    """
    done = Replayed()
    waiting = deque(SimulatedRow.of(i, trace) for i, trace in enumerate(traces))
    rows: list[SimulatedRow] = []
    checked = CheckedPolicy(policy, traces[0].num_layers if traces else 1)
    while waiting or rows:
        while waiting and len(rows) < batch_size:
            rows.append(waiting.popleft())
        done.seconds += prefill(rows, prefill_chunk, policy, costs)
        ready = [row for row in rows if row.sequence.is_prefilled]
        if ready:
            policy.set_waiting(len(waiting), len(rows) - len(ready))
            run_program(ready, len(ready) < len(rows), checked, costs, done, overheads, deadline, is_timed)
        rows = [row for row in rows if row.sequence.num_remaining]
    return done


def prefill(rows: abc.Sequence[SimulatedRow], budget: int, policy: Policy, costs: Costs) -> float:
    """Prefill up to `budget` prompt tokens, and seed the policy with its shadow picks, in the engine's order.

    Returns:
        Seconds of the shadow picks.
    """
    seeds: list[tuple[Sequence, ShadowPicks]] = []
    lacking = [row.trace.prompt_length - 1 - row.sequence.num_cached for row in rows]
    for (sequence, trace), count in zip(rows, shares(lacking, budget), strict=True):
        if count <= 0:
            continue
        end = trace.prompt_length - 1
        first = max(sequence.num_cached, end - SEED_POSITIONS)
        sequence.num_cached += count
        if first >= sequence.num_cached:
            continue
        layers = tuple(policy.seed_layers(sequence))
        if layers:
            hits, confidences = trace.prompt_hits, trace.prompt_confidences
            base = end - hits.shape[1]
            start, stop = max(0, first - base), max(0, sequence.num_cached - base)  # a trace may have fewer positions
            if start < stop:
                seeds.append((sequence, _shadow_of(hits, confidences, layers, start, stop)))
    seconds = 0.0
    for sequence, shadow in seeds:
        policy.seed(sequence, shadow)
        seconds += costs.seed(len(shadow.layers), len(shadow.hits[0]))
    return seconds


def run_program(
    ready: abc.Sequence[SimulatedRow],
    is_single: bool,
    checked: CheckedPolicy,
    costs: Costs,
    done: Replayed,
    overheads: Overheads,
    deadline: float,
    is_timed: bool = False,
) -> None:
    """Run one program of rounds; `is_single`: of one round, since other rows still need prefill."""
    clock = StageSeconds()
    sequences = [row.sequence for row in ready]
    plan = checked.plan(sequences)
    clock.lap("control")
    rounds, begin = list[RoundOutput](), done.seconds
    deadline = deadline if plan.deadline is None else plan.deadline
    while len(rounds) < (1 if is_single else plan.num_rounds):
        draft = next_draft(sequences, plan)
        rounds.append(_round(ready, draft, costs, done, overheads))
        is_over = draft.plan.shadow is not None or any(not one.num_remaining for one in sequences)
        if is_over or done.seconds - begin >= deadline:
            break
        if plan.ledger is not None:
            ledger = plan.ledger.after(rounds[-1])
            plan = replace(plan, ledger=ledger)
            if rounds[-1].exit_layer and not ledger.covers_layers:
                break
    if is_timed:
        rounds[0].seconds.control += clock.control + done.observing
    done.control += clock.control
    clock = StageSeconds()
    checked.observe(plan, rounds)
    clock.lap("control")
    done.observing = clock.control
    done.control += clock.control


def _round(
    ready: abc.Sequence[SimulatedRow], draft: RoundDraft, costs: Costs, done: Replayed, overheads: Overheads
) -> RoundOutput:
    plan, between = draft.plan, 0.0
    context = sum([row.sequence.num_tokens for row in ready]) / len(ready)
    outcomes = _outcomes(ready, draft)
    took = _seconds(plan, outcomes, context, costs)
    overhead = overheads.get(plan.exit_layer is not None)
    if overhead is not None:
        took.control, took.rest, between = overhead
    for outcome in outcomes:
        outcome.sequence.append(outcome)
    drafted = any(outcome.num_drafted or outcome.withdrawn is not None for outcome in outcomes)
    made = RoundOutput(plan.exit_layer if drafted else None, outcomes, took, plan)
    done.rounds.append(made)
    done.seconds += took.total + between
    longest = max(row.num_emitted for row in outcomes)
    emitting = (sum(row.num_emitted > i for row in outcomes) for i in range(longest))
    done.plain_seconds += sum(costs.plain_round(rows, context + i) for i, rows in enumerate(emitting))
    return made


def _seconds(plan: Plan, outcomes: abc.Sequence[RowRound], context: float, costs: Costs) -> StageSeconds:
    """Seconds of a round whose rows hold `context` tokens each."""
    drafted, copies = [o.num_drafted for o in outcomes], plan.draft_bits is not None
    took = StageSeconds(**costs.stages(plan.exit_layer, drafted, context, copies=copies))
    num_withdrawn = sum(outcome.withdrawn is not None for outcome in outcomes)
    if num_withdrawn and plan.exit_layer:
        took.draft += costs.withdrawal(plan.exit_layer, num_withdrawn, context, copies=copies)
    if plan.shadow is not None:
        num_judged = sum(len(o.shadow.hits[0]) for o in outcomes if o.shadow is not None)
        took.shadow = costs.shadow(len(plan.shadow.layers), num_judged, plan.shadow.exact)
    return took


def _outcomes(ready: abc.Sequence[SimulatedRow], draft: RoundDraft) -> list[RowRound]:
    if draft.given is not None:
        pairs = zip(ready, draft.given, strict=True)
        return [lookup_round(*row, row.at, given) for row, given in pairs]
    lengths = draft_lengths([(row.trace, row.at) for row in ready], draft.plan)
    return [_outcome(row, i, draft.plan, length) for i, (row, length) in enumerate(zip(ready, lengths, strict=True))]


def _outcome(row: SimulatedRow, index: int, plan: Plan, length: int) -> RowRound:
    outcome = draft(*row, row.at, plan, length)
    if plan.shadow is not None and index in plan.shadow.rows and plan.shadow.max_columns > 0:
        stop = row.at + min(outcome.num_emitted, plan.shadow.max_columns)
        trace, exact = row.trace, plan.shadow.exact
        hits = trace.hits if exact else trace.short_hits
        confidences = trace.confidences if exact else trace.short_confidences
        outcome.shadow = _shadow_of(hits, confidences, plan.shadow.layers, row.at, stop)
    return outcome


def _shadow_of(hits: Bools, confidences: Floats, layers: abc.Sequence[int], start: int, stop: int) -> ShadowPicks:
    index = np.array(layers) - 1
    return ShadowPicks(tuple(layers), hits[index, start:stop], confidences[index, start:stop])


def parse_policy(name: str) -> MethodName:
    """Parse a policy's name, such as `del`, `fixed:4,4` or `adaptive:exit+copies`.

    Raises:
        ValueError: it is no policy of selfspec.
    """
    method = parse_method(name)
    if not method.is_ours:
        raise ValueError(f"policies must be among {', '.join(POLICIES)}, or such as adaptive:exit+copies, got {name!r}")
    return method


def make(
    name: str,
    costs: Costs,
    exit_layer: int | None = None,
    num_speculative_tokens: int | None = None,
    prior: object = None,
) -> Policy:
    """Make a new policy by name, with these costs.

    Args:
        exit_layer, num_speculative_tokens: used where the name has none and the policy does not choose them.
        prior: initial acceptance statistics.

    Raises:
        ValueError: the name is unknown, or the exit layer or draft length is not possible.
    """
    own = {"exit_layer": exit_layer, "num_speculative_tokens": num_speculative_tokens} | parse_policy(name).settings
    given = own["exit_layer"], own["num_speculative_tokens"]
    made = make_policy(own["policy"], costs.num_layers, *given, lambda: costs, prior, own.get("drafters"))
    made.set_copies(costs.copies is not None)
    return made
