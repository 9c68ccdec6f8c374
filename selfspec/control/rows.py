"""What a policy may know of a row, `RowState`, and what became of a round, `RoundOutcome`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Tally(NamedTuple):
    """Tokens of a row, and by bin of the match before each: how many came after one, and as what followed it last."""

    num_tokens: int
    seen: Sequence[int]
    right: Sequence[int]


class Lookup(Protocol):
    """What lookup finds of a row, see `selfspec.drafting.row_lookup`. Its index is made when it is first asked."""

    @property
    def match(self) -> int: ...
    def take_tally(self) -> Tally: ...


class RowState(NamedTuple):
    """What a policy may know of a row when it makes a plan."""

    request_id: int
    content_length: int  # prompt and output so far, in tokens
    room: int  # tokens it may still emit, at least 1
    lookup: Lookup | None = None  # None: no lookup is to be had
    has_processors: bool = False  # its drafts are then over the whole vocabulary
    is_sampled: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """Which row, and how long it may become: the same from its first round to its last, and of no other row."""
        return self.request_id, self.content_length + self.room


class Shadow(NamedTuple):
    """Shadow picks of one row: what layers that were not the exit would have picked, against the target's picks."""

    layers: tuple[int, ...]
    hits: NDArray[np.bool_]  # [layers, judged positions in order]
    confidences: NDArray[np.float32]  # the same: probability of the shadow pick under that layer


class RowOutcome(NamedTuple):
    """What became of a row's draft in a round. Second choices are counted in `second` alone."""

    request_id: int
    num_drafted: int
    num_accepted: int
    confidences: tuple[float, ...] = ()  # of the drafted tokens, where the plan reads them
    divergences: tuple[float, ...] = ()  # KL(target || draft) in nats at the judged drafted positions, where asked
    shadow: Shadow | None = None
    second: bool | None = None  # where the first choice was wrong, whether the second was right; None: it had none
    num_beside: int = 0  # second choices drafted
    is_left_out: bool = False  # whether the target's token, where a draft was refused, was none it was picked among
    match: int = 0  # of a draft by lookup: tokens of the match that it follows
    is_stored: bool = False  # whether that draft came from a corpus

    @property
    def num_emitted(self) -> int:
        """Tokens that came, the target's own included, unless the row ended before it."""
        return self.num_accepted + 1 + bool(self.second)

    @property
    def num_judged(self) -> int:
        """Drafted tokens that the target judged: those it accepted, and the first it refused."""
        return min(self.num_accepted + 1, self.num_drafted)


@dataclass(slots=True)
class StageSeconds:
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


class RoundOutcome(NamedTuple):
    """What became of a round of a plan."""

    exit_layer: int | None  # what drafted: a layer, `LOOKUP`, or None
    rows: Sequence[RowOutcome]  # of the rows that had not ended before
    seconds: StageSeconds
