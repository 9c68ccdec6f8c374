"""`Ledger`: what drafting may still lose, against plain decoding of the same tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from selfspec.core import RoundOutput

SHARE = 0.0085
"""The share of decoding time that drafting may lose. Decisions take up to .003 of it in addition. The policy's other
time is paid by the ledger, with up to half of what plain rounds pay in."""
LEAST_STAKE = 0.2
"""A round that layers draft may be chosen if it can lose no more than this share of the largest balance."""
OVERRUN = 1.25
"""A single round that drafts is charged with at most so many times its expected time: what delays it delays plain
rounds, too. The rounds after it are charged with all that they take, until one keeps to its expected time."""
SECONDS, ROUNDS = 1.0, 64
"""A window: so many seconds, or so many plain rounds where these take longer."""


def window(plain_seconds: float) -> float:
    """Seconds of a window, over which the loss is bounded, where plain rounds take `plain_seconds`."""
    return max(SECONDS, ROUNDS * plain_seconds)


class Ledger(NamedTuple):
    """A balance in seconds, and the prices of rounds: what they lose if no drafted token is accepted.

    Decoding pays in `SHARE` of its time. A round that drafts pays in what plain decoding takes for its tokens and takes
    out its own time. Of several rows, what counts is how far the slowest one came: the tokens by which others are ahead
    of it (`leads`) end no batch earlier. While requests wait for a place, all rows count alike. The balance is at most
    `most`, so that one good minute does not pay for a bad one, and at least minus that, so that one interruption does
    not end drafting for long. A round is run only if the balance covers its price.

    So over T seconds, at least a window, the loss is at most SHARE * T + `most` <= 2 * SHARE * T, whatever is accepted,
    if rounds take what their prices say. What they take beyond that comes on top: up to `OVERRUN` it is charged, beyond
    it is not, until the times of such rounds, and so their prices, have been measured. Compiled programs have the same
    rules (`program.cpp`).
    """

    balance: float
    plain_seconds: float  # of a plain round of the rows
    lookup_prices: tuple[float, ...] = (0.0,)  # by drafted tokens of all rows; the last: of more
    layers_price: float = 0.0  # of a round that layers draft
    has_overrun: bool = False  # whether the last round that drafted took more than `OVERRUN`
    has_waiting: bool = False  # whether requests wait for a place
    leads: tuple[int, ...] = ()  # tokens by which each row is ahead of the slowest one; others than the rows': zeros

    @property
    def most(self) -> float:
        """The largest balance."""
        return SHARE * window(self.plain_seconds)

    @property
    def least_stake(self) -> float:
        """Seconds that any round that layers draft may lose when it is chosen."""
        return LEAST_STAKE * self.most

    @property
    def covers_layers(self) -> bool:
        """Whether a round that layers draft may run."""
        return self.layers_price <= self.balance

    def cut(self, drafted: Sequence[int]) -> list[int]:
        """Drafted tokens per row, cut to the longest drafts by lookup that the balance covers."""
        cut, last = [*drafted], len(self.lookup_prices) - 1
        while (total := sum(cut)) and self.lookup_prices[min(total, last)] > self.balance:
            longest = max(cut) - 1
            cut = [min(length, longest) for length in cut]
        return cut

    def after(self, round_: RoundOutput) -> Ledger:
        """The ledger after a round."""
        took, rows, gained, leads = round_.seconds.decoding, round_.rows, 0.0, self.leads
        has_overrun = self.has_overrun
        took = took if took > 0 else 0.0  # also of a clock that runs backwards
        if round_.exit_layer is not None and rows:
            drafted = sum([row.num_drafted for row in rows])
            found = self.lookup_prices[min(drafted, len(self.lookup_prices) - 1)]
            price = self.layers_price if round_.exit_layer else found
            most = OVERRUN * (self.plain_seconds + price)
            has_overrun, took = took > most, took if self.has_overrun else min(took, most)
            counts = [len(row.token_ids) for row in rows]  # 0: the row has ended
            before = leads if len(leads) == len(rows) else (0,) * len(rows)
            slowest = min([lead + count for lead, count in zip(before, counts, strict=True) if count], default=0)
            leads = tuple([max(0, lead + count - slowest) for lead, count in zip(before, counts, strict=True)])
            kept = float(slowest)
            if self.has_waiting:
                kept, leads = sum(counts) / len(rows), ()
            gained = kept * self.plain_seconds - took
        return self.entered(SHARE * took + gained)._replace(leads=leads, has_overrun=has_overrun)

    def of_rows(self, before: Sequence[Hashable], rows: Sequence[Hashable]) -> Ledger:
        """The ledger where other rows decode; identities of rows. Rows that are new are as slow as the slowest."""
        known = dict(zip(before, self.leads, strict=False))
        leads = [known.get(row, 0) for row in rows]
        least = min(leads, default=0)
        return self._replace(leads=tuple([lead - least for lead in leads]))

    def entered(self, seconds: float) -> Ledger:
        """The ledger after a gain, or a loss if negative. It is never overdrawn by more than `most`."""
        return self._replace(balance=max(-self.most, min(self.balance + seconds, self.most)))
