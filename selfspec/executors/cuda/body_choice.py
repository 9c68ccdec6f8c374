"""Choice of what runs the layers in recordings: the model's own modules (the views), `FusedBody` or `SkinnyBody`.

The views serve every family. The fused layers are used if, on the device itself, they give the views' hidden states up
to rounding, and a recorded plain token takes less time with them. So are, for calls of few tokens, those in five
launches, whose bits must also be the same for any number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.executors.cuda.body_checks import MAX_ROUNDINGS, PAGE, differing_rows, layers_error
from selfspec.executors.cuda.capture import CAPTURING, Recording
from selfspec.executors.cuda.device_work import fastest
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.packed_linear import Packing
from selfspec.executors.cuda.rounds import LEAST_HELD, StaticRows
from selfspec.executors.cuda.skinny_body import SkinnyBody, unserved
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import LlamaWeights

_log = logging.getLogger("selfspec")
Measure = Callable[[Recording, torch.device], float]  # the seconds that a replay takes
MAX_MEMORY_SHARE = 0.5  # share of the free memory that packed copies may take
CONTEXT = 1000  # tokens before the one that is measured
TIMED = (1, 16, 32, SKINNY_ROWS)  # rows with a token each, by which five launches are compared with ten
REPEATS, REPLAYS = 3, 10  # measurements, and replays in each


class BodyChoice(NamedTuple):
    """What runs the layers in recordings of a model that passed the self-check; it can be kept and used again."""

    packing: Packing | None  # how the weights of fused layers are packed; None: the model's own modules run
    most_rows: int  # the most tokens of a call whose layers take five launches; 0: none
    most_prefetched: int = 0  # those of a call that prefetches


def choose_body(
    split: Any, runner: Any, owned: bool, problem_of: Callable[[], str], measure: Measure | None = None
) -> BodyChoice | None:
    """Set `split.recorded` to fused layers if they serve the model, are equal to the views, and are faster.

    The choice and its reason are logged. Recordings that were made with other layers are dropped.

    Args:
        split: a `selfspec.model.split_model.SplitModel` whose rounds, recorded with the views, passed the self-check.
        runner: its `selfspec.executors.cuda.runner.Runner`.
        owned: whether the model's weights may be moved in memory: nobody else uses the model.
        problem_of: checks the rounds that are recorded now; "" if nothing is wrong with them.
        measure: default: `replay_seconds`.

    Returns:
        None where an error decided, which may not come again.
    """
    cannot_record = runner.refused is not None
    if split.llama is None or cannot_record:
        _log.info("recordings run the model's own modules: fused layers do not serve this model")
        return None if cannot_record else BodyChoice(None, 0)
    given = split, runner, problem_of, measure or replay_seconds
    packing = packing_of(split.llama, owned)
    ten = _tried(*given, lambda rows: fused_body(split, runner, packing), (1,))
    if not ten.most_rows:
        _log.log(ten.level, "recordings run the model's own modules; with fused layers: %s", ten.told)
        return None if ten.is_error else BodyChoice(None, 0)
    _log.info("recordings run fused layers (weights: %s); %s", packing, ten.told)
    body, ahead = split.recorded, _Trial(0, "")
    five = _tried(*given, lambda rows: SkinnyBody(body, rows), TIMED)
    if five.most_rows:
        _log.info("fused layers take five launches in calls of at most %d tokens; %s", five.most_rows, five.told)
        timed = [rows for rows in TIMED if rows <= five.most_rows]
        ahead = _tried(*given, lambda rows: SkinnyBody(body, five.most_rows, rows), timed)
        _log.log(ahead.level, "weights are prefetched in calls of at most %d tokens; %s", ahead.most_rows, ahead.told)
    else:
        _log.log(five.level, "fused layers take ten launches; with five: %s", five.told)
    return None if five.is_error or ahead.is_error else BodyChoice(packing, five.most_rows, ahead.most_rows)


class _Trial(NamedTuple):
    """What came of trying layers."""

    most_rows: int  # of `timed`, up to which they are faster; 0: they are not used
    told: str  # why they are not; or times
    is_error: bool = False  # whether an error decided

    @property
    def level(self) -> int:
        return logging.WARNING if self.is_error else logging.INFO


def _tried(
    split: Any, runner: Any, problem_of: Callable[[], str], measure: Measure, make: Callable[[int], FusedBody],
    timed: Sequence[int],
) -> _Trial:  # fmt: skip
    """Set `split.recorded` to layers if they are right, and faster than those that it has.

    Args:
        make: makes them for calls of at most so many tokens.
        timed: rows with a token each. The layers serve as many as they are faster for.
    """
    before, most, told, is_error = split.recorded, 0, "", False
    try:
        body = make(timed[-1])
        reason = _wrong(split, body)
        for rows in () if reason else timed:
            split.recorded = before
            theirs = _token_seconds(split, runner, measure, rows)
            split.recorded = body
            own = _token_seconds(split, runner, measure, rows)
            told = f"a token of {rows} rows takes {1e3 * own:.3g} ms, {1e3 * theirs:.3g} ms without them"
            if own >= theirs:
                break
            most = rows
        if 0 < most < timed[-1]:
            split.recorded = make(most)
        runner.graphs.forget(lambda key: True)
        reason = reason or ("" if most else told) or problem_of() or runner.refused or ""
    except torch.OutOfMemoryError:
        is_error, reason = True, "the device has too little free memory, and decodes more slowly without them"
    except Exception as problem:  # compilers and drivers raise exceptions of any type
        is_error, reason = True, f"{type(problem).__name__}: {problem}"
    if not reason:
        return _Trial(most, told)
    split.recorded, runner.refused = before, None
    runner.graphs.forget(lambda key: True)
    return _Trial(0, reason, is_error)


def _wrong(split: Any, body: FusedBody) -> str:
    """What is wrong with layers before any round is recorded with them; "" if nothing is."""
    if isinstance(body, SkinnyBody) and body.most_prefetched:
        return ""  # it computes what was checked without
    if isinstance(body, SkinnyBody) and (reason := unserved(body)):
        return reason
    error = layers_error(split, body)
    if not error <= MAX_ROUNDINGS:  # it may be NaN
        return f"hidden states differ by {error:.2g} roundings"
    return differing_rows(split, body) if isinstance(body, SkinnyBody) else ""


def apply_choice(split: Any, runner: Any, owned: bool, choice: BodyChoice) -> bool:
    """Set `split.recorded` as it was chosen before; False where that is not possible as the memory is now."""
    if choice.packing is None:
        return True
    if split.llama is None or packing_of(split.llama, owned) != choice.packing:
        return False
    try:
        body = fused_body(split, runner, choice.packing)
        split.recorded = SkinnyBody(body, *choice[1:]) if choice.most_rows else body
    except torch.OutOfMemoryError:
        return False
    return True


def fused_body(split: Any, runner: Any, packing: Packing) -> FusedBody:
    """Fused layers of a split model."""
    body = FusedBody(split.llama, runner.kernels, packing)
    if packing == "share" and split.device.type == "cuda":
        with CAPTURING:
            torch.cuda.empty_cache()  # else torch keeps the memory in which the weights were before
    return body


def packing_of(weights: LlamaWeights, owned: bool) -> Packing:
    """How the weights are packed: in place if the model is owned, else as copies where they fit into free memory."""
    if owned and not any(weight.is_inference() for layer in weights.layers for weight in layer.weights()):
        return "share"
    device = weights.embedding.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return "copy" if free is None or FusedBody.bytes_of(weights) <= MAX_MEMORY_SHARE * free else "none"


def _token_seconds(split: Any, runner: Any, measure: Measure, rows: int = 1) -> float:
    """The seconds of a plain token of each row, from a recording of all layers and the head as they are run now.

    Rows share the pages of one: 64 rows of their own would take gigabytes. So a device may read them from its cache.
    """
    held = min(LEAST_HELD, split.context_limit)
    context = min(CONTEXT, held - 1)
    pages = range(context // PAGE + 1)
    cache = PagedCache(len(pages), PAGE, split.num_layers)
    token = torch.zeros(rows, dtype=torch.int64, device=split.device)
    layout = layout_of(PackedRows(cache, [Span(pages, context, 1)] * rows, split.device))._replace(most_tokens=held)

    def body() -> tuple[Tensor, ...]:
        return (split.logits(split.run(StaticRows(cache, layout, runner.kernels), 0, split.num_layers, token)),)

    with torch.inference_mode():
        return measure(runner.graphs.capture.record(body), split.device)


def replay_seconds(recording: Recording, device: torch.device) -> float:
    """The seconds of one replay: on CUDA of the device, by events; the minimum of several measurements."""
    count = REPLAYS if device.type == "cuda" else 1

    def replay() -> None:
        for _ in range(count):
            recording.replay()

    return fastest(replay, REPEATS, device) / count
