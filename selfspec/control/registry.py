"""The policies and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Plain, Policy
from selfspec.control.published.draft_verify import DraftVerify
from selfspec.control.published.dsde import DSDE
from selfspec.control.published.dynamic_exit import DynamicExit
from selfspec.control.published.finite_state import FiniteState
from selfspec.control.published.gammatune import GammaTune, GammaTunePlus
from selfspec.control.published.layerskip import Fixed
from selfspec.control.published.prompt_lookup import PromptLookup
from selfspec.control.published.smartspec import SmartSpec, SmartSpecLookup
from selfspec.control.published.synergy import Synergy
from selfspec.errors import whole
from selfspec.params import DRAFTERS

DEFAULT_POLICY = "adaptive"
DEFAULT_NUM_SPECULATIVE_TOKENS = 4


class PolicyRequest(NamedTuple):
    """The arguments of `make_policy`, checked. None: not given."""

    num_layers: int
    given_exit_layer: int | None
    given_tokens: int | None
    costs: Callable[[], Costs]
    prior: Any
    drafters: Sequence[str]
    draft_vocab: int | None

    @property
    def exit_layer(self) -> int:
        return max(1, self.num_layers // 4) if self.given_exit_layer is None else self.given_exit_layer

    @property
    def num_speculative_tokens(self) -> int:
        return self.given_tokens or DEFAULT_NUM_SPECULATIVE_TOKENS


def _adaptive(asked: PolicyRequest) -> Policy:
    exit_layers = None if asked.given_exit_layer is None else [asked.given_exit_layer]
    return Adaptive(asked.costs(), asked.prior, exit_layers, asked.given_tokens, asked.drafters)


POLICIES: dict[str, Callable[[PolicyRequest], Policy]] = {
    "adaptive": _adaptive,  # most expected tokens per second
    "plain": lambda asked: Plain(),
    "fixed": lambda asked: Fixed(asked.exit_layer, asked.num_speculative_tokens, draft_vocab=asked.draft_vocab),
    "fs": lambda asked: FiniteState(asked.exit_layer, asked.num_speculative_tokens),
    "dv": lambda asked: DraftVerify(asked.exit_layer),
    "gammatune": lambda asked: GammaTune(asked.exit_layer, asked.num_speculative_tokens),
    "gammatune+": lambda asked: GammaTunePlus(asked.exit_layer, asked.num_speculative_tokens),
    "del": lambda asked: DynamicExit(asked.num_layers),
    "dsde": lambda asked: DSDE(asked.exit_layer, asked.num_speculative_tokens),
    "smartspec": lambda asked: SmartSpec(asked.exit_layer, asked.costs()),
    "smartspec-lookup": lambda asked: SmartSpecLookup(asked.costs()),
    "synergy": lambda asked: Synergy(asked.exit_layer, asked.costs()),
    "pld": lambda asked: PromptLookup() if asked.given_tokens is None else PromptLookup(asked.given_tokens),
}
BY_LOOKUP = ("pld", "smartspec-lookup")  # they have no exit layer
CHOOSES_EXIT = ("adaptive", "plain", "del", *BY_LOOKUP)  # they choose the exit layer or have none
NEEDS_COSTS = ("adaptive", "smartspec", "smartspec-lookup", "synergy")


def make_policy(
    policy: str | Policy,
    num_layers: int,
    exit_layer: int | None = None,
    num_speculative_tokens: int | None = None,
    costs: Callable[[], Costs] | None = None,
    prior: Any = None,
    drafters: Sequence[str] | None = None,
    draft_vocab: int | None = None,
) -> Policy:
    """Make the policy of a name; a `Policy` object is returned as it is.

    Args:
        exit_layer: number of layers that draft, 1..num_layers - 1; default: a quarter of them. `adaptive` uses only
            this one if it is given, and chooses otherwise; `del` always chooses.
        num_speculative_tokens: drafted tokens per round, at least 0 (0 is plain decoding); default: 4, for `pld` 10.
            Where lengths vary, that of a row's first round; the maximum for `adaptive`; ignored by `dv`, `del`,
            `synergy` and both `smartspec`.
        costs: returns the cost table of this machine, for the policies in `NEEDS_COSTS`.
        prior: the `state` of an earlier `Adaptive` for this model, for `adaptive`.
        drafters: where `adaptive` may take drafts from, some of `DRAFTERS`; default: all.
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
    if num_speculative_tokens is not None and whole("num_speculative_tokens", num_speculative_tokens) < 0:
        raise ValueError(
            f"num_speculative_tokens must be at least 0 (0 is plain decoding), got {num_speculative_tokens}"
        )
    drafters = DRAFTERS if drafters is None else drafters
    if isinstance(drafters, str) or not {*drafters} <= {*DRAFTERS} or {*drafters} <= {"copies"}:
        raise ValueError(f"drafters must hold exit or lookup, and besides them at most copies, got {drafters!r}")
    if num_speculative_tokens == 0 or num_layers == 1:
        return Plain()
    if costs is None:
        if policy in NEEDS_COSTS:
            raise ValueError(f"the policy {policy!r} needs costs, got none; give a function that returns a Costs")
        costs = _no_costs
    return POLICIES[policy](
        PolicyRequest(num_layers, exit_layer, num_speculative_tokens, costs, prior, drafters, draft_vocab)
    )


def _no_costs() -> Costs:
    raise AssertionError("a policy that needs costs is missing in NEEDS_COSTS")
