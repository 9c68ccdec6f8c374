"""`Layout`: where the rows of a packed call stand, told in tensors that a captured graph can read again and again."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """S slots, each with a row or empty, and N places for new tokens, each taken or padding.

    All tensors lie on one device. A row's new tokens are neighbours, in order; padding may stand anywhere between rows.
    The two bounds are what a launch is shaped by: no row has more new tokens, or holds more tokens, than they say.
    """

    starts: Tensor  # int32 [S], where each row's new tokens begin among the N
    counts: Tensor  # int32 [S], how many there are; 0 is an empty slot
    lengths: Tensor  # int32 [S], tokens the row holds, the new ones included
    pages: Tensor  # int32 [S, P], pages of the row in order; unused entries are never read
    rows: Tensor  # int32 [N], the slot each new token belongs to; -1 is padding
    slots: Tensor  # int64 [N], where its key and value go, page * page_size + offset; -1 is nowhere
    positions: Tensor  # int64 [N], its position
    most_new: int
    most_tokens: int
    trees: Trees | None = None  # where some rows are trees


class Trees(NamedTuple):
    """Rows whose last tokens are the nodes of a tree, of which the new tokens are the last.

    A new token of such a row sees what lies before the tree, and the nodes it goes on from. A row that is no tree has
    its root at its length, and no nodes.
    """

    roots: Tensor  # int32 [S], where each row's first node lies among its tokens
    positions: Tensor  # int32 [S, MOST_NODES], of every node
    ancestors: Tensor  # int64 [N], bit j is set where a new token sees node j


MOST_NODES = 64  # the bits of a mask


class SamplingTensors(NamedTuple):
    """How each of N places picks; see `selfspec.executors.pick.Sampling`, whose fields these are."""

    temperature: Tensor  # fp32 [N], 0 is greedy
    top_k: Tensor  # int32 [N], 0 keeps all
    top_p: Tensor  # fp32 [N]
    min_p: Tensor  # fp32 [N]
    seeds: Tensor  # int64 [N]
    positions: Tensor  # int64 [N], the index in its row's content of the token to be picked
    sampled: bool = True  # whether any temperature may be above 0
    filtered: bool = True  # whether any of top_k, top_p and min_p may keep less than all


class Accepted(NamedTuple):
    """What became of every slot's draft; zeros for empty slots."""

    num_accepted: Tensor  # int32 [S], first drafted tokens that equal the target's picks
    num_kept: Tensor  # int32 [S], tokens kept of those and the pick after them, up to an end of text or of room
    ended: Tensor  # int32 [S], why the row ends there: 0 it does not, 1 end of text, 2 no room
    last: Tensor  # int64 [S], the last kept token: what the next round feeds first
    record: Tensor  # int64 [S, 3 + 2 * most_new]: drafted, accepted and kept counts, drafted tokens, picks


ENDED_BY_EOS, ENDED_BY_LENGTH = 1, 2
