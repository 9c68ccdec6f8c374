"""Reference implementations of all kernels in torch: the same arguments and results, on any device and in any dtype.

`pick` and `accept` are torch's own pick and acceptance rule (`selfspec.kernels.pick`), which read numbers on the host.
The others never wait for the device, so that they can be recorded. Those of fused layers round to the dtype after
every operation, as transformers' modules do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.kernels.checks import (
    SQUARED,
    check_accept,
    check_add_norm,
    check_attend,
    check_gate,
    check_gate_product,
    check_norm_product,
    check_pick,
    check_prefetch,
    check_prepare,
    check_product_add,
    check_rotate,
    check_rotate_attend,
    check_scatter,
    check_squares,
)
from selfspec.kernels.layout import (
    CONTENT,
    DRAFTS,
    EOS,
    GIVEN,
    LAST,
    MIN_P,
    REMAINING,
    SEED,
    TEMPERATURE,
    TOP_K,
    Accepted,
    Layout,
    Norm,
    Prepared,
    Rotation,
    SamplingTensors,
    Step,
)
from selfspec.kernels.pick import Subset, best_of, num_accepted, params_of, scored, to_token_ids


def scatter(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """The reference of `selfspec.kernels.kv_scatter.scatter`."""
    check_scatter(key, value, keys, values, slots)
    real = slots >= 0
    # Tokens without a slot repeat the write of the first token that has one. If none has, slot 0 keeps its contents.
    source = torch.where(real, torch.arange(len(slots), device=slots.device), real.int().argmax())
    index = slots[source].clamp(min=0)
    for pages, new in ((keys, key), (values, value)):
        flat = pages.flatten(0, 1)
        flat[index] = torch.where(real.any(), new[source], flat[index])


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile_rows: int | None = None,
    split: int | None = None,
) -> Tensor:
    """The reference of `selfspec.kernels.paged_attention.attend`; neither tiles nor splits matter to it."""
    check_attend(queries, keys, values, layout, sinks, split)
    count, heads, dim = queries.shape
    share = heads // keys.shape[2]
    own = layout.rows.clamp(min=0).long()  # [N]
    at = torch.arange(layout.most_tokens, device=queries.device)
    pages = layout.pages[own][:, (at // keys.shape[1]).clamp(max=layout.pages.shape[1] - 1)].long()  # [N, T]
    length = layout.lengths[own][:, None]
    there = (at < length) & (layout.rows >= 0)[:, None]
    places = torch.where(there, pages * keys.shape[1] + at % keys.shape[1], 0)
    seen = there & _visible(layout, at, window, chunk)
    mask = there[:, :, None, None]
    k = keys.flatten(0, 1)[places].masked_fill_(~mask, 0)  # [N, T, kv_heads, dim]
    v = values.flatten(0, 1)[places].masked_fill_(~mask, 0)
    q = queries.reshape(count, -1, share, dim)
    high = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.einsum("nksd,ntkd->nkst", q.to(high), k.to(high)).reshape(count, heads, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(high)[None, :, None].expand(count, -1, 1)], -1)
    weights = scores.softmax(-1)[:, :, : layout.most_tokens].masked_fill(~seen[:, None], 0)
    out = torch.einsum("nkst,ntkd->nksd", weights.view(count, -1, share, layout.most_tokens), v.to(high))
    return out.reshape(count, heads, dim).to(queries.dtype)


def _visible(layout: Layout, at: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Whether each new token may attend to each token of its row, bool `[N, T]`."""
    position = layout.positions[:, None]
    seen = at <= position
    if window is not None:
        seen = seen & (position - at < window)
    if chunk is not None:
        seen = seen & (at // chunk == position // chunk)
    return seen


def pick(logits: Tensor, sampling: SamplingTensors, names: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The reference of `selfspec.kernels.fused_pick.pick`. It reads how rows pick on the host."""
    check_pick(logits, sampling, names)
    subset = None if names is None else Subset(names, len(names))
    picks, confidences = best_of(scored(logits, params_of(sampling), sampling.positions, None, subset))
    return to_token_ids(picks, subset), confidences


def accept(state: Tensor, fed: Tensor, picks: Tensor, starts: Tensor, counts: Tensor, most_new: int) -> Accepted:
    """The reference of `selfspec.kernels.fused_accept.accept`. It decides on the host."""
    check_accept(state, fed, picks, starts, counts)
    rows, keeps, records = list[list[int]](), list[int](), list[list[int]]()
    for start, count, row in zip(starts.tolist(), counts.tolist(), state.tolist(), strict=True):
        _, content, most = row[:DRAFTS]
        drafted, own = fed[start + 1 : start + count].tolist(), picks[start : start + count].tolist()
        accepted = num_accepted(drafted, own)
        block = own[: accepted + 1]
        end = next((i + 1 for i, token in enumerate(block) if token in row[EOS:GIVEN]), most_new + 2)
        kept = min(len(block), end, most)
        goes_on = not count or kept not in (end, most)
        rows.append([own[kept - 1] if kept else 0, *((content + kept, most - kept) if goes_on else (0, 0))])
        keeps.append(kept)
        padded = [[*one, *[-1] * (most_new - len(one))] for one in (drafted, own)]
        records.append([len(drafted), accepted, kept, *padded[0], *padded[1]])
    state[:, :DRAFTS] = torch.tensor(rows, device=state.device)
    num_kept = torch.tensor(keeps, dtype=torch.int32, device=state.device)
    return Accepted(num_kept, torch.tensor(records, device=state.device))


def prepare(
    state: Tensor, pages: Tensor, page_size: int, width: int, most_tokens: int, has_drafts: bool = False
) -> Prepared:
    """The reference of `selfspec.kernels.prepare_round.prepare`."""
    check_prepare(state, pages, width)
    slots, content, remaining = state.shape[0], state[:, CONTENT, None], state[:, REMAINING, None]
    place = torch.arange(width, device=state.device)
    slot = torch.arange(slots, device=state.device)[:, None]
    drafts = torch.minimum(state[:, DRAFTS, None], remaining - 1).clamp(min=0)
    used = (content > 0) & (place <= drafts)
    position = torch.where(used, content - 1 + place, 0)
    page = pages.gather(1, position // page_size).long()
    floats = state[:, TEMPERATURE : MIN_P + 1].int().view(torch.float32)
    kept = torch.where(used, page * page_size + position % page_size, -1)
    fields = (  # int32, int64, and float32, `[S, W]` each
        (torch.where(used, slot, -1).int(), state[:, TOP_K, None].int()),
        (kept, position, content + place, state[:, SEED, None]),
        floats[:, :, None].unbind(1),
    )

    def step(own: Tensor, fields: Sequence[Sequence[Tensor]], starts: Tensor, lengths: Tensor) -> Step:
        count = own.shape[1]
        (owners, top_k), (places, positions, targets, seeds), (temperature, top_p, min_p) = (
            [one.expand(slots, count).flatten().contiguous() for one in of_dtype] for of_dtype in fields
        )
        counts = own.sum(1).int()
        lengths = torch.where(own.any(1), lengths, 0).int()
        layout = Layout(starts.int(), counts, lengths, pages, owners, places, positions, count, most_tokens)
        return Step(layout, SamplingTensors(temperature, top_k, top_p, min_p, seeds, targets))

    verify = step(used, fields, slot[:, 0] * width, (content - 1 + used.sum(1, keepdim=True))[:, 0])
    steps = []
    for at in range(width if has_drafts else 0):
        own = slice(at, at + 1)
        column = [[one if one.shape[1] == 1 else one[:, own] for one in of_dtype] for of_dtype in fields]
        steps.append(step(used[:, own], column, slot[:, 0], content[:, 0] + at))
    fed = torch.cat([state[:, LAST, None], state[:, GIVEN : GIVEN + width - 1]], 1).flatten()
    return Prepared(fed, verify, steps)


def add_norm(
    hidden: Tensor, branch: Tensor | None, norm: Norm | None, post: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """The reference of `selfspec.kernels.fused_layer.add_norm`."""
    check_add_norm(hidden, branch, norm, post)
    if branch is not None:
        hidden = hidden + (branch if post is None else _normed(branch, post))
    return hidden, None if norm is None else _normed(hidden, norm)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    high = x.float()
    high = high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (high * (norm.offset + norm.weight.float())).to(x.dtype)
    return norm.weight * high.to(x.dtype)


def rotate(qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation) -> Tensor:
    """The reference of `selfspec.kernels.fused_layer.rotate`."""
    check_rotate(qkv, keys, values, layout, rotation)
    (kv_heads, dim), (cos, sin, q_norm, k_norm) = keys.shape[2:], rotation
    lines = qkv.unflatten(1, (-1, dim))
    queries, key, value = lines.split([lines.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        queries, key = _normed(queries, q_norm), _normed(key, k_norm)
    angles = cos[layout.positions][:, None], sin[layout.positions][:, None]
    scatter(_rotated(key, *angles), value, keys, values, layout.slots)
    return _rotated(queries, *angles)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """The reference of `selfspec.kernels.fused_layer.gate`."""
    check_gate(gate_up, activation)
    x, up = gate_up.chunk(2, -1)
    return (F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")) * up


def norm_product(hidden: Tensor, squares: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference of `selfspec.kernels.skinny_products.norm_product`."""
    check_norm_product(hidden, squares, norm, weight, bias)
    return F.linear(_normed_by(hidden, squares, norm), weight, bias)


def gate_product(hidden: Tensor, squares: Tensor, norm: Norm, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The reference of `selfspec.kernels.skinny_products.gate_product`."""
    check_gate_product(hidden, squares, norm, gate, up, activation)
    normed = _normed_by(hidden, squares, norm)
    x, risen = F.linear(normed, gate), F.linear(normed, up)
    return (F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")) * risen


def _normed_by(hidden: Tensor, squares: Tensor, norm: Norm) -> Tensor:
    """The norm of rows whose sums of squares are given."""
    scale = torch.rsqrt(squares.sum(1, keepdim=True) / hidden.shape[1] + norm.eps)
    return norm.weight * (hidden.float() * scale).to(hidden.dtype)


def product_add(x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of `selfspec.kernels.skinny_products.product_add`."""
    check_product_add(x, weight, bias, hidden)
    added = hidden + F.linear(x, weight, bias)
    return added, squares_of(added)


def squares_of(hidden: Tensor) -> Tensor:
    """The reference of `selfspec.kernels.skinny_products.squares_of`."""
    check_squares(hidden)
    padded = F.pad(hidden.float(), (0, -hidden.shape[1] % SQUARED))
    return padded.unflatten(1, (-1, SQUARED)).square().sum(-1)


def rotate_attend(
    qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation, scale: float, counters: Tensor,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """The reference of `selfspec.kernels.layer_attention.rotate_attend`. It does not count."""
    check_rotate_attend(qkv, keys, values, layout, rotation, counters)
    return attend(rotate(qkv, keys, values, layout, rotation), keys, values, layout, scale, window)


def prefetch(weight: Tensor) -> None:
    """The reference of `selfspec.kernels.prefetch.prefetch`."""
    check_prefetch(weight)
