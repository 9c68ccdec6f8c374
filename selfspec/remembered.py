"""`Remembered`: what is known of a model beside its weights: what rounds cost here, how often its layers are right."""

from __future__ import annotations

from typing import Any

from selfspec import profile
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.led import Led
from selfspec.control.plan import Policy
from selfspec.control.priors import is_prior
from selfspec.target.stack import Stack


class Remembered:
    """Costs and acceptance statistics of an opened model, from this program, earlier ones, or the model's own files.

    Attributes:
        stored_prior: statistics that came with the model's files, see `selfspec.profile.stored_prior`.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._costs: dict[bool, Costs] = {}  # of exact mode, and of the ordinary one
        self._prior: dict[str, Any] | None = None
        self._has_looked = False  # for what earlier programs kept
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
        if self._prior is None and not self._has_looked:
            self._has_looked = True
            found = (profile.read_prior(self._stack), self.stored_prior)
            self._prior = next((one for one in found if is_prior(one, self._stack.num_layers)), None)
        return self._prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        self._prior, self._has_looked = prior, True

    def take(self, policy: Policy) -> None:
        """What a policy saw is where the next one starts."""
        inner = policy.inner if isinstance(policy, Led) else policy
        if isinstance(inner, Adaptive):
            self._prior = inner.state()

    def save(self) -> None:
        """For later programs, in the user's cache folder."""
        if self._prior is not None:
            profile.save_prior(self._stack, self._prior)
