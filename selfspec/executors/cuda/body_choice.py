"""Choice of what runs the layers in recordings: the model's own modules (the views), `FusedBody` or `SkinnyBody`.

The views serve every family. The fused layers are used if, on the device itself, they give the views' hidden states up
to rounding, and a recorded plain token takes less time with them. So are, for calls of few tokens, those in five
launches, whose bits must also be the same for any number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.executors.cuda.capture import CAPTURING, Recording
from selfspec.executors.cuda.device_work import fastest
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.packed_linear import Packing
from selfspec.executors.cuda.rounds import LEAST_HELD, StaticRows
from selfspec.executors.cuda.skinny_body import SkinnyBody, differing_rows, fill_randomly, unserved
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.kernels.layout import SPLIT, padded
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import LlamaWeights

_log = logging.getLogger("selfspec")
Measure = Callable[[Recording, torch.device], float]  # the seconds that a replay takes
MAX_MEMORY_SHARE = 0.5  # share of the free memory that packed copies may take
# One rounding to the dtype, relative to a number. Float32 has room for products that are summed in another order.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MAX_ROUNDINGS = 4.0  # products summed in another order differ by up to about 1.5
PAGE = 16
CALLS = (  # two ragged rows, then what follows them
    (Span([2, 0], 0, 7), Span([1, 3], 0, 14)),
    (Span([2, 0], 7, 1), Span([1, 3], 14, 5)),
)
PAGES = range(SPLIT // PAGE + 1)
LATE = (Span(PAGES, SPLIT - 2, 5),)  # after random keys and values; attention combines splits
PLACES = 24  # more than the calls have tokens
CONTEXT = 1000  # tokens before the one that is measured
TIMED = (1, 16, 32, SKINNY_ROWS)  # rows with a token each, by which five launches are compared with ten
REPEATS, REPLAYS = 3, 10  # measurements, and replays in each


class BodyChoice(NamedTuple):
    """What runs the layers in recordings of a model that passed the self-check; it can be kept and used again."""

    packing: Packing | None  # how the weights of fused layers are packed; None: the model's own modules run
    most_rows: int  # the most tokens of a call whose layers take five launches; 0: none


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
    measure, raised = measure or replay_seconds, None
    try:
        body = fused_body(split, runner, packing_of(split.llama, owned))
        error = layers_error(split, body)
        views = _token_seconds(split, runner, measure)
        split.recorded = body
        fused = _token_seconds(split, runner, measure)
        times = f"a plain token takes {1e3 * fused:.3g} ms, {1e3 * views:.3g} ms with the model's own modules"
        runner.graphs.forget(lambda key: True)
        if not error <= MAX_ROUNDINGS:  # it may be NaN
            reason = f"hidden states differ by {error:.2g} roundings"
        else:
            reason = times if fused >= views else problem_of() or runner.refused or ""
    except Exception as problem:  # compilers and drivers raise exceptions of any type
        raised, reason = problem, f"{type(problem).__name__}: {problem}"
    if reason:
        split.recorded = runner.refused = None
        runner.graphs.forget(lambda key: True)
        _log.info("recordings run the model's own modules; with fused layers: %s", reason)
        return None if raised else BodyChoice(None, 0)
    _log.info("recordings run fused layers (weights: %s); with them, %s", body.packing, times)
    rows = _skinny_rows(split, runner, body, problem_of, measure)
    return None if rows is None else BodyChoice(body.packing, rows)


def _skinny_rows(
    split: Any, runner: Any, body: FusedBody, problem_of: Callable[[], str], measure: Measure
) -> int | None:
    """The most tokens of a call whose layers take five launches; 0: none; None where an error decided.

    If any do, `split.recorded` is set to such layers. Recordings of one token for each row take less time with them
    than with `body` for every number of rows in `TIMED` up to the result.
    """
    raised, most, told, reason = None, 0, "", unserved(body)
    try:
        if not reason:
            five = SkinnyBody(body)
            error = layers_error(split, five)
            reason = "" if error <= MAX_ROUNDINGS else f"hidden states differ by {error:.2g} roundings"
            reason = reason or differing_rows(split, five)
        for rows in () if reason else TIMED:
            split.recorded = body
            ten = _token_seconds(split, runner, measure, rows)
            split.recorded = five
            own = _token_seconds(split, runner, measure, rows)
            told = f"tokens of {rows} rows take {1e3 * own:.3g} ms, {1e3 * ten:.3g} ms with ten launches"
            if own >= ten:
                break
            most = rows  # while it is timed, `five` takes as many as its kernels do
        if most:
            five.most_rows = most
        runner.graphs.forget(lambda key: True)
        reason = reason or ("" if most else told) or problem_of() or runner.refused or ""
    except Exception as problem:  # compilers and drivers raise exceptions of any type
        raised, reason = problem, f"{type(problem).__name__}: {problem}"
    if reason:
        split.recorded, runner.refused = body, None
        runner.graphs.forget(lambda key: True)
        _log.info("fused layers take ten launches; with five: %s", reason)
        return None if raised else 0
    _log.info("fused layers take five launches in calls of at most %d tokens; %s", most, told)
    return most


def apply_choice(split: Any, runner: Any, owned: bool, choice: BodyChoice) -> bool:
    """Set `split.recorded` as it was chosen before; False where that is not possible as the memory is now."""
    if choice.packing is None:
        return True
    if split.llama is None or packing_of(split.llama, owned) != choice.packing:
        return False
    body = fused_body(split, runner, choice.packing)
    split.recorded = SkinnyBody(body, choice.most_rows) if choice.most_rows else body
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


@torch.inference_mode()
def layers_error(split: Any, body: FusedBody) -> float:
    """How far the hidden states of fused layers are from the views', in roundings; `MAX_ROUNDINGS` are allowed.

    Ragged rows, padding, rows that go on, and one of more than a split of attention. Each layer starts from the views'
    hidden states, scaled down to about the norm of what the layer adds: the rounding of a larger hidden state would
    hide it. Of a difference, one rounding of the hidden state itself is left out; the rest is relative, in norm, to
    what the layer adds.
    """
    caches = [PagedCache(len(PAGES), PAGE) for _ in range(3)]
    vocab, rng = split.vocab_size, torch.Generator().manual_seed(0)
    errors = []
    for spans in (*CALLS, LATE):
        for cache in caches if spans is LATE else ():
            fill_randomly(cache)
        count = sum(span.length for span in spans)
        tokens = torch.randint(0, vocab, (count,), generator=rng).to(split.device)
        given = torch.cat([tokens, tokens.new_zeros(PLACES - count)])
        layout = padded(layout_of(PackedRows(caches[0], spans, split.device)), PLACES)
        whole, views, fused = (StaticRows(cache, layout, body.kernels) for cache in caches)
        states: dict[int, Tensor | None] = dict.fromkeys(range(1, split.num_layers + 1))
        split.run_views(whole, 0, split.num_layers, given, states)
        for depth in range(split.num_layers):
            if depth:
                before, hidden = states[depth], states[depth + 1]
                assert before is not None and hidden is not None
                added = (hidden - before)[:count].float().norm() / before[:count].float().norm()
                given = before * added.clamp(max=1).to(before.dtype)
            wanted, last = _one_layer(split.run_views, views, depth, given, count)
            got, done = _one_layer(body.run, fused, depth, given, count)
            errors.append(_excess(got, wanted, wanted - given[:count] if depth else wanted))
        errors.append(_excess(done, last, last))
    return float(torch.stack(errors).max()) / ROUNDING[split.dtype]


def _one_layer(run: Any, rows: StaticRows, depth: int, given: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The hidden states of the first `count` tokens after a layer, and what `run` returns, the last layer's normed."""
    taps: dict[int, Tensor | None] = {depth + 1: None}
    done = run(rows, depth, depth + 1, given, taps)[:count]
    hidden = taps[depth + 1]
    return (done if hidden is None else hidden[:count]), done


def _excess(got: Tensor, wanted: Tensor, change: Tensor) -> Tensor:
    """The norm of the differences beyond one rounding of each number, relative to the norm of `change`."""
    rounding = ROUNDING[got.dtype]
    got, wanted, change = got.float(), wanted.float(), change.float()
    beyond = (got - wanted).abs() - rounding * wanted.abs()
    return beyond.clamp(min=0).norm() / change.norm()


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
