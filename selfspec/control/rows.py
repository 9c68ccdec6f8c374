"""What a policy may know of a row before a round, `RowState`; and what became of it, `RowOutcome`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Tally(NamedTuple):
    """Tokens of a row, and by bin of the match before each: how many came after one, and as what followed it last."""

    num_tokens: int
    seen: Sequence[int]
    right: Sequence[int]


class Guesses(Protocol):
    """What is free to guess of how a row goes on; see `selfspec.drafting.sources.Guesser`."""

    @property
    def match(self) -> int: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def is_stored(self) -> bool: ...
    def take_tally(self) -> Tally: ...
    @property
    def guessed(self) -> Sequence[int]: ...
    def chain(self, num_tokens: int) -> Sequence[int]: ...
    def alternatives(self) -> list[int]: ...


class RowState(NamedTuple):
    """What a policy may know of a row before a round."""

    request_id: int
    content_length: int  # prompt and output so far, in tokens
    room: int  # tokens it may still emit, at least 1
    guesses: Guesses | None = None  # told to policies that read lookups
    has_processors: bool = False  # its drafts are then over the whole vocabulary
    is_sampled: bool = False

    @property
    def whole(self) -> tuple[int, int]:
        """Which row, and how long it may become: the same from its first round to its last, and of no other row."""
        return self.request_id, self.content_length + self.room

    @property
    def match(self) -> int:
        """How many of its last tokens a lookup finds earlier."""
        return 0 if self.guesses is None else self.guesses.match

    @property
    def guessed(self) -> Sequence[int]:
        """By bin of the match before them: its tokens that came as a lookup would have guessed, since its tally was
        taken."""
        return () if self.guesses is None else self.guesses.guessed


class Shadow(NamedTuple):
    """Shadow picks of one row: what layers that were not the exit would have picked, against the target's picks."""

    layers: tuple[int, ...]
    hits: NDArray[np.bool_]  # [layers, judged positions in order]
    confidences: NDArray[np.float32]  # the same: probability of the shadow pick under that layer


class Looked(NamedTuple):
    """What free guesses, made or not, would have come to in a round."""

    match: int  # of the row before the round, 0 where nothing was found
    num_compared: int  # tokens that the target picked, the last of them beyond any draft
    num_right: int  # first tokens of the draft by lookup that they equal
    is_stored: bool = False  # whether that came from a corpus


class RowOutcome(NamedTuple):
    """What became of a row's draft in a round. Second choices are counted in `second` alone."""

    request_id: int
    num_drafted: int
    num_accepted: int
    confidences: tuple[float, ...] = ()  # of the drafted tokens, where the plan reads them
    divergences: tuple[float, ...] = ()  # KL(target || draft) in nats at the judged drafted positions, where asked
    shadow: Shadow | None = None
    looked: Looked | None = None  # told to policies that read lookups
    second: bool | None = None  # where the first choice was wrong, whether the second was right; None: it had none
    num_beside: int = 0  # second choices drafted
    is_left_out: bool = False  # whether the target's token, where a draft was refused, was none it was picked among

    @property
    def num_emitted(self) -> int:
        """Tokens that came, the target's own included, unless the row ended before it."""
        return self.num_accepted + 1 + bool(self.second)

    @property
    def num_judged(self) -> int:
        """Drafted tokens that the target judged: those it accepted, and the first it refused."""
        return min(self.num_accepted + 1, self.num_drafted)
