"""`Remembered`: what is known of a model beside its weights: what rounds cost here, how often its layers are right."""

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
    """What tells policies that may go on in later calls apart, beside their costs."""

    exact: bool
    exit_layer: int | None
    num_draft_tokens: int | None
    drafts: tuple[str, ...] | None
    has_corpus: bool


class Remembered:
    """Costs and acceptance statistics of an opened model, from this program, earlier ones, or the model's own files.

    Writing statistics down and making a policy from them takes the interpreter as long as a small model takes for a
    dozen tokens. So the policy of the call that ended last is kept, and one that wants the same goes on with it, as if
    its prompts were further ones of one engine. What such a policy saw is written down when somebody asks, and now and
    then: calls that begin while it is in use may miss the last tenth of a second.

    Attributes:
        stored_prior: statistics that came with the model's files, see `selfspec.calibrate.profile.stored_prior`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._costs: dict[bool, Costs] = {}  # of exact mode, and of the ordinary one
        self._prior: dict[str, Any] | None = None
        self._has_looked = False  # for what earlier programs kept
        self._idle: tuple[Way, Adaptive] | None = None  # the policy that ended last, as long as nobody has it
        self._is_written, self._written_at = True, 0.0  # whether `_prior` is what that one saw; and when one was
        self._lock = RLock()
        self.stored_prior: Any = None

    def costs(self, stack: Stack, batch_size: int, exact: bool) -> Costs:
        """See `Target.costs`; of `stack`, which is another one in exact mode."""
        known = self._costs.get(exact)
        if known is None or not profile.covers(known, batch_size):
            known = self._costs[exact] = profile.costs_of(stack, batch_size)
        return known

    @property
    def prior(self) -> dict[str, Any] | None:
        """Acceptance statistics of earlier calls, or of earlier programs that kept theirs, or those that came with the
        model; None when there are none."""
        with self._lock:
            self._write_idle()
            if self._prior is None and not self._has_looked:
                self._has_looked = True
                found = (profile.read_prior(self._stack), self.stored_prior)
                self._prior = next((one for one in found if is_prior(one, self._stack.num_layers)), None)
            return self._prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        with self._lock:
            self._idle, self._written_at = None, 0.0
            self._prior, self._has_looked = prior, True

    def take(self, policy: Policy) -> None:
        """What a policy saw is where the next one starts."""
        inner = policy.inner if isinstance(policy, RankZeroPolicy) else policy
        if isinstance(inner, Adaptive):
            with self._lock:
                self._idle = None
                self._write(inner)

    def keep(self, policy: Adaptive, way: Way) -> None:
        """The same of one that nobody else uses from now on."""
        policy.forget_rows()
        with self._lock:
            self._idle, self._is_written = (way, policy), False
            if monotonic() - self._written_at >= WRITE_EVERY:
                self._write(policy)

    def go_on(self, way: Way, costs: Callable[[], Costs]) -> Adaptive | None:
        """The policy that was kept, if it is of this kind and these costs; whoever gets it has it alone."""
        with self._lock:
            kept, policy = self._idle or (None, None)
            if policy is None or kept != way or policy.costs is not costs():
                return None
            self._idle = None
            return policy

    def copy(self) -> Self:
        """One that goes on by itself from what is known now."""
        with self._lock:
            self._write_idle()
            other = copy(self)
        other._costs, other._idle, other._lock = {**self._costs}, None, RLock()
        return other

    def save(self) -> None:
        """For later programs, in the user's cache folder."""
        with self._lock:
            self._write_idle()
            if self._prior is not None:
                profile.save_prior(self._stack, self._prior)

    def _write_idle(self) -> None:
        if self._idle is not None and not self._is_written:
            self._write(self._idle[1])

    def _write(self, policy: Adaptive) -> None:
        state = policy.state()
        if is_prior(state, self._stack.num_layers):  # not of one that was interrupted in the middle
            self._prior, self._is_written, self._written_at = state, True, monotonic()


def way_of(
    policy: Any, exit_layer: Any, num_draft_tokens: Any, drafts: Any, exact: bool, has_corpus: bool
) -> Way | None:
    """Of what a caller asks for, see `control.registry.make_policy`; None where that is nothing of `adaptive`."""
    if policy is None and exit_layer is None and num_draft_tokens is None:
        policy = DEFAULT_POLICY
    if not isinstance(policy, str) or policy != "adaptive":
        return None
    if any(one is not None and type(one) is not int for one in (exit_layer, num_draft_tokens)):
        return None
    if drafts is not None and not (isinstance(drafts, list | tuple) and all(isinstance(one, str) for one in drafts)):
        return None
    return Way(bool(exact), exit_layer, num_draft_tokens, None if drafts is None else tuple(drafts), has_corpus)
