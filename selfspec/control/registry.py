"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.del_ import DynamicExit
from selfspec.control.fixed import Fixed, Plain, PromptLookup
from selfspec.control.goodput import SmartSpec, SmartSpecLookup, Synergy
from selfspec.control.heuristics import DSDE, DraftVerify, FiniteState, GammaTune, GammaTunePlus
from selfspec.control.plan import DRAFTS, REMOVED_DRAFTS, Policy
from selfspec.errors import whole

DEFAULT_POLICY = "adaptive"
DEFAULT_DRAFT_TOKENS = 4


class Asked(NamedTuple):
    """What a caller asks for, see `make_policy`."""

    num_layers: int
    given_exit: int | None
    given_tokens: int | None
    costs: Callable[[], Costs]
    prior: Any
    drafts: Sequence[str]

    @property
    def exit_layer(self) -> int:
        return max(1, self.num_layers // 4) if self.given_exit is None else self.given_exit

    @property
    def num_draft_tokens(self) -> int:
        return self.given_tokens or DEFAULT_DRAFT_TOKENS


class Entry(NamedTuple):
    """A policy that has a name."""

    make: Callable[[Asked], Policy]
    chooses_exit: bool = False  # or has none; the others are given one
    needs_costs: bool = False


def _adaptive(asked: Asked) -> Policy:
    exits = None if asked.given_exit is None else [asked.given_exit]
    return Adaptive(asked.costs(), asked.prior, exits, asked.given_tokens, asked.drafts)


def _prompt_lookup(asked: Asked) -> Policy:
    return PromptLookup() if asked.given_tokens is None else PromptLookup(asked.given_tokens)


def _of_length(policy: Callable[[int, int], Policy]) -> Callable[[Asked], Policy]:
    """Policies of an exit layer and a draft length, which may be that of the first round."""
    return lambda asked: policy(asked.exit_layer, asked.num_draft_tokens)


POLICIES = {
    "adaptive": Entry(_adaptive, chooses_exit=True, needs_costs=True),  # most tokens per measured second, or none
    "plain": Entry(lambda asked: Plain(), chooses_exit=True),
    "fixed": Entry(_of_length(Fixed)),  # LayerSkip
    "fs": Entry(_of_length(FiniteState)),  # a token longer after a full acceptance, else shorter
    "dv": Entry(lambda asked: DraftVerify(asked.exit_layer)),  # a threshold of confidence that follows acceptance
    "gammatune": Entry(_of_length(GammaTune)),  # length from a moving average of acceptance
    "gammatune+": Entry(_of_length(GammaTunePlus)),  # and a threshold of confidence
    "del": Entry(lambda asked: DynamicExit(asked.num_layers), chooses_exit=True),  # tokens per loaded layer
    "dsde": Entry(_of_length(DSDE)),  # lengths from how steady the divergence is
    "smartspec": Entry(lambda asked: SmartSpec(asked.exit_layer, asked.costs()), needs_costs=True),  # goodput
    "smartspec-lookup": Entry(lambda asked: SmartSpecLookup(asked.costs()), chooses_exit=True, needs_costs=True),
    "synergy": Entry(lambda asked: Synergy(asked.exit_layer, asked.costs()), needs_costs=True),  # length by batch size
    "pld": Entry(_prompt_lookup, chooses_exit=True),  # as many tokens by lookup every round
}
BY_LOOKUP = ("pld", "smartspec-lookup")  # they have no exit layer
CHOOSES_EXIT = tuple(name for name, entry in POLICIES.items() if entry.chooses_exit)
NEEDS_COSTS = tuple(name for name, entry in POLICIES.items() if entry.needs_costs)


def make_policy(
    policy: str | Policy,
    num_layers: int,
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    costs: Callable[[], Costs] | None = None,
    prior: Any = None,
    drafts: Sequence[str] | None = None,
) -> Policy:
    """The policy a caller named, or the one they made.

    Args:
        exit_layer: layers the draft runs, 1..num_layers - 1; default: a quarter of them. `adaptive` chooses by itself,
            and is held to this one if it is given; `del` always chooses.
        num_draft_tokens: drafted tokens per round, at least 0 (0 is plain decoding); default: 4. Where lengths vary,
            that of a row's first round; `pld` has 10; `adaptive` drafts no more if it is given; `dv`, `del`, `synergy`
            and both `smartspec` ignore it.
        costs: measures this machine, for the policies that weigh costs.
        prior: what an earlier `Adaptive` of this model returned as its `state`, for `adaptive`.
        drafts: where those of `adaptive` may come from, some of `DRAFTS`; default: all.

    Raises:
        ValueError: no policy has the name, or an argument is of no use.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, or a selfspec.Policy, got {policy!r}")
    if exit_layer is not None and not 1 <= whole("exit_layer", exit_layer) < num_layers:
        raise ValueError(f"exit_layer must lie in 1..{num_layers - 1} for this model, got {exit_layer}")
    if num_draft_tokens is not None and whole("num_draft_tokens", num_draft_tokens) < 0:
        raise ValueError(f"num_draft_tokens must be at least 0 (0 is plain decoding), got {num_draft_tokens}")
    if drafts is not None:
        _check_drafts(drafts)
    if num_draft_tokens == 0 or num_layers == 1:
        return Plain()
    if POLICIES[policy].needs_costs and costs is None:
        raise ValueError(f"the policy {policy!r} weighs costs: give a function that measures them")
    asked = Asked(num_layers, exit_layer, num_draft_tokens, costs or _unmeasured, prior, drafts or DRAFTS)
    return POLICIES[policy].make(asked)


def removed_among(drafts: Sequence[str]) -> str:
    """How a refusal of these ends where some were removed; empty else."""
    removed = [name for name in REMOVED_DRAFTS if name in drafts]
    return f" (removed: {', '.join(removed)})" if removed else ""


def _check_drafts(drafts: Any) -> None:
    are_several = isinstance(drafts, Collection) and not isinstance(drafts, str)
    if not (are_several and drafts and set(drafts) <= set(DRAFTS)):
        removed = removed_among(drafts) if are_several else ""
        raise ValueError(f"drafts must hold some of {', '.join(DRAFTS)}, got {drafts!r}{removed}")
    if set(drafts) <= {"copies", "tree"}:
        raise ValueError("drafts must name a source beside 'copies' and 'tree': exit or lookup")


def _unmeasured() -> Costs:
    raise AssertionError("asked for by a policy that does not need costs")
