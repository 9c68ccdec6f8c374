"""The self-check at load: the split model must give the logits of the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from selfspec.errors import UnsupportedModelError
from selfspec.kernels.rounding import rounded
from selfspec.model import attention_backends as backends
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.gguf_blocks import BlockWeight, Holding, release
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.model.refusals import replaced_forward
from selfspec.model.row_groups import SHORT
from selfspec.model.shortlist import NUM_TOP
from selfspec.model.split_model import SplitModel
from selfspec.model.views import make_twin

_log = logging.getLogger("selfspec")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
ROUNDED_TOLERANCE = 3e-2  # of models whose activations have two bytes: float32's differences become steps of rounding
# Of two rows: all tokens, and tokens of the prefill. The first is long enough for its own attention call.
LENGTHS, PREFIX = (SHORT + 12, 8), (SHORT + 8, 3)
# The same for compiled layers of models in blocks: they have one attention for all lengths, and large matrices.
COMPILED_LENGTHS, COMPILED_PREFIX = (12, 8), (8, 3)
MASK_DISTANCE = 1e3  # nats below the largest logit, from which on a logit counts as masked


@torch.inference_mode()
def split_error(split: SplitModel) -> float:
    """The largest logit difference between the split model and the whole model, in standard deviations of the logits.

    In half precision it is the largest median over positions: rounding may route single tokens to other experts, while
    a wrong split changes all positions.

    Two ragged rows run through prefill in one packed call, drafting by the early layers token by token, and
    verification by the later layers in one ragged call; at two exit layers, in the loaded dtype. Weights in blocks are
    dequantised for one layer at a time.
    """
    rng = torch.Generator().manual_seed(0)
    few = split.compiled is not None and _has_blocks(split)
    lengths, prefix = (COMPILED_LENGTHS, COMPILED_PREFIX) if few else (LENGTHS, PREFIX)
    tokens = torch.randint(0, int(split.config.vocab_size), (len(lengths), max(lengths)), generator=rng)
    tokens = tokens.to(split.device)
    wanted = _whole_logits(split, tokens)
    tail = torch.cat([wanted[row, at:end] for row, (at, end) in enumerate(zip(prefix, lengths, strict=True))])
    exits = sorted({max(1, split.num_layers // 4), split.num_layers // 2})
    errors = []
    for hidden in [_split_states(split, tokens, lengths, prefix, e) for e in exits]:
        errors.append(difference(split.logits(hidden), tail))
        # The head's result for a token must not depend on the number of tokens in the call.
        errors[-1][0] = torch.maximum(errors[-1][0], difference(split.logits(hidden[:1]), tail[:1])[0])
    worst = torch.stack(errors)
    return float(worst.max() if split.dtype.itemsize >= 4 else worst.median(-1).values.max())


def tolerance(split: SplitModel) -> float:
    """The largest split error that rounding explains, in standard deviations of the logits."""
    return ROUNDED_TOLERANCE if split.rounds else TOLERANCE.get(split.dtype, 0.2)


def _whole_logits(split: SplitModel, tokens: Tensor) -> Tensor:
    """Logits `[rows, N, vocab]` of the whole model, from token ids `[rows, N]`."""
    whole = make_twin(split.model)
    cache = {"past_key_values": _RoundingCache(), "use_cache": True} if split.rounds else {"use_cache": False}
    logits: Tensor = whole(input_ids=tokens, **cache).logits
    release(split.model.parameters())
    return logits.float()


class _RoundingCache(DynamicCache):
    """Rounds keys and values as the split model's cache does."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def difference(got: Tensor, wanted: Tensor) -> Tensor:
    """The largest logit difference at each of N positions, fp32 `[N]`, in standard deviations of `wanted`.

    Tokens that are masked in both do not count. A token that is masked in `wanted` only has an infinite difference.

    Args:
        got: fp32 `[N, vocab]`, as `wanted`.
    """
    real = wanted > wanted.amax(-1, keepdim=True) - MASK_DISTANCE
    is_masked = got < got.amax(-1, keepdim=True) - MASK_DISTANCE / 2  # half, as a tolerance for rounding
    apart = torch.where(real, (got - wanted).abs(), torch.where(is_masked, 0.0, torch.inf))
    return apart.amax(-1) / wanted[real].std().clamp_min(1e-6)


class _Call:
    """A call of layers over some rows, and the hidden states or token ids that the next layers take."""

    def __init__(self, rows: PackedRows, given: Tensor) -> None:
        self.rows, self.given = rows, given


def _has_blocks(split: SplitModel) -> bool:
    return any(isinstance(one, BlockWeight) for one in split.model.parameters())


def _split_states(
    split: SplitModel, tokens: Tensor, lengths: Sequence[int], prefix: Sequence[int], exit_layer: int
) -> Tensor:
    """Last hidden states `[N, hidden_size]` of all tokens after the prefixes, by prefill, draft and verification.

    A range of layers runs for all calls before the next range does.

    Args:
        tokens: int64 `[rows, N]`.
        lengths: of the rows.
        prefix: tokens of each row's prefill.
    """
    cache = split.new_cache(len(lengths), max(lengths))

    def call(spans: list[tuple[int, int, int]]) -> _Call:
        rows = PackedRows(cache, [Span([row], at, n) for row, at, n in spans], split.device)
        return _Call(rows, torch.cat([tokens[row, at : at + n] for row, at, n in spans]))

    def run(calls: Sequence[_Call], start: int, stop: int) -> None:
        own = split.layer_modules[start:stop]
        with Holding(*own) if split.compiled is None else nullcontext():
            for one in calls:
                one.given = split.run(one.rows, start, stop, one.given)

    prefill = call([(row, 0, n) for row, n in enumerate(prefix)])
    steps = range(max(n - at for n, at in zip(lengths, prefix, strict=True)))
    live = [[row for row, n in enumerate(lengths) if prefix[row] + step < n] for step in steps]
    drafts = [call([(row, prefix[row] + step, 1) for row in rows]) for step, rows in enumerate(live)]
    for start, stop in _ranges(split, 0, exit_layer):
        run([prefill, *drafts], start, stop)
    verify = call([(row, prefix[row], n - prefix[row]) for row, n in enumerate(lengths)])
    states: list[list[Tensor]] = [[] for _ in lengths]
    for rows, one in zip(live, drafts, strict=True):
        for row, state in zip(rows, one.given, strict=True):
            states[row].append(state)
    verify.given = torch.stack([state for own in states for state in own])
    for start, stop in _ranges(split, exit_layer, split.num_layers):
        run([prefill, verify], start, stop)
    return verify.given


def _ranges(split: SplitModel, start: int, stop: int) -> list[tuple[int, int]]:
    """The layers [start, stop) in the ranges that run at once: single ones where weights are to be dequantised."""
    if split.compiled is None and _has_blocks(split):
        return [(at, at + 1) for at in range(start, stop)]
    return [(start, stop)]


def self_check(split: SplitModel) -> float:
    """Check a split model, and return its split error.

    A compiled body that does not pass is replaced by the views, and an attention backend by `sdpa`, with a warning;
    the replacement is then checked. Heads over a part of the vocabulary are checked by `check_part_heads`.

    Raises:
        UnsupportedModelError: the split error is larger than rounding explains, or the split model raises.
    """
    error = _split_error_or_refusal(split)
    check_part_heads(split)
    return error


@torch.inference_mode()
def check_part_heads(split: SplitModel) -> None:
    """Disable heads over a part of the vocabulary that do not give the model's own logits.

    They replace the vocabulary product inside the model's forward. They fail where this forward handles logits by token
    id, for example to mask some of them.
    """
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(PREFIX[0], hidden_size_of(split), generator=rng).to(split.device, split.hidden_dtype)
    wanted = split.logits(hidden, 1)
    top = torch.stack([torch.randperm(wanted.shape[1], generator=rng)[:NUM_TOP] for _ in hidden]).to(split.device)
    others = split.others.expand(len(hidden), -1)

    def is_equal(index: Tensor, logits: Tensor) -> bool:
        error = difference(wanted.scatter(1, index, logits), wanted).max()
        return bool(error <= tolerance(split))

    def short_is_equal() -> bool:
        short = split.short_logits(hidden[None], top)
        return short is None or (
            is_equal(top, short[0, :, : top.shape[1]]) and is_equal(others, short[0, :, top.shape[1] :])
        )

    def draft_is_equal() -> bool:
        tokens = split.others.sort().values
        subset = split.subset_of(tokens)
        logits = None if subset is None else split.subset_logits(hidden, 1, subset)
        return logits is None or is_equal(tokens.expand(len(hidden), -1), logits)

    split.leave_out_heads(short=not _passes(short_is_equal), draft=not _passes(draft_is_equal))


def _passes(test: Callable[[], bool]) -> bool:
    """The result of a test; False where it raises, as a forward may on logits of an unexpected shape."""
    try:
        return test()
    except Exception:
        return False


def _split_error_or_refusal(split: SplitModel) -> float:
    kind = getattr(split.config, "model_type", "model")
    if split.num_layers < 2:
        raise UnsupportedModelError(f"{kind}: a model must have at least 2 layers, got {split.num_layers}")
    allowed = tolerance(split)
    if split.compiled is not None:
        try:
            error = split_error(split)
        except Exception:
            error = float("inf")
        if error <= allowed:
            return error
        split.compiled = None
    try:
        error = _error_with_fallback(split, allowed)
    except Exception as problem:
        raise UnsupportedModelError(
            replaced_forward(split.model)
            or f"{kind}: its layers cannot be run in two parts ({type(problem).__name__}: {problem}); "
            "decode it with transformers' own generate()"
        ) from problem
    if not error <= allowed:
        raise UnsupportedModelError(
            replaced_forward(split.model)
            or f"{kind}: run in two parts, its logits differ from the whole model's by {error:.2g} standard "
            f"deviations (at most {allowed:g} is rounding), so drafts could not be verified; "
            "decode it with transformers' own generate()"
        )
    return error


def _error_with_fallback(split: SplitModel, allowed: float) -> float:
    """The split error with the split model's attention backend, or, where it is too large, with `sdpa`."""
    if split.attention.name == "sdpa":
        return split_error(split)
    try:
        error = split_error(split)
        if error <= allowed:
            return error
        problem = f"its logits differ by {error:.2g} standard deviations"
    except Exception as raised:
        problem = f"{type(raised).__name__}: {raised}"
    _log.warning("attention backend %s does not serve this model here (%s); sdpa does", split.attention.name, problem)
    split.attention = backends.named("sdpa", split.device)
    return split_error(split)
