"""What a policy may know of a row, `RowState`, and what became of a round, `RoundOutcome`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from selfspec.control.laps import Seconds


class Tally(NamedTuple):
    """Tokens of a row, and by bin of the match before each: how many came after one, and as what followed it last."""

    num_tokens: int
    seen: Sequence[int]
    right: Sequence[int]


class Lookup(Protocol):
    """What lookup finds of a row; see `selfspec.drafting.sources.Guesser`. Its index is made when it is first asked."""

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


class RoundOutcome(NamedTuple):
    """What became of a round of a plan."""

    exit_layer: int | None  # what drafted: a layer, `LOOKUP`, or None
    rows: Sequence[RowOutcome]  # of the rows that had not ended before
    seconds: Seconds
