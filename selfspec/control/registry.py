"""The policies and their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.del_ import DynamicExit
from selfspec.control.fixed import Fixed, Plain, PromptLookup
from selfspec.control.goodput import SmartSpec, SmartSpecLookup, Synergy
from selfspec.control.heuristics import DSDE, DraftVerify, FiniteState, GammaTune, GammaTunePlus
from selfspec.control.plan import Policy
from selfspec.core import DRAFTERS
from selfspec.errors import whole

DEFAULT_POLICY = "adaptive"
DEFAULT_DRAFT_TOKENS = 4


class PolicyRequest(NamedTuple):
    """The arguments of `make_policy`."""

    num_layers: int
    requested_exit: int | None
    requested_tokens: int | None
    costs: Callable[[], Costs]
    prior: Any
    drafts: Sequence[str]
    draft_vocab: int | None

    @property
    def exit_layer(self) -> int:
        return max(1, self.num_layers // 4) if self.requested_exit is None else self.requested_exit

    @property
    def num_draft_tokens(self) -> int:
        return self.requested_tokens or DEFAULT_DRAFT_TOKENS


class Entry(NamedTuple):
    """A named policy."""

    make: Callable[[PolicyRequest], Policy]
    chooses_exit: bool = False  # the policy chooses the exit layer or has none; the others need one
    needs_costs: bool = False  # the policy needs the cost table


def _adaptive(request: PolicyRequest) -> Policy:
    exits = None if request.requested_exit is None else [request.requested_exit]
    return Adaptive(request.costs(), request.prior, exits, request.requested_tokens, request.drafts)


def _prompt_lookup(request: PolicyRequest) -> Policy:
    return PromptLookup() if request.requested_tokens is None else PromptLookup(request.requested_tokens)


def _fixed(request: PolicyRequest) -> Policy:
    return Fixed(request.exit_layer, request.num_draft_tokens, draft_vocab=request.draft_vocab)


def _with_length(policy: Callable[[int, int], Policy]) -> Callable[[PolicyRequest], Policy]:
    """For policies with an exit layer and an initial or fixed draft length."""
    return lambda request: policy(request.exit_layer, request.num_draft_tokens)


POLICIES = {
    "adaptive": Entry(_adaptive, chooses_exit=True, needs_costs=True),  # most expected tokens per second
    "plain": Entry(lambda request: Plain(), chooses_exit=True),
    "fixed": Entry(_fixed),  # LayerSkip
    "fs": Entry(_with_length(FiniteState)),  # a token longer after a full acceptance, else shorter
    "dv": Entry(lambda request: DraftVerify(request.exit_layer)),  # a threshold of confidence that follows acceptance
    "gammatune": Entry(_with_length(GammaTune)),  # length from a moving average of acceptance
    "gammatune+": Entry(_with_length(GammaTunePlus)),  # and a threshold of confidence
    "del": Entry(lambda request: DynamicExit(request.num_layers), chooses_exit=True),  # tokens per loaded layer
    "dsde": Entry(_with_length(DSDE)),  # length from the variance of the divergence
    "smartspec": Entry(lambda request: SmartSpec(request.exit_layer, request.costs()), needs_costs=True),  # goodput
    "smartspec-lookup": Entry(lambda request: SmartSpecLookup(request.costs()), chooses_exit=True, needs_costs=True),
    "synergy": Entry(lambda request: Synergy(request.exit_layer, request.costs()), needs_costs=True),
    "pld": Entry(_prompt_lookup, chooses_exit=True),  # prompt lookup with a fixed length
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
    draft_vocab: int | None = None,
) -> Policy:
    """Make the policy of a name; a `Policy` object is returned as it is.

    Args:
        exit_layer: number of layers that draft, 1..num_layers - 1; default: a quarter of them. `adaptive` uses only
            this one if it is given, and chooses otherwise; `del` always chooses.
        num_draft_tokens: drafted tokens per round, at least 0 (0 is plain decoding); default: 4, for `pld` 10. Where
            lengths vary, that of a row's first round; the maximum for `adaptive`; ignored by `dv`, `del`, `synergy`
            and both `smartspec`.
        costs: returns the cost table of this machine, for the policies that need it.
        prior: the `state` of an earlier `Adaptive` for this model, for `adaptive`.
        drafts: sources of drafts of `adaptive`, some of `DRAFTERS`; default: all.
        draft_vocab: tokens that `fixed` drafts over, the most frequent ones; default: the whole vocabulary. `adaptive`
            chooses it; the other published policies draft over the whole vocabulary, as they were published.

    Raises:
        ValueError: there is no policy of this name, or an argument is out of range.
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
        raise ValueError(f"the policy {policy!r} needs costs, got none; give a function that returns a Costs")
    given = exit_layer, num_draft_tokens, costs or _unmeasured, prior, drafts or DRAFTERS, draft_vocab
    return POLICIES[policy].make(PolicyRequest(num_layers, *given))


def removed_among(drafts: Sequence[str]) -> str:
    """The end of an error message that names removed sources among `drafts`; empty without any."""
    removed = [name for name in () if name in drafts]
    return f" (removed: {', '.join(removed)})" if removed else ""


def _check_drafts(drafts: Any) -> None:
    are_several = isinstance(drafts, Collection) and not isinstance(drafts, str)
    if not (are_several and drafts and set(drafts) <= set(DRAFTERS)):
        removed = removed_among(drafts) if are_several else ""
        raise ValueError(f"drafts must hold some of {', '.join(DRAFTERS)}, got {drafts!r}{removed}")
    if set(drafts) <= {"copies", "tree"}:
        raise ValueError(f"drafts must hold exit or lookup, which copies and tree only modify, got {drafts!r}")


def _unmeasured() -> Costs:
    raise AssertionError("request for by a policy that does not need costs")
