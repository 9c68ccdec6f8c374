"""Exact mode on CUDA: results for a token depend, bit for bit, on it and the tokens before it alone.

All calls run fused layers, those of rounds from recordings. Products run in constant shapes where their rounding
depends on shapes, and attention sums over fixed parts of a row, see `exact_body`. Tokens of a prompt that fill blocks
of `WIDE` positions run in such blocks. Which ones depends on their positions only, not on the chunks of the prefill. So
two rows may share a page if their tokens are equal up to its end, and the same of these positions are in wide blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from selfspec.core import LOOKUP, Plan
from selfspec.errors import UnsupportedModelError
from selfspec.executors.cuda.body_checks import MAX_ROUNDINGS, layers_error
from selfspec.executors.cuda.body_choice import packing_of
from selfspec.executors.cuda.exact_body import ExactBody, with_fixed_order
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.rounds import RoundRow, StaticRows
from selfspec.executors.cuda.runner import Runner
from selfspec.executors.cuda.self_check import round_problem
from selfspec.model.attention_backends import layout_of
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.row_counts import MULTIPLES, measured
from selfspec.model.split_model import SplitModel, Taps

ROWS = 64  # rows of a product, where their number matters
WIDE = 128  # tokens of a block of a prompt
CHECKED = (600, 37, 21)  # tokens of the self-check's rows: several splits and wide blocks, and a row within a block
STEPS = 4  # last tokens of each of these rows, run one by one, and then together
PAGE = 8
GREEDY = 0.0, 0, 1.0, 0.0, 0  # temperature, top-k, top-p, min-p and seed of a row


def exact_split(source: SplitModel, rows: int = ROWS, wide: int = WIDE, checked: Sequence[int] = CHECKED) -> SplitModel:
    """A split over the same weights that runs exact mode. It shares all but the runner.

    Args:
        source: a split model that is not compiled; the results of compiled layers are exact as they are.
        rows: the number of rows of a product.
        wide: tokens of a block of a prompt.
        checked: tokens of the rows of the self-check.

    Raises:
        UnsupportedModelError: the model's own modules would run, or the fused layers are not exact on this device.
    """
    if source.llama is None:
        reason = "its layers are of another kind" if source.ranks is None else "it is spread over several processes"
    elif source.runner is None or source.runner.refused is not None:
        reason = "here its own modules run"
    else:
        split = copy.copy(source)
        try:
            split.runner = ExactRunner(split, source, rows, wide)
            reason = _problem_of(split, split.runner, checked)
        except Exception as raised:  # compilers and drivers raise exceptions of any type
            reason = f"{type(raised).__name__}: {raised}"
        if not reason:
            return split
        source.runner.graphs.forget(lambda key: True)
    kind = getattr(source.config, "model_type", "model")
    raise UnsupportedModelError(
        f"{kind}: exact mode needs compiled layers on CPU or fused layers on CUDA, and {reason}; decode without exact"
    )


def _problem_of(split: SplitModel, runner: ExactRunner, checked: Sequence[int]) -> str:
    """What is wrong with an exact split's layers and rounds; "" if nothing is."""
    error = layers_error(split, runner.narrow)
    if not error <= MAX_ROUNDINGS:  # it may be NaN
        return f"hidden states of fused layers differ by {error:.2g} roundings"
    problem = round_problem(split, runner) or runner.refused
    if problem:
        return problem
    differs = difference(split, checked)
    return f"{differs} of fused layers depend on the other tokens of a call" if differs else runner.refused or ""


class ExactRunner(Runner):
    """A runner of an exact split. It shares recordings' memory with the runner of the source.

    Args:
        split: a copy of `source`, which is set up for exact mode.
        rows, wide: see `exact_split`.
    """

    def __init__(self, split: SplitModel, source: SplitModel, rows: int, wide: int) -> None:
        given, body = source.runner, source.recorded
        assert source.llama is not None
        super().__init__(
            split, with_fixed_order(given.kernels), given.graphs.capture, max_rows=given.max_rows, shares=given
        )
        with torch.inference_mode():
            if not isinstance(body, FusedBody):
                body = FusedBody(source.llama, self.kernels, packing_of(source.llama, False))
            self.narrow = ExactBody(body, self.kernels, rows, free=True)
            self.wide = ExactBody(body, with_fixed_order(given.kernels, is_wide=True), wide, free=False)
            hidden = torch.randn(MULTIPLES * rows, hidden_size_of(split), generator=torch.Generator().manual_seed(0))
            split.head_rows = measured(source.logits, hidden.to(split.device, split.dtype), rows)
        split.wide, split.recorded, split.exact = wide, self.narrow, self.run

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `SplitModel.run`."""
        first, rest = parts_of(rows, self.split.wide)
        if not first:
            return _run(self.narrow, rows, start, stop, given, taps)
        inner = [depth for depth in taps or {} if start < depth <= stop]
        parts = list[tuple[Tensor, Tensor, Taps]]()  # indices, hidden states, taps
        calls = [(self.wide, *call) for call in cut(first, self.split.wide)]
        if rest:
            index = [at + i for span, at in rest for i in range(span.length)]
            calls.append((self.narrow, [span for span, _ in rest], index))
        for body, spans, index in calls:
            place, seen = tensor_of(index, given.device), Taps(dict.fromkeys(inner))
            packed = PackedRows(rows.cache, spans, rows.device)
            parts.append((place, _run(body, packed, start, stop, given[place], seen or None), seen))
        if taps is not None:
            taps.update({depth: _joined([(place, seen[depth]) for place, _, seen in parts]) for depth in inner})
        return _joined([(place, hidden) for place, hidden, _ in parts])


def _run(body: ExactBody, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None) -> Tensor:
    with torch.no_grad():
        return body.run(StaticRows(rows.cache, layout_of(rows), body.kernels), start, stop, given, taps)


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """States in the order of a call, from parts with the indices of their tokens."""
    index, states = (torch.cat(list(each)) for each in zip(*parts, strict=True))
    return states[index.argsort()]


Placed = tuple[Span, int]  # new tokens of a row, and the index of the first one in the packed call


def parts_of(rows: PackedRows, wide: int) -> tuple[list[Placed], list[Placed]]:
    """The tokens of a packed call that run in blocks of `wide`, and the others, in order."""
    prompts: Sequence[int] = rows.plans.get("prompts") or [0] * len(rows.spans)  # prompt lengths, in prefill
    first, rest, at = list[Placed](), list[Placed](), 0
    for span, num_prompt in zip(rows.spans, prompts, strict=True):
        n = min(span.length, max(0, num_prompt // wide * wide - span.start))
        if n:
            first.append((Span(span.pages, span.start, n), at))
        if n < span.length:
            rest.append((Span(span.pages, span.start + n, span.length - n), at + n))
        at += span.length
    return first, rest


def cut(part: Sequence[Placed], width: int) -> Iterator[tuple[list[Span], list[int]]]:
    """Pack spans into groups of `width` tokens, in order; the last one may have fewer.

    Yields the spans of a group, and the indices of its tokens in the call.
    """
    taken, index = list[Span](), list[int]()
    for span, at in part:
        done = 0
        while done < span.length:
            count = min(span.length - done, width - len(index))
            taken.append(Span(span.pages, span.start + done, count))
            index += range(at + done, at + done + count)
            done += count
            if len(index) == width:
                yield taken, index
                taken, index = [], []
    if index:
        yield taken, index


# ---------------------------------------------------------------------------------------------------------- self-check


@torch.inference_mode()
def difference(split: SplitModel, lengths: Sequence[int]) -> str:
    """Compare rows decoded alone, token by token, with the same rows in a batch: split at an exit layer, and in a
    recorded round that verifies given drafts.

    Args:
        lengths: tokens of the rows, at least `STEPS` + 1; longer ones than the context limit are cut.

    Returns:
        What differs ("hidden states" or "logits"), or "" where nothing does.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, split.context_limit) for n in lengths]
    prompts = [torch.randint(split.vocab_size, (n,), generator=generator).to(split.device) for n in lengths]
    alone = [_alone(split, prompt) for prompt in prompts]
    for exit_layer in sorted({LOOKUP, max(1, split.num_layers // 4), split.num_layers // 2}):
        order = range(len(prompts)) if exit_layer % 2 else range(len(prompts))[::-1]
        together = _together(split, [prompts[i] for i in order], exit_layer)
        for i, (hidden, logits) in zip(order, together, strict=True):
            if not torch.equal(hidden, alone[i][0]):
                return "hidden states"
            if not torch.equal(logits, alone[i][1]):
                return "logits"
    return ""


def _alone(split: SplitModel, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of the last tokens, one token per call."""
    cache = split.new_cache(1, len(prompt))
    first = len(prompt) - STEPS

    def read(start: int, length: int) -> Tensor:
        rows = PackedRows(cache, [Span([0], start, length)], split.device)
        rows.plans["prompts"] = [first if start < first else 0]
        return split.run(rows, 0, split.num_layers, prompt[start : start + length])

    read(0, first)
    hidden = [read(first + step, 1) for step in range(STEPS)]
    return torch.cat(hidden), torch.cat([split.logits(one) for one in hidden])


def _together(split: SplitModel, prompts: list[Tensor], exit_layer: int) -> list[tuple[Tensor, Tensor]]:
    """The same for several rows in small pages, packed in one call, split at the exit layer; or of a recorded round."""
    cache: PagedCache = split.new_cache(sum(-(-len(prompt) // PAGE) for prompt in prompts), PAGE)
    pages = [cache.reserve(len(prompt)) or [] for prompt in prompts]
    firsts = [len(prompt) - STEPS for prompt in prompts]

    def read(starts: list[int], lengths: list[int]) -> Tensor:
        spans = [Span(*each) for each in zip(pages, starts, lengths, strict=True)]
        rows = PackedRows(cache, spans, split.device)
        rows.plans["prompts"] = [end if at < end else 0 for at, end in zip(starts, firsts, strict=True)]
        parts = zip(prompts, starts, lengths, strict=True)
        hidden = torch.cat([prompt[at : at + n] for prompt, at, n in parts])
        if exit_layer:
            hidden = split.run(rows, 0, exit_layer, hidden)
        return split.run(rows, exit_layer, split.num_layers, hidden)

    def verified() -> Tensor | None:
        """By a round whose drafts are the rows' last tokens; None where it cannot be recorded."""
        rows = [
            RoundRow(own, at + 1, int(prompt[at]), STEPS + 1, (), STEPS - 1, prompt[at + 1 :].tolist(), *GREEDY)
            for own, at, prompt in zip(pages, firsts, prompts, strict=True)
        ]
        rounds = split.runner.begin(cache, rows, Plan(LOOKUP, (STEPS - 1,) * len(rows)))
        states = None if rounds is None else rounds.launch(range(len(rows)))
        return None if states is None else states[0].flatten(0, 1)

    read([0] * len(prompts), firsts)
    hidden = None if exit_layer else verified()
    hidden = read(firsts, [STEPS] * len(prompts)) if hidden is None else hidden
    return list(zip(hidden.split(STEPS), split.logits(hidden).split(STEPS), strict=True))
