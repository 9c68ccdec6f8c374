"""What an engine needs of a target, and how the policy that a caller names is told what the target offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.control.registry import CHOOSES_EXIT, DEFAULT_POLICY, make_policy
from selfspec.control.tensor_parallel import RankZeroPolicy
from selfspec.decoding.generation_config import Stored
from selfspec.model.stack import Stack


class Decodable(Protocol):
    """What an engine needs of a target."""

    @property
    def stack(self) -> Stack: ...
    @property
    def exact_stack(self) -> Stack: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def default_exit_layer(self) -> int | None: ...
    @property
    def default_num_draft_tokens(self) -> int | None: ...
    @property
    def prior(self) -> Any: ...
    @property
    def stored(self) -> Stored | None: ...
    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs: ...


def policy_for(
    target: Decodable,
    policy: str | Policy | None = None,
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    batch_size: int = 1,
    drafts: Sequence[str] | None = None,
    exact: bool = False,
) -> Policy:
    """What the caller named; for policies that are told an exit layer, else what is stored with the model.

    Whoever names an exit layer or a draft length, but no policy, wants it fixed.
    """
    if policy is None:
        policy = DEFAULT_POLICY if exit_layer is None and num_draft_tokens is None else "fixed"
    if policy not in CHOOSES_EXIT:
        exit_layer = target.default_exit_layer if exit_layer is None else exit_layer
        num_draft_tokens = target.default_num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    prior = target.prior if policy == "adaptive" else None
    layers = target.stack.num_layers

    def costs() -> Costs:
        return target.costs(batch_size, exact=True) if exact else target.costs(batch_size)

    stack, ranks = target.exact_stack if exact else target.stack, target.stack.ranks
    draft_vocab = stack.default_draft_vocab
    made = make_policy(policy, layers, exit_layer, num_draft_tokens, costs, prior, drafts, draft_vocab)
    made.set_vocabulary(stack.frequencies if stack.has_draft_heads else None)
    made.set_copies(stack.has_copies)
    return made if ranks is None else RankZeroPolicy(made, ranks.leads, ranks.agreed)
