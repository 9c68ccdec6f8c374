"""Policies by name."""

from __future__ import annotations

from selfspec.control.fixed import Fixed, Plain
from selfspec.control.plan import Policy
from selfspec.errors import whole

POLICIES = ("plain", "fixed")
DEFAULT_DRAFT_TOKENS = 4


def make_policy(
    policy: str | Policy, num_layers: int, exit_layer: int | None = None, num_draft_tokens: int | None = None
) -> Policy:
    """The policy a caller named, or the one they made.

    Args:
        exit_layer: layers the draft runs, 1..num_layers - 1; default: a quarter of them.
        num_draft_tokens: drafted tokens per round, at least 0; default: 4.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    exit_layer = whole("exit_layer", max(1, num_layers // 4) if exit_layer is None else exit_layer)
    num_draft_tokens = whole("num_draft_tokens", DEFAULT_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens)
    if not 1 <= exit_layer < num_layers:
        raise ValueError(f"exit_layer must lie in 1..{num_layers - 1} for this model, got {exit_layer}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be at least 0 (0 is plain decoding), got {num_draft_tokens}")
    if policy == "plain" or num_draft_tokens == 0:
        return Plain()
    return Fixed(exit_layer, num_draft_tokens)
