"""The self-check at load: the split model must give the logits of the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from selfspec.errors import UnsupportedModelError
from selfspec.model import attention_backends as backends
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.model.refusals import replaced_forward
from selfspec.model.row_groups import SHORT
from selfspec.model.shortlist import NUM_TOP
from selfspec.model.split_model import SplitModel
from selfspec.model.views import make_twin

_log = logging.getLogger("selfspec")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# Of two rows: all tokens, and tokens of the prefill. The first is long enough for its own attention call.
LENGTHS, PREFIX = (SHORT + 12, 8), (SHORT + 8, 3)
MASK_DISTANCE = 1e3  # nats below the largest logit, from which on a logit counts as masked


@torch.inference_mode()
def split_error(split: SplitModel) -> float:
    """The largest logit difference between the split model and the whole model, in standard deviations of the logits.

    In half precision it is the largest median over positions: rounding may route single tokens to other experts, while
    a wrong split changes all positions.

    Two ragged rows run through prefill in one packed call, drafting by the early layers token by token, and
    verification by the later layers in one ragged call; at two exit layers, in the loaded dtype.
    """
    whole = make_twin(split.model)
    vocab = int(whole.config.vocab_size)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocab, (n,), generator=rng).to(split.device) for n in LENGTHS]
    wanted = [whole(input_ids=p[None], use_cache=False).logits[0].float() for p in prompts]
    tail = torch.cat([want[at:] for want, at in zip(wanted, PREFIX, strict=True)])
    exits = sorted({max(1, split.num_layers // 4), split.num_layers // 2})
    errors = []
    for hidden in [_split_states(split, prompts, e) for e in exits]:
        errors.append(difference(split.logits(hidden), tail))
        # The head's result for a token must not depend on the number of tokens in the call.
        errors[-1][0] = torch.maximum(errors[-1][0], difference(split.logits(hidden[:1]), tail[:1])[0])
    worst = torch.stack(errors)
    return float(worst.max() if split.dtype.itemsize >= 4 else worst.median(-1).values.max())


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


def _split_states(split: SplitModel, prompts: list[Tensor], exit_layer: int) -> Tensor:
    """Last hidden states `[N, hidden_size]` of all tokens after the prefixes, by prefill, draft and verification."""
    cache = split.new_cache(len(prompts), max(LENGTHS))
    pages = [[row] for row in range(len(prompts))]

    def rows(spans: list[tuple[int, int, int]]) -> PackedRows:
        return PackedRows(cache, [Span(pages[row], at, n) for row, at, n in spans], split.device)

    prefill = rows([(row, 0, n) for row, n in enumerate(PREFIX)])
    hidden = split.run(prefill, 0, exit_layer, torch.cat([p[:n] for p, n in zip(prompts, PREFIX, strict=True)]))
    split.run(prefill, exit_layer, split.num_layers, hidden)
    drafted: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max(n - at for n, at in zip(LENGTHS, PREFIX, strict=True))):
        live = [row for row in range(len(prompts)) if PREFIX[row] + step < LENGTHS[row]]
        tokens = torch.stack([prompts[row][PREFIX[row] + step] for row in live])
        out = split.run(rows([(row, PREFIX[row] + step, 1) for row in live]), 0, exit_layer, tokens)
        for row, state in zip(live, out, strict=True):
            drafted[row].append(state)
    verify = rows([(row, PREFIX[row], LENGTHS[row] - PREFIX[row]) for row in range(len(prompts))])
    states = torch.stack([state for row in drafted for state in row])
    return split.run(verify, exit_layer, split.num_layers, states)


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
        return bool(error <= TOLERANCE.get(split.dtype, 0.2))

    def short_is_equal() -> bool:
        short = split.short_logits(hidden[None], top, [1])
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
    allowed = TOLERANCE.get(split.dtype, 0.2)
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
