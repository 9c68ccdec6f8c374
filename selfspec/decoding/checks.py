"""What an engine refuses: requests that could never be decoded, and plans that its sequences cannot follow."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from itertools import pairwise

from selfspec.control.plan import GRAMMAR, NUM_BINS, NUM_LOOKUP_BINS, LookupTable, Policy, ShadowPlan
from selfspec.core import LOOKUP, UNBOUNDED_ROUNDS, Plan, Request, RoundOutput, Sequence
from selfspec.errors import is_number, whole
from selfspec.model.split_model import SplitModel

MOST_CHECKED = 4  # checked plans that are remembered
PLAIN = Plan(None, (), num_rounds=UNBOUNDED_ROUNDS)


class CheckedPolicy:
    """Asks a policy for plans, refuses what rows cannot follow, and drafts nothing for rows that opted out."""

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self._table: tuple[LookupTable | None, int] = None, 0  # the last one that was checked, and its rows
        self._checked: list[tuple[Plan, int, Plan]] = []  # plans, rows, and the plans as they are run; the last first
        self._is_planned = True  # the last plan by the policy

    def plan(self, rows: list[Sequence]) -> Plan:
        """The plan of a program of these rows.

        Raises:
            ValueError: the rows cannot follow it.
        """
        speculate = [row.request.params.speculative for row in rows]
        self._is_planned = any(speculate)
        if not self._is_planned:
            return check_plan(PLAIN, len(rows), self._num_layers)
        asked = self.policy.plan(rows)
        plan = next((fit for one, count, fit in self._checked if one is asked and count == len(rows)), None)
        if plan is None:
            plan = check_plan(asked, len(rows), self._num_layers)
            self._checked = [(asked, len(rows), plan), *self._checked[: MOST_CHECKED - 1]]
        if self.policy.most_forced > plan.most_forced and any(row.grammar is not None for row in rows):
            plan = replace(plan, most_forced=self.policy.most_forced)
        if plan.lookups is not None and (plan.lookups is not self._table[0] or len(rows) != self._table[1]):
            check_lookups(plan.lookups, len(rows))
            self._table = plan.lookups, len(rows)
        return plan if all(speculate) else _without(plan, speculate)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        """Let the policy observe what came of its last plan; rounds that it did not plan are left out.

        Those in which grammars forced tokens say nothing of other drafts.
        """
        if plan.most_forced:
            rounds = [round_ for round_ in rounds if not any(row.source == GRAMMAR for row in round_.rows)]
        if self._is_planned and rounds:
            self.policy.observe(plan, rounds)


def _without(plan: Plan, speculate: abc.Sequence[bool]) -> Plan:
    """The plan without drafts and shadow picks for rows that do not speculate."""
    none, table, shadow = (0,) * NUM_LOOKUP_BINS, plan.lookups, plan.shadow
    lengths = tuple([n if may else 0 for n, may in zip(plan.draft_lengths, speculate, strict=True)])
    if table is not None:
        own = tuple([row if may else none for row, may in zip(table.lengths, speculate, strict=True)])
        table = table._replace(lengths=own)
    if shadow is not None:
        rows = tuple([i for i in shadow.rows if speculate[i]])
        shadow = shadow._replace(rows=rows) if rows else None
    return replace(plan, draft_lengths=lengths, lookups=table, shadow=shadow)


def check_request(request: Request, split: SplitModel, has_tokenizer: bool) -> None:
    """ValueError unless the model can read the prompt and write more."""
    if request.params.stop and not has_tokenizer:
        raise ValueError("stop needs a tokenizer to turn tokens into text; load with tokenizer=...")
    limit, vocab = split.context_limit, split.vocab_size
    if any(not isinstance(token, str) and token >= vocab for token in request.params.prediction or ()):
        raise ValueError(f"prediction must hold token ids in 0..{vocab - 1}, the model's vocabulary")
    if any(token >= vocab for token in request.params.logit_bias or ()):
        raise ValueError(f"logit_bias must name token ids in 0..{vocab - 1}, the model's vocabulary")
    if not all(0 <= token < vocab for token in request.prompt_token_ids):
        wrong = next(token for token in request.prompt_token_ids if not 0 <= token < vocab)
        raise ValueError(f"a prompt's token ids must lie in 0..{vocab - 1}, the model's vocabulary, got {wrong}")
    if len(request.prompt_token_ids) >= limit:
        raise ValueError(
            f"prompt has {len(request.prompt_token_ids)} tokens and the model's context holds {limit}; "
            f"shorten it by at least {len(request.prompt_token_ids) - limit + 1}"
        )


def check_plan(plan: Plan, num_rows: int, num_layers: int) -> Plan:
    """The plan, its whole numbers as ints, which alone compiled code takes.

    Raises:
        ValueError: so many rows of a model of so many layers cannot follow it.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"a policy must make plans of class selfspec.Plan, got {plan!r}")
    if plan.shadow is not None:
        _check_shadow(plan.shadow, plan.exit_layer, num_rows, num_layers)
    if plan.stop is not None and len(plan.stop.calibration) != NUM_BINS:
        raise ValueError(f"a plan's stop needs {NUM_BINS} calibrated bins, got {len(plan.stop.calibration)}")
    if plan.draft_vocab is not None:
        whole("a plan's draft_vocab", plan.draft_vocab, 1)
    if plan.draft_bits not in (None, 4):
        raise ValueError(f"a plan's draft_bits must be 4 or None (the layers themselves), got {plan.draft_bits}")
    whole("a plan's most_forced", plan.most_forced, 0)
    if plan.deadline is not None and not (is_number(plan.deadline) and plan.deadline >= 0):
        raise ValueError(f"a plan's deadline must be seconds, at least 0, or None, got {plan.deadline!r}")
    exit_layer, lengths = plan.exit_layer, (0,) * num_rows
    if exit_layer is not None:
        exit_layer, last = whole("a plan's exit_layer", exit_layer), num_layers - 1
        if len(plan.draft_lengths) != num_rows:
            raise ValueError(f"a plan's draft_lengths must be one per row, {num_rows}, got {len(plan.draft_lengths)}")
        if not LOOKUP <= exit_layer <= last:
            raise ValueError(f"a plan's exit_layer must be None or lie in 0..{last} (0: lookup), got {exit_layer}")
        lengths = tuple([whole("a plan's draft length", length, 0) for length in plan.draft_lengths])
    num_rounds = whole("a plan's num_rounds", plan.num_rounds, 1)
    return replace(plan, exit_layer=exit_layer, draft_lengths=lengths, num_rounds=num_rounds)


def check_lookups(lookups: LookupTable, num_rows: int) -> None:
    """ValueError unless so many rows can draft by this table, which nobody can change any more."""
    if not isinstance(lookups, LookupTable):
        raise ValueError(f"a plan's lookups must be a LookupTable or None, got {lookups!r}")
    lengths, gains, needs = lookups
    sizes = {len(of_row) for of_row in (*lengths, *gains)}
    if len(lengths) != num_rows or len(gains) != num_rows or sizes - {NUM_LOOKUP_BINS} or not needs:
        raise ValueError(
            f"a plan's lookups must have lengths and gains of every row, {num_rows}, by {NUM_LOOKUP_BINS} bins of "
            f"sources and match lengths, and needs, got {len(lengths)} rows' lengths and {len(gains)} rows' gains of "
            f"{sorted(sizes)} bins, and {len(needs)} needs"
        )
    wrong: list[object] = [part for part in (lengths, gains, needs, *lengths, *gains) if type(part) is not tuple]
    wrong += [n for of_row in lengths for n in of_row if type(n) is not int]
    wrong += [x for numbers in (*gains, needs) for x in numbers if type(x) is not float]
    if wrong:
        raise ValueError(
            "a plan's lookups must be tuples, of whole numbers as lengths and of floats as gains and needs, "
            f"got {wrong[0]!r} among them"
        )


def _check_shadow(shadow: ShadowPlan, exit_layer: int | None, num_rows: int, num_layers: int) -> None:
    layers, chosen = shadow.layers, shadow.rows
    ascends = all(low < high for low, high in pairwise([0, *layers, num_layers])) and exit_layer not in layers
    if not layers or not ascends or not all(0 <= i < num_rows for i in chosen):
        raise ValueError(
            f"a plan's shadow must name, in order, layers in 1..{num_layers - 1}, not its exit "
            f"layer, and rows below {num_rows}, got layers {list(layers)} and rows {list(chosen)}"
        )
