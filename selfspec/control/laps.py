"""`Seconds`: what the stages of a round took."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class Seconds:
    """Wall time of a round by stage; on CUDA, without a synchronisation, the time to launch it."""

    prefill: float = 0.0
    draft: float = 0.0  # early layers
    verify: float = 0.0  # remaining layers (all layers when nothing is drafted)
    head: float = 0.0  # final norm and vocabulary product
    pick: float = 0.0  # processors, filters, noise, argmax, and the copy to the host
    shadow: float = 0.0  # what other layers would have picked
    control: float = 0.0  # plans and statistics
    rest: float = 0.0  # acceptance, stops, text; what is spent around a round in one compiled call
    _last: float = field(default_factory=perf_counter, repr=False)

    def lap(self, stage: str) -> None:
        """All time since the last lap went to this stage."""
        now = self.now()
        self.add(stage, now - self._last)
        self._last = now

    def restart(self) -> None:
        """What passed since the last lap is in another stage already."""
        self._last = self.now()

    def add(self, stage: str, seconds: float) -> None:
        setattr(self, stage, getattr(self, stage) + seconds)

    def now(self) -> float:
        return perf_counter()

    @property
    def total(self) -> float:
        stages = (self.prefill, self.draft, self.verify, self.head, self.pick, self.shadow, self.control, self.rest)
        return sum(stages)
