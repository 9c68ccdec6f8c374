"""`Remembered`: the cost table and acceptance statistics of an opened model."""

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
from selfspec.model.stack import Stack

WRITE_EVERY = 0.1  # seconds


class Way(NamedTuple):
    """The arguments with which a kept policy was made; a later call may reuse it with equal ones."""

    exact: bool
    exit_layer: int | None
    num_draft_tokens: int | None
    drafts: tuple[str, ...] | None
    has_corpus: bool


class Remembered:
    """Costs and acceptance statistics of an opened model, from this process, earlier ones, or the model's files.

    Exporting statistics and making a policy from them takes as long as a dozen tokens of a small model. So the policy
    of the last call is kept, and the next call with the same arguments continues with it. Its statistics are exported
    when they are needed, and at most every `WRITE_EVERY` seconds; calls that start while it is in use may lack the
    statistics of that time.

    Attributes:
        stored_prior: statistics from the model's files, see `selfspec.calibrate.profile.stored_prior`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._costs: dict[bool, Costs] = {}  # key: exact mode
        self._prior: dict[str, Any] | None = None
        self._is_read = False  # whether saved statistics were read
        self._idle: tuple[Way, Adaptive] | None = None  # the kept policy, while no call uses it
        self._is_written, self._written_at = True, 0.0  # whether `_prior` has its statistics, and when it was set
        self._lock = RLock()
        self.stored_prior: Any = None

    def costs(self, stack: Stack, batch_size: int, exact: bool) -> Costs:
        """See `Target.costs`; `stack` is the one that decodes, which differs in exact mode."""
        known = self._costs.get(exact)
        if known is None or not profile.covers(known, batch_size):
            known = self._costs[exact] = profile.costs_of(stack, batch_size)
        return known

    @property
    def prior(self) -> dict[str, Any] | None:
        """Acceptance statistics of earlier calls, else saved ones, else the model's own; None without any."""
        with self._lock:
            self._write_idle()
            if self._prior is None and not self._is_read:
                self._is_read = True
                found = (profile.read_prior(self._stack), self.stored_prior)
                self._prior = next((one for one in found if is_prior(one, self._stack.num_layers)), None)
            return self._prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        with self._lock:
            self._idle, self._written_at = None, 0.0
            self._prior, self._is_read = prior, True

    def take(self, policy: Policy) -> None:
        """Use the statistics of a policy as the prior of later ones."""
        inner = policy.inner if isinstance(policy, RankZeroPolicy) else policy
        if isinstance(inner, Adaptive):
            with self._lock:
                self._idle = None
                self._write(inner)

    def keep(self, policy: Adaptive, way: Way) -> None:
        """Keep a policy for later calls; its caller must not use it any more."""
        policy.forget_rows()
        with self._lock:
            self._idle, self._is_written = (way, policy), False
            if monotonic() - self._written_at >= WRITE_EVERY:
                self._write(policy)

    def go_on(self, way: Way, costs: Callable[[], Costs]) -> Adaptive | None:
        """Hand out the kept policy if it has these arguments and costs, else None. Only one caller gets it."""
        with self._lock:
            kept, policy = self._idle or (None, None)
            if policy is None or kept != way or policy.costs is not costs():
                return None
            self._idle = None
            return policy

    def copy(self) -> Self:
        """An independent copy."""
        with self._lock:
            self._write_idle()
            other = copy(self)
        other._costs, other._idle, other._lock = {**self._costs}, None, RLock()
        return other

    def save(self) -> None:
        """Save the statistics in the user's cache folder."""
        with self._lock:
            self._write_idle()
            if self._prior is not None:
                profile.save_prior(self._stack, self._prior)

    def _write_idle(self) -> None:
        if self._idle is not None and not self._is_written:
            self._write(self._idle[1])

    def _write(self, policy: Adaptive) -> None:
        state = policy.state()
        if is_prior(state, self._stack.num_layers):  # false where an interrupt left the policy inconsistent
            self._prior, self._is_written, self._written_at = state, True, monotonic()


def way_of(
    policy: Any, exit_layer: Any, num_draft_tokens: Any, drafts: Any, exact: bool, has_corpus: bool
) -> Way | None:
    """The `Way` of the arguments of `make_policy`; None where the policy is not `adaptive`."""
    if policy is None and exit_layer is None and num_draft_tokens is None:
        policy = DEFAULT_POLICY
    if not isinstance(policy, str) or policy != "adaptive":
        return None
    if any(one is not None and type(one) is not int for one in (exit_layer, num_draft_tokens)):
        return None
    if drafts is not None and not (isinstance(drafts, list | tuple) and all(isinstance(one, str) for one in drafts)):
        return None
    return Way(bool(exact), exit_layer, num_draft_tokens, None if drafts is None else tuple(drafts), has_corpus)
