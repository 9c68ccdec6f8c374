"""What an engine refuses: requests that could never be decoded, and plans that would harm a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from selfspec.control.plan import LOOKUP, NUM_BINS, Lookups, Plan, ShadowPlan, Steady
from selfspec.decoding.request import Request
from selfspec.errors import whole
from selfspec.target.stack import Stack


def check_request(request: Request, stack: Stack, has_tokenizer: bool) -> None:
    """ValueError unless the model can read the prompt and write more."""
    if request.stop and not has_tokenizer:
        raise ValueError("stop needs a tokenizer to turn tokens into text; load with tokenizer=...")
    limit, vocab = stack.context_limit, stack.vocab_size
    if not all(0 <= token < vocab for token in request.prompt):
        wrong = next(token for token in request.prompt if not 0 <= token < vocab)
        raise ValueError(f"a prompt's token ids must lie in 0..{vocab - 1}, the model's vocabulary, got {wrong}")
    if len(request.prompt) >= limit:
        raise ValueError(
            f"prompt has {len(request.prompt)} tokens and the model's context holds {limit}; "
            f"shorten it by at least {len(request.prompt) - limit + 1}"
        )


def check_plan(plan: Plan, num_rows: int, num_layers: int) -> None:
    """ValueError unless a model of so many layers can follow the plan, as long as rows have room for it."""
    if plan.shadow is not None:
        _check_shadow(plan.shadow, plan.exit_layer, num_rows, num_layers)
    if plan.stop is not None and len(plan.stop.calibration) != NUM_BINS:
        raise ValueError(f"a plan's stop needs {NUM_BINS} calibrated bins, got {len(plan.stop.calibration)}")
    if plan.draft_vocab is not None:
        whole("a plan's draft_vocab", plan.draft_vocab, 1)
    if plan.draft_bits not in (None, 4):
        raise ValueError(f"a plan's draft_bits must be 4 or None (the layers themselves), got {plan.draft_bits}")
    if plan.exit_layer is None:
        return
    if plan.trees is not None:
        check_trees(plan)
    last = num_layers - 1
    for length in plan.draft_lengths:
        whole("a plan's draft length", length)
    if not LOOKUP <= plan.exit_layer <= last:
        raise ValueError(f"a plan's exit_layer must be None or lie in 0..{last} (0: lookup), got {plan.exit_layer}")


def check_steady(steady: Steady) -> None:
    """ValueError unless rounds can be decoded before a policy is asked about them; see `check_lookups`, too."""
    whole("the rounds that a policy is steady for", steady.num_rounds, 0)
    whole("the rounds by which lookups lengthen that", steady.longer, 0)
    whole("the right drafts that a steady policy has seen in a row", steady.streak, 0)
    whole("the surprises after which a steady policy is asked", steady.most_surprises, 0)
    whole("the rounds for which a steady policy is not asked because of these", steady.kept, 0)
    lengths, branches, grown = steady.lengths, steady.branches, steady.grown
    if not lengths or len(branches) not in (0, len(lengths)) or not all(isinstance(n, int) for n in (*lengths, *grown)):
        raise ValueError(
            "a steady policy's lengths must be whole numbers, at least one, as those of grown drafts, and its branches "
            f"as many or none, got {list(lengths)}, {list(grown)} and {list(branches)}"
        )
    if not all(n > 0 for n in grown):
        raise ValueError(f"a steady policy's grown drafts must have at least a token, got {list(grown)}")
    if steady.usual is not None and not isinstance(steady.usual, Plan):
        raise ValueError(f"a steady policy's usual must be a plan or None, got {steady.usual!r}")


def check_lookups(lookups: Lookups, num_rows: int) -> None:
    """ValueError unless so many rows can draft by this table, which nobody can change any more."""
    if not isinstance(lookups, Lookups):
        raise ValueError(f"a steady policy's lookups must be Lookups or None, got {lookups!r}")
    lengths, gains, needs = lookups
    sizes = {len(of_row) for of_row in (*lengths, *gains)}
    if len(lengths) != num_rows or len(gains) != num_rows or len(sizes) != 1 or 0 in sizes or not needs:
        raise ValueError(
            f"a steady policy's lookups must have lengths and gains of every row, {num_rows}, by as many matches, at "
            f"least one, and needs, got {len(lengths)} rows' lengths and {len(gains)} rows' gains of {sorted(sizes)} "
            f"matches, and {len(needs)} needs"
        )
    wrong: list[object] = [part for part in (lengths, gains, needs, *lengths, *gains) if type(part) is not tuple]
    wrong += [n for of_row in lengths for n in of_row if type(n) is not int]
    wrong += [x for numbers in (*gains, needs) for x in numbers if type(x) is not float]
    if wrong:
        raise ValueError(
            "a steady policy's lookups must be tuples, of whole numbers as lengths and of floats as gains and needs, "
            f"got {wrong[0]!r} among them"
        )


def check_room(plan: Plan, room: Sequence[int]) -> None:
    """ValueError unless every row has room for its draft: beyond it, pages are not the row's.

    Args:
        room: tokens that every row may still emit.
    """
    given = plan.draft_lengths
    if plan.exit_layer is None or (
        len(given) == len(room) and all(0 <= n < most for n, most in zip(given, room, strict=True))
    ):
        return
    raise ValueError(f"a plan's draft_lengths must be one per row, each below its room {[*room]}, got {[*given]}")


def _check_shadow(shadow: ShadowPlan, exit_layer: int | None, num_rows: int, num_layers: int) -> None:
    layers, chosen = shadow.layers, shadow.rows
    ascends = all(low < high for low, high in pairwise([0, *layers, num_layers])) and exit_layer not in layers
    if not layers or not ascends or not all(0 <= i < num_rows for i in chosen):
        raise ValueError(
            f"a plan's shadow must name, in order, layers in 1..{num_layers - 1}, not its exit "
            f"layer, and rows below {num_rows}, got layers {list(layers)} and rows {list(chosen)}"
        )


def check_trees(plan: Plan) -> None:
    """ValueError unless the plan's trees are trees, of the tokens it says, for drafts that no layer writes."""
    if plan.exit_layer != LOOKUP:
        raise ValueError(f"a plan brings trees along only where its exit_layer is {LOOKUP}, got {plan.exit_layer}")
    trees = plan.trees or ()
    sizes = [0 if tree is None else len(tree.tokens) for tree in trees]
    if sizes != list(plan.draft_lengths):
        raise ValueError(f"a plan's trees must have its draft_lengths {list(plan.draft_lengths)} tokens, got {sizes}")
    for tree in trees:
        if tree is not None and not (
            len(tree.parents) == len(tree.tokens) and all(0 <= p <= i for i, p in enumerate(tree.parents))
        ):
            raise ValueError(f"a tree needs, per token, a node before it to go on from, got {list(tree.parents)}")
