"""The input of policies: `RowState` for planning, `RoundOutcome` for observing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Tally(NamedTuple):
    """Statistics of lookup over a row's new tokens, by bin of the match before each token."""

    num_tokens: int
    seen: Sequence[int]  # tokens after a match of this bin
    right: Sequence[int]  # those that equal the token after the earlier occurrence


class Lookup(Protocol):
    """Lookup for one row, see `selfspec.drafting.row_lookup`. Its index is built at the first use."""

    @property
    def match(self) -> int: ...
    def take_tally(self) -> Tally: ...


class Vocabulary(Protocol):
    """Token statistics for policies; see `selfspec.model.draft_vocabulary.Frequencies`."""

    @property
    def vocab_size(self) -> int: ...
    def coverage(self, size: int) -> float:
        """The share of recent tokens that were among the `size` most frequent tokens before them."""
        ...


class RowState(NamedTuple):
    """The state of a row before a plan is made."""

    request_id: int
    content_length: int  # tokens of prompt and output so far
    room: int  # tokens that the row may still emit, at least 1
    lookup: Lookup | None = None  # None: lookup is not available
    has_processors: bool = False  # drafts of such a row are over the whole vocabulary
    is_sampled: bool = False
    speculates: bool = True  # else nothing that a plan drafts for it is drafted

    @property
    def identity(self) -> tuple[int, int]:
        """Request id and maximum length: constant while the row lives, and different from other rows."""
        return self.request_id, self.content_length + self.room


class Shadow(NamedTuple):
    """Shadow picks of one row: the picks of layers that did not draft, compared with the target's picks."""

    layers: tuple[int, ...]
    hits: NDArray[np.bool_]  # [layers, judged positions in order]: equal to the target's pick
    confidences: NDArray[np.float32]  # the same shape: probability of the shadow pick under its layer


class RowOutcome(NamedTuple):
    """The outcome of a row's draft in a round. Second choices are counted in `second` and `num_beside` only."""

    request_id: int
    num_drafted: int
    num_accepted: int
    confidences: tuple[float, ...] = ()  # of the drafted tokens, where the plan reads them
    divergences: tuple[float, ...] = ()  # KL(target || draft) in nats at the judged positions, if the plan keeps them
    shadow: Shadow | None = None
    second: bool | None = None  # whether the second choice at the first rejection was accepted; None: there was none
    num_beside: int = 0  # drafted second choices
    is_left_out: bool = False  # the target's pick at the first rejection was outside the draft vocabulary
    match: int = 0  # of a draft by lookup: its match length
    source: int = 0  # of a draft by lookup: one of `control.plan.SOURCES`

    @property
    def num_emitted(self) -> int:
        """Emitted tokens, the bonus token included, which a row may lack that has ended."""
        return self.num_accepted + 1 + bool(self.second)

    @property
    def num_judged(self) -> int:
        """Judged drafted tokens: the accepted ones, and the first rejected one."""
        return min(self.num_accepted + 1, self.num_drafted)


@dataclass(slots=True)
class StageSeconds:
    """Wall time of a round by stage, in seconds. On CUDA, stages are not synchronised: it is the time of launching."""

    prefill: float = 0.0
    draft: float = 0.0  # early layers
    verify: float = 0.0  # remaining layers (all layers when nothing is drafted)
    head: float = 0.0  # final norm and vocabulary product
    pick: float = 0.0  # processors, filters, noise, argmax, and the copy to the host
    shadow: float = 0.0  # shadow picks
    control: float = 0.0  # plans and statistics
    rest: float = 0.0  # acceptance, stop strings, text, and overhead of compiled calls
    _last: float = field(default_factory=perf_counter, repr=False)

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to this stage."""
        now = self.now()
        self.add(stage, now - self._last)
        self._last = now

    def restart(self) -> None:
        """Start a new lap without adding the time since the last one."""
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
    """The outcome of one round of a plan."""

    exit_layer: int | None  # as in `Plan`, for this round
    rows: Sequence[RowOutcome]  # of the rows that were alive
    seconds: StageSeconds
