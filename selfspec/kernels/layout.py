"""`Layout`: the description of a packed call in tensors, which recorded graphs can read; and a norm's numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMS norm. It multiplies by `weight + offset`."""

    weight: Tensor
    eps: float
    offset: float = 0.0  # 1 in Gemma


class Layout(NamedTuple):
    """The rows of a packed call: S slots, each with a row or empty, and N places, each with a new token or padding.

    All tensors are on one device. The new tokens of a row are adjacent and in order. Padding may be anywhere between
    rows. `most_new` and `most_tokens` determine the size of kernel launches.
    """

    starts: Tensor  # int32 [S], where each row's new tokens begin among the N
    counts: Tensor  # int32 [S], number of new tokens; 0: an empty slot
    lengths: Tensor  # int32 [S], number of tokens that the row holds, new ones included
    pages: Tensor  # int32 [S, P], pages of the row in order; unused entries are never read
    rows: Tensor  # int32 [N], the slot of each new token; -1: padding
    slots: Tensor  # int64 [N], place of its key and value: page * page_size + offset; -1: not written
    positions: Tensor  # int64 [N], its position
    most_new: int  # upper bound of `counts`
    most_tokens: int  # upper bound of `lengths`
    trees: Trees | None = None  # None: no row is a tree


class Trees(NamedTuple):
    """Rows that end with the nodes of a tree. Their new tokens are its last nodes.

    A new token of such a row attends to all tokens before the tree, to its ancestors, and to itself. For a row without
    a tree, the root is its length.
    """

    roots: Tensor  # int32 [S], index of the first node among the row's tokens
    positions: Tensor  # int32 [S, MOST_NODES], position of each node
    ancestors: Tensor  # int64 [N], bit j is set if the new token attends to node j


MOST_NODES = 64  # maximum nodes of a tree: the bits of an int64 mask


class DraftTree(NamedTuple):
    """The nodes of every slot's draft: its last token, its chain of drafted tokens, then second choices.

    Slots have W places for nodes. Unused ones hold token 0, parent -1, and no ancestors.
    """

    tokens: Tensor  # int64 [S, W]
    parents: Tensor  # int32 [S, W], the parent of each node; -1 for node 0
    chains: Tensor  # int32 [S], drafted tokens of the chain
    counts: Tensor  # int32 [S], nodes; 0 for an empty slot
    positions: Tensor  # int32 [S, MOST_NODES], position of each node
    ancestors: Tensor  # int64 [S, W], as in `Trees`


class Branches(NamedTuple):
    """The branch of every slot's tree that the output follows, as a chain."""

    tokens: Tensor  # int64 [S * width], the last token, then the drafted ones, in `width` places per slot
    picks: Tensor  # int64 [S * width], the target's pick after each of them
    counts: Tensor  # int32 [S], tokens of the branch; 0 for an empty slot
    nodes: Tensor  # int32 [S], the accepted second choice; 0: none
    depths: Tensor  # int32 [S], its place in the branch


class SamplingTensors(NamedTuple):
    """How each of N places picks: the fields of `selfspec.executors.pick.Sampling` as tensors."""

    temperature: Tensor  # fp32 [N], 0: greedy
    top_k: Tensor  # int32 [N], 0: no limit
    top_p: Tensor  # fp32 [N]
    min_p: Tensor  # fp32 [N]
    seeds: Tensor  # int64 [N]
    positions: Tensor  # int64 [N], the index in its row's content of the token to be picked
    sampled: bool = True  # whether any temperature may be above 0
    filtered: bool = True  # whether top_k, top_p or min_p of any place may remove tokens


class Accepted(NamedTuple):
    """The acceptance of every slot's draft; zeros for empty slots."""

    num_accepted: Tensor  # int32 [S], number of accepted drafted tokens
    num_kept: Tensor  # int32 [S], tokens kept of the accepted ones and the next pick, up to the row's end
    ended: Tensor  # int32 [S], 0: the row continues; ENDED_BY_EOS; ENDED_BY_LENGTH: it has no room left
    last: Tensor  # int64 [S], the last kept token, which the next round feeds first
    record: Tensor  # int64 [S, 3 + 2 * most_new]: counts of drafted, accepted and kept tokens; drafted tokens; picks


ENDED_BY_EOS, ENDED_BY_LENGTH = 1, 2

LAST, CONTENT, ROOM = range(3)  # columns of the rows that `advance` updates
