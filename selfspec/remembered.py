"""`Remembered`: what is known of a model beside its weights: what rounds cost here, how often its layers are right."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from time import monotonic
from typing import Any, Self

from selfspec import profile
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.led import Led
from selfspec.control.plan import Policy
from selfspec.control.priors import is_prior
from selfspec.target.stack import Stack

WRITE_EVERY = 0.1  # seconds
MOST_IDLE = 4


class Remembered:
    """Costs and acceptance statistics of an opened model, from this program, earlier ones, or the model's own files.

    Writing statistics down and making a policy from them takes the interpreter as long as a small model takes for a
    dozen tokens. So policies of calls that ended are kept for calls that want the same ones, which go on as if their
    prompts were further ones of one engine. What such a policy saw is written down when somebody asks, and now and then
    for calls that begin while it is in use.

    Attributes:
        stored_prior: statistics that came with the model's files, see `selfspec.profile.stored_prior`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._costs: dict[bool, Costs] = {}  # of exact mode, and of the ordinary one
        self._prior: dict[str, Any] | None = None
        self._has_looked = False  # for what earlier programs kept
        self._idle: dict[Hashable, Adaptive] = {}  # policies that nobody uses, by how they were made
        self._unwritten: Hashable = None  # which of them ended last, unless `_prior` is what that one saw
        self._written_at = 0.0
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
        how = self._unwritten
        policy = self._idle.pop(how, None)  # so that nobody takes it up meanwhile
        if policy is not None:
            self._write(policy)
            self._idle[how] = policy
        if self._prior is None and not self._has_looked:
            self._has_looked = True
            found = (profile.read_prior(self._stack), self.stored_prior)
            self._prior = next((one for one in found if is_prior(one, self._stack.num_layers)), None)
        return self._prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        self._idle.clear()
        self._prior, self._has_looked, self._unwritten = prior, True, None

    def take(self, policy: Policy) -> None:
        """What a policy saw is where the next one starts."""
        inner = policy.inner if isinstance(policy, Led) else policy
        if isinstance(inner, Adaptive):
            self._idle.clear()
            self._write(inner)

    def keep(self, policy: Adaptive, how: Hashable) -> None:
        """The same of one that nobody else will use.

        Args:
            how: it was made, beside its costs.
        """
        if len(self._idle) >= MOST_IDLE:
            self._idle.clear()
        self._idle[how], self._unwritten = policy, how
        if monotonic() - self._written_at >= WRITE_EVERY:
            self._write(policy)

    def go_on(self, costs: Costs, how: Hashable) -> Adaptive | None:
        """A policy that was kept, for other rows; None: none was that was made so and with these costs."""
        policy = self._idle.pop(how, None)  # whoever takes it has it alone, in whatever thread
        if how == self._unwritten:
            self._unwritten = None
        if policy is None or policy.costs is not costs:
            return None
        policy.forget_rows()
        return policy

    def copy(self) -> Self:
        """One that goes on by itself from what is known now."""
        _ = self.prior
        other = copy(self)
        other._costs, other._idle = {**self._costs}, {}
        return other

    def _write(self, policy: Adaptive) -> None:
        self._prior, self._unwritten, self._written_at = policy.state(), None, monotonic()

    def save(self) -> None:
        """For later programs, in the user's cache folder."""
        if self._prior is not None:
            profile.save_prior(self._stack, self._prior)
