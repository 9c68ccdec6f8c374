"""Picks from logits over a vocabulary or a part of it (Triton), without storing probabilities.

A first kernel finds the best token of each block of the vocabulary, a second one the best block. Noise is computed in
the kernel (`selfspec.kernels.gumbel`). The filters become one bound per row, the smallest scaled logit that is kept. It
is found by bisection of 32-bit patterns, without sorting. `selfspec.kernels.reference.pick` is the reference
implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_pick
from selfspec.kernels.layout import SamplingTensors

BLOCK = 2048  # tokens of the vocabulary per program
WIDE = 8192  # tokens per step of the search for a bound


def pick(logits: Tensor, sampling: SamplingTensors, names: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pick one token per place. Returns tokens, int64 `[N]`, and confidences, fp32 `[N]`; see `kernels.pick.best_of`.

    Among equal scores the lowest token wins. A NaN logit counts as the largest, as in `torch.argmax`. Of logits
    that are equal to a filter's bound, all are kept; transformers' top-p keeps some of them.

    Args:
        logits: fp32 `[N, T]`, of the whole vocabulary or of a part of it.
        sampling: how each place picks.
        names: int64 `[T]`, ascending: the token ids of the logits, which determine the noise; None: 0 to T - 1.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_pick`.
    """
    check_pick(logits, sampling, names)
    count, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    bounds = _bounds(logits, sampling) if sampling.sampled and sampling.filtered else None
    tops, totals = logits.new_empty((2, count, blocks))
    tokens = logits.new_empty((count, blocks), dtype=torch.int64)
    _pick_of_block[(count, blocks)](
        logits, bounds, names, sampling.temperature, sampling.seeds, sampling.positions,
        tops, totals, tokens, logits.stride(0), size,
        BLOCK=BLOCK, SAMPLED=sampling.sampled, BOUNDED=bounds is not None, NAMED=names is not None, num_warps=4,
    )  # fmt: skip
    picks, confidences = logits.new_empty(count, dtype=torch.int64), logits.new_empty(count)
    _pick_of_row[(count,)](
        tops, totals, tokens, picks, confidences, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
    )
    return picks, confidences


def _bounds(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The smallest scaled logit that each row keeps, fp32 `[N]`."""
    count, vocab = logits.shape
    bounds = logits.new_empty(count)
    wide = min(WIDE, triton.next_power_of_2(vocab))
    _bound[(count,)](
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bounds, logits.stride(0), vocab,
        BLOCK=wide, num_warps=16 if wide == WIDE else 4,
    )  # fmt: skip
    return bounds


@triton.jit
def _scaled(logits_ptr, row, stride, token, vocab, temperature):
    """Logits over temperature; -inf beyond the vocabulary, and the largest float for NaN."""
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    return tl.where(x != x, 3.4028234663852886e38, x)


@triton.jit
def _key(x):
    """Integers in the order of the floats; the same operation on the bits inverts it."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _mix(z):
    """The finaliser of SplitMix64, with logical shifts."""
    z = (((z >> 30) & 0x3FFFFFFFF) ^ z) * -4658895280553007687
    z = (((z >> 27) & 0x1FFFFFFFFF) ^ z) * -7723592293110705685
    return ((z >> 31) & 0x1FFFFFFFF) ^ z


@triton.jit
def _gumbel(seed, position, token):
    """The noise of `selfspec.kernels.gumbel`: the same 52 bits, and both logarithms in float64."""
    STEP: tl.constexpr = -7046029254386353131
    key = _mix(_mix(seed * STEP + STEP) + position * STEP)
    bits = (_mix(key + (token.to(tl.int64) + 1) * STEP) >> 12) & 0xFFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _pick_of_block(
    logits_ptr, bounds_ptr, names_ptr, temperature_ptr, seeds_ptr, positions_ptr,
    tops_ptr, totals_ptr, tokens_ptr, stride, vocab,
    BLOCK: tl.constexpr, SAMPLED: tl.constexpr, BOUNDED: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        score = _scaled(logits_ptr, row, stride, token, vocab, tl.where(temperature > 0, temperature, 1.0))
        if temperature > 0:
            if BOUNDED:
                score = tl.where(score >= tl.load(bounds_ptr + row), score, float("-inf"))
            name = token
            if NAMED:
                name = tl.load(names_ptr + token, mask=token < vocab, other=0)
            score += _gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), name)
    else:
        score = _scaled(logits_ptr, row, stride, token, vocab, 1.0)
    top, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + block
    tl.store(tops_ptr + at, top)
    tl.store(tokens_ptr + at, _name(names_ptr, block * BLOCK + best, NAMED))
    tl.store(totals_ptr + at, tl.sum(tl.exp(score - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def _name(names_ptr, at, NAMED: tl.constexpr):
    """The token id of a logit."""
    if NAMED:
        return tl.load(names_ptr + at)
    else:
        return at.to(tl.int64)


@triton.jit(do_not_specialize=["blocks"])
def _pick_of_row(
    tops_ptr, totals_ptr, tokens_ptr, picks_ptr, confidences_ptr, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(tops_ptr + row * blocks + block, mask=inside, other=float("-inf"))
    totals = tl.load(totals_ptr + row * blocks + block, mask=inside, other=0.0)
    top, best = tl.max(tops, 0, return_indices=True, return_indices_tie_break_left=True)
    total = tl.sum(totals * tl.exp(tops - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(picks_ptr + row, tl.load(tokens_ptr + row * blocks + best))
    tl.store(confidences_ptr + row, 1.0 / tl.where(total > 0, total, 1.0))


@triton.jit
def _bound(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, bounds_ptr, stride, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    lane = tl.arange(0, BLOCK)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1) & (min_p <= 0)):
        tl.store(bounds_ptr + row, float("-inf"))
        return
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for base in range(0, vocab, BLOCK):
        highest = tl.maximum(highest, _scaled(logits_ptr, row, stride, base + lane, vocab, temperature))
    top = tl.max(highest, 0)
    low = tl.full((), -2139095041, tl.int64)  # the key of -inf
    if top_k > 0:  # the highest bound that at least top_k tokens reach
        high = tl.max(_key(highest), 0)
        enough = tl.minimum(top_k, vocab)
        while low < high:
            middle = low + (high - low + 1) // 2
            reach = tl.zeros((BLOCK,), tl.int32)
            for base in range(0, vocab, BLOCK):
                x = _scaled(logits_ptr, row, stride, base + lane, vocab, temperature)
                reach += ((_key(x) >= middle) & (base + lane < vocab)).to(tl.int32)
            if tl.sum(reach, 0) >= enough:
                low = middle
            else:
                high = middle - 1
    if top_p < 1:  # the lowest bound above which the kept tokens weigh less than top_p
        whole = tl.zeros((BLOCK,), tl.float32)
        for base in range(0, vocab, BLOCK):
            x = _scaled(logits_ptr, row, stride, base + lane, vocab, temperature)
            whole += tl.where(_key(x) >= low, tl.exp(x - top), 0.0)
        wanted = top_p * tl.sum(whole, 0)
        high = tl.max(_key(highest), 0)
        while low < high:
            middle = low + (high - low) // 2
            above = tl.zeros((BLOCK,), tl.float32)
            for base in range(0, vocab, BLOCK):
                x = _scaled(logits_ptr, row, stride, base + lane, vocab, temperature)
                above += tl.where(_key(x) > middle, tl.exp(x - top), 0.0)
            if tl.sum(above, 0) < wanted:
                high = middle
            else:
                low = middle + 1
    bits = low.to(tl.int32)
    bound = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    if min_p > 0:
        bound = tl.maximum(bound, top + tl.log(min_p))
    tl.store(bounds_ptr + row, bound)
