"""`PolicyStore`: the cost table and acceptance statistics of an opened model, and the policy that uses them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from threading import RLock
from time import monotonic
from typing import Any, NamedTuple, Self

from selfspec.calibrate import profile
from selfspec.control.acceptance import is_prior
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.control.registry import DEFAULT_POLICY
from selfspec.control.tensor_parallel import RankZeroPolicy
from selfspec.model.split_model import SplitModel
from selfspec.params import SpeculativeConfig

EXPORT_SECONDS = 0.1  # between two exports of statistics


class PolicyKey(NamedTuple):
    """The arguments of an `adaptive` policy; a later call may reuse one with equal arguments."""

    exact: bool
    exit_layer: int | None
    num_speculative_tokens: int | None
    drafters: tuple[str, ...] | None
    has_corpus: bool

    @classmethod
    def of(cls, config: SpeculativeConfig, exact: bool) -> PolicyKey | None:
        """The key of a configuration; None where its policy is not `adaptive`."""
        is_default = config.exit_layer is None and config.num_speculative_tokens is None
        policy = DEFAULT_POLICY if config.policy is None and is_default else config.policy
        if not isinstance(policy, str) or policy != "adaptive":
            return None
        drafters = None if config.drafters is None else tuple(config.drafters)
        return cls(exact, config.exit_layer, config.num_speculative_tokens, drafters, config.corpus is not None)


class PolicyStore:
    """Costs and acceptance statistics of an opened model, from this process, earlier ones, or the model's files.

    Exporting statistics and making a policy from them takes as long as a dozen tokens of a small model. So the policy
    of the last call is kept, and the next call with the same arguments continues with it. Its statistics are exported
    when they are needed, and at most every `EXPORT_SECONDS`; calls that start while it is in use may lack the
    statistics of that time.

    Attributes:
        stored_prior: statistics from the model's files, see `selfspec.calibrate.profile.stored_prior`.
    """

    def __init__(self, split: SplitModel) -> None:
        self._split = split
        self._costs: dict[bool, Costs] = {}  # key: exact mode
        self._prior: dict[str, Any] | None = None
        self._is_read = False  # whether saved statistics were read
        self._idle: tuple[PolicyKey, Adaptive] | None = None  # the kept policy, while no call uses it
        self._is_exported, self._exported_at = True, 0.0  # whether `_prior` has its statistics, and when it was set
        self._lock = RLock()
        self.stored_prior: Any = None

    def costs(self, split: SplitModel, batch_size: int, exact: bool) -> Costs:
        """See `Target.costs`; `split` is the one that decodes, which differs in exact mode."""
        known = self._costs.get(exact)
        if known is None or not profile.covers(known, batch_size):
            known = self._costs[exact] = profile.costs_of(split, batch_size)
        return known

    @property
    def prior(self) -> dict[str, Any] | None:
        """Acceptance statistics of earlier calls, else saved ones, else the model's own; None without any."""
        with self._lock:
            self._export_idle()
            if self._prior is None and not self._is_read:
                self._is_read = True
                found = (profile.read_prior(self._split), self.stored_prior)
                self._prior = next((one for one in found if is_prior(one, self._split.num_layers)), None)
            return self._prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        with self._lock:
            self._idle, self._exported_at = None, 0.0
            self._prior, self._is_read = prior, True

    def learn_from(self, policy: Policy) -> None:
        """Use the statistics of a policy as the prior of later ones."""
        inner = policy.inner if isinstance(policy, RankZeroPolicy) else policy
        if isinstance(inner, Adaptive):
            with self._lock:
                self._idle = None
                self._export(inner)

    def keep(self, policy: Adaptive, key: PolicyKey) -> None:
        """Keep a policy for later calls; its caller must not use it any more."""
        policy.forget_rows()
        with self._lock:
            self._idle, self._is_exported = (key, policy), False
            if monotonic() - self._exported_at >= EXPORT_SECONDS:
                self._export(policy)

    def take(self, key: PolicyKey, costs: Callable[[], Costs]) -> Adaptive | None:
        """Hand out the kept policy if it has these arguments and costs, else None. Only one caller gets it."""
        with self._lock:
            kept, policy = self._idle or (None, None)
            if policy is None or kept != key or policy.costs is not costs():
                return None
            self._idle = None
            return policy

    def copy(self) -> Self:
        """An independent copy, which starts with the statistics of this one."""
        with self._lock:
            _ = self.prior  # the copy does not read it again: the key of a model's weights takes as long as 20 tokens
            other = copy(self)
        other._idle, other._lock = None, RLock()  # both know the costs of the same model
        return other

    def save(self) -> None:
        """Save the statistics in the user's cache folder."""
        with self._lock:
            self._export_idle()
            if self._prior is not None:
                profile.save_prior(self._split, self._prior)

    def _export_idle(self) -> None:
        if self._idle is not None and not self._is_exported:
            self._export(self._idle[1])

    def _export(self, policy: Adaptive) -> None:
        state = policy.state()
        if is_prior(state, self._split.num_layers):  # false where an interrupt left the policy inconsistent
            self._prior, self._is_exported, self._exported_at = state, True, monotonic()
