"""`Layout`: the description of a packed call in tensors, which recorded graphs can read; and what else kernels take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens of a split of attention of constant size. Short ones let a single row use more of the device, but each takes
# 4 * head_dim + 8 bytes for every new token and head.
SPLIT = 256
LEAST_TILE = 16  # rows of a tile of queries: the fewest that tensor cores take


class Norm(NamedTuple):
    """An RMS norm. It multiplies by `weight + offset`."""

    weight: Tensor
    eps: float
    offset: float = 0.0  # 1 in Gemma


class Rotation(NamedTuple):
    """How a layer norms and rotates its queries and keys. Both norms are given or none, with equal eps and offset."""

    cos: Tensor  # [positions, head_dim / 2]; both halves of a head have the same angles
    sin: Tensor  # of the same shape
    q_norm: Norm | None = None  # of each query head, [head_dim]
    k_norm: Norm | None = None  # of each key head

    @property
    def eps(self) -> float:
        return self.q_norm.eps if self.q_norm else 0.0

    @property
    def offset(self) -> float:
        return self.q_norm.offset if self.q_norm else 0.0


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


def padded(layout: Layout, count: int) -> Layout:
    """The layout with padding after its last place, `count` places in all."""

    def filled(values: Tensor, padding: int) -> Tensor:
        return torch.cat([values, values.new_full((count - len(values),), padding)])

    rows, slots, positions = filled(layout.rows, -1), filled(layout.slots, -1), filled(layout.positions, 0)
    return layout._replace(rows=rows, slots=slots, positions=positions)


class SamplingTensors(NamedTuple):
    """How each of N places picks: the fields of `selfspec.params.SamplingParams` as tensors."""

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

    num_kept: Tensor  # int32 [S], tokens kept of the accepted ones and the next pick, up to the row's end
    record: Tensor  # int64 [S, 3 + 2 * most_new]: counts of drafted, accepted and kept tokens; drafted tokens; picks


class Step(NamedTuple):
    """One call of a round: where its tokens lie, and how it picks from their logits."""

    layout: Layout
    sampling: SamplingTensors


class Prepared(NamedTuple):
    """The calls of a round of S slots with W places each, in buffers of their own."""

    fed: Tensor  # int64 [S * W], each slot's last token, then its given draft
    verify: Step  # all places, slot by slot
    drafts: list[Step]  # one place of every slot, for each of the W places; empty unless asked for


LAST, CONTENT, REMAINING, DRAFTS, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(9)
"""Columns of a round's rows; `accept` updates the first three. Floats are the bits of a float32."""
MOST_EOS = 8  # tokens that end a row, in as many columns; -1 in unused ones
EOS = 9
GIVEN = EOS + MOST_EOS  # the first of the columns of a given draft
