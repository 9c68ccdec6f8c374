"""Reference implementations of all kernels in torch: the same arguments and results, on any device and in any dtype.

They never wait for the device, so they can be recorded and replayed, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.kernels.checks import check_accept, check_advance, check_attend, check_pick, check_scatter
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.layout import CONTENT, LAST, MOST_NODES, ROOM, Accepted, Layout, SamplingTensors


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
    seen = there & _visible(layout, own, at, window, chunk)
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


def _visible(layout: Layout, own: Tensor, at: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Whether each new token may attend to each token of its row, bool `[N, T]`."""
    position = layout.positions[:, None]
    key_at = at.expand(len(own), -1)
    seen = key_at <= position
    if layout.trees is not None:
        roots, positions, ancestors = layout.trees
        node = at - roots[own][:, None]  # [N, T]
        inside = node.clamp(0, MOST_NODES - 1)
        seen = torch.where(node < 0, seen, ((ancestors[:, None] >> inside) & 1).bool())
        key_at = torch.where(node < 0, key_at, positions[own].gather(1, inside))
    if window is not None:
        seen = seen & (position - key_at < window)
    if chunk is not None:
        seen = seen & (key_at // chunk == position // chunk)
    return seen


def pick(
    logits: Tensor, sampling: SamplingTensors, noise: Tensor | None = None, names: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The reference of `selfspec.kernels.fused_pick.pick`."""
    check_pick(logits, sampling, noise, names)
    picks, sure = _best(scores(logits, sampling, noise, names))
    return (picks if names is None else names[picks]), sure


def pick_two(
    logits: Tensor, sampling: SamplingTensors, noise: Tensor | None = None, names: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `selfspec.kernels.fused_pick.pick_two`."""
    check_pick(logits, sampling, noise, names)
    found = scores(logits, sampling, noise, names)
    picks, sure = _best(found)
    seconds = found.scatter(1, picks[:, None], float("-inf")).argmax(-1)
    return (picks, sure, seconds) if names is None else (names[picks], sure, names[seconds])


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the highest scores, int64 `[N]`, and their shares in the softmax of all."""
    picks = scores.argmax(-1, keepdim=True)
    return picks[:, 0], scores.softmax(-1).gather(1, picks)[:, 0]


def scores(
    logits: Tensor, sampling: SamplingTensors, noise: Tensor | None = None, names: Tensor | None = None
) -> Tensor:
    """The scores whose argmax is the pick, fp32 `[N, T]`: logits, or filtered logits plus noise for sampling."""
    found = logits.float()
    if not sampling.sampled:
        return found
    hot = (sampling.temperature > 0)[:, None]
    kept = scaled = found / torch.where(hot, sampling.temperature[:, None], 1)
    if sampling.filtered:
        kept = scaled.masked_fill(scaled < _bounds(scaled, sampling)[:, None], float("-inf"))
    if noise is None:
        if names is None:
            names = torch.arange(found.shape[1], device=found.device)  # not cached: a recording must hold it
        noise = gumbel(sampling.seeds, sampling.positions, found.shape[1], names[None])
    return torch.where(hot, kept + noise, found)


def _bounds(scaled: Tensor, sampling: SamplingTensors) -> Tensor:
    """The smallest scaled logit that each row keeps, fp32 `[N]`. Of equal logits, all or none are kept."""
    ordered = scaled.sort(-1, descending=True).values
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, scaled.shape[1]).clamp(max=scaled.shape[1]).long()
    bound = ordered.gather(1, top_k[:, None] - 1)
    mass = (ordered - ordered[:, :1]).exp().masked_fill(ordered < bound, 0)
    before = mass.cumsum(-1) - mass  # mass of more probable tokens
    enough = (before < sampling.top_p[:, None] * mass.sum(-1, keepdim=True)).sum(-1, keepdim=True).clamp(min=1)
    nucleus = torch.maximum(bound, ordered.gather(1, enough - 1))
    bound = torch.where(sampling.top_p[:, None] < 1, nucleus, bound)[:, 0]
    return torch.maximum(bound, ordered[:, 0] + sampling.min_p.log())


def accept(
    fed: Tensor,
    picks: Tensor,
    starts: Tensor,
    counts: Tensor,
    room: Tensor,
    eos: Tensor,
    most_new: int,
    sums: Tensor | None = None,
) -> Accepted:
    """The reference of `selfspec.kernels.fused_accept.accept`."""
    check_accept(fed, picks, starts, counts, room, eos, most_new, sums)
    place = torch.arange(most_new, device=fed.device)
    counts, room = counts.long()[:, None], room.long()[:, None]
    drafted = (counts - 1).clamp(min=0)
    at = starts.long()[:, None] + place
    guess = torch.where(place < drafted, fed[(at + 1).clamp(max=len(fed) - 1)], -1)
    own = torch.where(place < counts, picks[at.clamp(max=len(fed) - 1)], -1)
    wrong = (place < drafted) & (guess != own)
    accepted = torch.where(wrong, place, drafted).amin(1, keepdim=True)
    ends = (own[:, :, None] == eos[:, None]).any(-1) & (place <= accepted) & (place < counts)
    end = torch.where(ends, place, most_new + 1).amin(1, keepdim=True)
    block = torch.where(counts > 0, accepted + 1, 0)
    kept = torch.minimum(torch.minimum(block, end + 1), room)
    ended = torch.where(kept == end + 1, 1, torch.where(kept == room, 2, 0)) * (counts > 0)
    last = torch.where(place == kept - 1, own, 0).sum(1)
    if sums is not None:
        right = torch.minimum(accepted, kept)
        judged = torch.minimum(right + 1, torch.where(kept < accepted, kept, drafted))
        sums[0, :most_new] += (place < judged).sum(0)
        sums[1, :most_new] += (place < right).sum(0)
    record = torch.cat([drafted, accepted, kept, guess, own], 1)
    accepted, kept, ended = (one[:, 0].int() for one in (accepted, kept, ended))
    return Accepted(accepted, kept, ended, last, record)


def advance(state: Tensor, num_kept: Tensor, ended: Tensor, last: Tensor) -> None:
    """The reference of `selfspec.kernels.fused_advance.advance`."""
    check_advance(state, num_kept, ended, last)
    goes_on = ended == 0
    state[:, LAST] = last
    state[:, CONTENT] = (state[:, CONTENT] + num_kept) * goes_on
    state[:, ROOM] = (state[:, ROOM] - num_kept) * goes_on
