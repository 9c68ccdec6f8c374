"""Does the split model agree with the whole one? Asked once at load, before anybody trusts a token."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from selfspec.errors import UnsupportedModelError
from selfspec.target import backends
from selfspec.target.cache import PackedRows, Span
from selfspec.target.groups import SHORT
from selfspec.target.stack import Stack
from selfspec.target.views import make_twin

_log = logging.getLogger("selfspec")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# Two rows: tokens in all, tokens prefilled before the draft begins. The first is long enough for a call of its own.
LENGTHS, PREFIX = (SHORT + 12, 8), (SHORT + 8, 3)


@torch.inference_mode()
def split_error(stack: Stack) -> float:
    """Logit difference between split and whole, in units of the whole model's logit spread: the largest.

    In half precision the median position's: rounding can send a token of a mixture of experts to another expert, while
    a wrong split disturbs every position.

    Two ragged rows are prefilled in one packed call, drafted token by token through the early layers, and verified in
    one ragged call of the later ones; at two exit layers, in the loaded dtype.
    """
    whole = make_twin(stack.model)
    vocab = int(whole.config.vocab_size)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocab, (n,), generator=rng).to(stack.device) for n in LENGTHS]
    wanted = [whole(input_ids=p[None], use_cache=False).logits[0].float() for p in prompts]
    spread = torch.cat(wanted).std().clamp_min(1e-6)
    wanted_tail = torch.cat([want[at:] for want, at in zip(wanted, PREFIX, strict=True)])
    exits = {max(1, stack.num_layers // 4), stack.num_layers // 2}
    errors = torch.stack([(_split_logits(stack, prompts, e) - wanted_tail).abs().amax(-1) for e in sorted(exits)])
    worst = errors.max() if stack.dtype.itemsize >= 4 else errors.median(-1).values.max()
    return float(worst / spread)


def _split_logits(stack: Stack, prompts: list[Tensor], exit_layer: int) -> Tensor:
    cache = stack.new_cache(len(prompts), max(LENGTHS))
    pages = [[row] for row in range(len(prompts))]

    def rows(spans: list[tuple[int, int, int]]) -> PackedRows:
        return PackedRows(cache, [Span(pages[row], at, n) for row, at, n in spans], stack.device)

    prefill = rows([(row, 0, n) for row, n in enumerate(PREFIX)])
    hidden = stack.run(prefill, 0, exit_layer, torch.cat([p[:n] for p, n in zip(prompts, PREFIX, strict=True)]))
    stack.run(prefill, exit_layer, stack.num_layers, hidden)
    drafted: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max(n - at for n, at in zip(LENGTHS, PREFIX, strict=True))):
        live = [row for row in range(len(prompts)) if PREFIX[row] + step < LENGTHS[row]]
        tokens = torch.stack([prompts[row][PREFIX[row] + step] for row in live])
        out = stack.run(rows([(row, PREFIX[row] + step, 1) for row in live]), 0, exit_layer, tokens)
        for row, state in zip(live, out, strict=True):
            drafted[row].append(state)
    verify = rows([(row, PREFIX[row], LENGTHS[row] - PREFIX[row]) for row in range(len(prompts))])
    states = torch.stack([state for row in drafted for state in row])
    return stack.logits(stack.run(verify, exit_layer, stack.num_layers, states))


def self_check(stack: Stack) -> float:
    """The split error, or UnsupportedModelError with the reason when it is beyond what rounding explains.

    A lean body that does not pass is dropped in favour of the views, which are then checked themselves; so is an
    attention backend in favour of `sdpa`, with a warning.
    """
    kind = getattr(stack.config, "model_type", "model")
    if stack.num_layers < 2:
        raise UnsupportedModelError(f"{kind}: a model of {stack.num_layers} layer has no layer to leave early at")
    allowed = TOLERANCE.get(stack.dtype, 0.2)
    if stack.lean is not None:
        try:
            error = split_error(stack)
        except Exception:
            error = float("inf")
        if error <= allowed:
            return error
        stack.lean = None
    try:
        error = _error_by_any_backend(stack, allowed)
    except Exception as problem:
        raise UnsupportedModelError(
            f"{kind}: its layers cannot be run in two parts ({type(problem).__name__}: {problem}); "
            "decode it with transformers' own generate()"
        ) from problem
    if not error <= allowed:
        raise UnsupportedModelError(
            f"{kind}: run in two parts, its logits differ from the whole model's by {error:.2g} standard deviations "
            f"(at most {allowed:g} is rounding), so drafts could not be verified; "
            "decode it with transformers' own generate()"
        )
    return error


def _error_by_any_backend(stack: Stack, allowed: float) -> float:
    """The split error with the stack's attention backend; where that is too large, with `sdpa` in its place."""
    if stack.backend.name == "sdpa":
        return split_error(stack)
    try:
        error = split_error(stack)
        if error <= allowed:
            return error
        problem = f"its logits differ by {error:.2g} standard deviations"
    except Exception as raised:
        problem = f"{type(raised).__name__}: {raised}"
    _log.warning("attention backend %s does not serve this model here (%s); sdpa does", stack.backend.name, problem)
    stack.backend = backends.named("sdpa", stack.device)
    return split_error(stack)
