"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.draft_verify import DraftVerify
from selfspec.control.dsde import DSDE
from selfspec.control.dynamic_exit import DynamicExit
from selfspec.control.fixed import Fixed, Plain
from selfspec.control.fs import FiniteState
from selfspec.control.gammatune import GammaTune, GammaTunePlus
from selfspec.control.lookup import PromptLookup, SmartSpecLookup
from selfspec.control.plan import DRAFTS, REMOVED_DRAFTS, Policy
from selfspec.control.smartspec import SmartSpec
from selfspec.control.synergy import Synergy
from selfspec.errors import whole

POLICIES = {
    "adaptive": "exit layer and lengths of most tokens per measured second, off when it does not pay",
    "plain": "every token by the whole model",
    "fixed": "one exit layer, one length (LayerSkip)",
    "fs": "a token longer after a full acceptance, else shorter",
    "dv": "a confidence threshold that follows acceptance (Draft & Verify)",
    "gammatune": "length from a moving average of acceptance",
    "gammatune+": "the same, and a confidence to stop at",
    "del": "exit layer by tokens per loaded layer, a confidence to stop at (DEL)",
    "dsde": "lengths from how steady the divergence is, capped by the batch's mean",
    "smartspec": "length of most goodput, shared out by acceptance",
    "smartspec-lookup": "the same, of drafts by lookup",
    "synergy": "length by batch size, from measured costs",
    "pld": "what followed the last time the text ended so, as many tokens every round (prompt lookup)",
}
DEFAULT_POLICY = "adaptive"
DEFAULT_DRAFT_TOKENS = 4
BY_LOOKUP = ("pld", "smartspec-lookup")  # they have no exit layer
CHOOSES_EXIT = ("adaptive", "del", "plain", *BY_LOOKUP)  # the others are told
NEEDS_COSTS = ("adaptive", "smartspec", "smartspec-lookup", "synergy")


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
        prior: what an earlier `Tracker` of this model has seen, for `adaptive`.
        drafts: where those of `adaptive` may come from, some of `DRAFTS`; default: all.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, or a selfspec.Policy, got {policy!r}")
    if exit_layer is not None and not 1 <= whole("exit_layer", exit_layer) < num_layers:
        raise ValueError(f"exit_layer must lie in 1..{num_layers - 1} for this model, got {exit_layer}")
    if num_draft_tokens is not None and whole("num_draft_tokens", num_draft_tokens) < 0:
        raise ValueError(f"num_draft_tokens must be at least 0 (0 is plain decoding), got {num_draft_tokens}")
    given: Any = drafts
    are_several = isinstance(given, Collection) and not isinstance(given, str)
    if drafts is not None and not (are_several and drafts and set(drafts) <= set(DRAFTS)):
        raise ValueError(
            f"drafts must hold some of {', '.join(DRAFTS)}, got {drafts!r}{removed_among(given) if are_several else ''}"
        )
    if drafts is not None and set(drafts) <= {"copies", "tree"}:
        raise ValueError("drafts must name a source beside 'copies' and 'tree': exit or lookup")
    if policy == "plain" or num_draft_tokens == 0 or num_layers == 1:
        return Plain()
    if policy in NEEDS_COSTS and costs is None:
        raise ValueError(f"the policy {policy!r} weighs costs: give a function that measures them")
    if policy == "adaptive":
        assert costs is not None
        exits = None if exit_layer is None else [exit_layer]
        return Adaptive(costs(), prior, exits, num_draft_tokens, DRAFTS if drafts is None else drafts)
    return _make(policy, num_layers, exit_layer, num_draft_tokens, costs)


def removed_among(drafts: Sequence[str]) -> str:
    """How a refusal of these ends where some were removed; empty else."""
    removed = [name for name in REMOVED_DRAFTS if name in drafts]
    return f" (removed: {', '.join(removed)})" if removed else ""


def _make(
    policy: str,
    num_layers: int,
    exit_layer: int | None,
    num_draft_tokens: int | None,
    costs: Callable[[], Costs] | None,
) -> Policy:
    if policy == "del":
        return DynamicExit(num_layers)
    if policy == "pld":
        return PromptLookup() if num_draft_tokens is None else PromptLookup(num_draft_tokens)
    if policy == "smartspec-lookup":
        assert costs is not None
        return SmartSpecLookup(costs())
    if exit_layer is None:
        exit_layer = max(1, num_layers // 4)
    if policy in ("smartspec", "synergy"):
        assert costs is not None
        return SmartSpec(exit_layer, costs()) if policy == "smartspec" else Synergy(exit_layer, costs())
    if policy == "dv":
        return DraftVerify(exit_layer)
    kinds = {"fixed": Fixed, "fs": FiniteState, "gammatune": GammaTune, "gammatune+": GammaTunePlus, "dsde": DSDE}
    return kinds[policy](exit_layer, num_draft_tokens or DEFAULT_DRAFT_TOKENS)
