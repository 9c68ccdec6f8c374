"""Exact mode on CUDA: layers and whole rounds from recordings, in place of blocks that run eagerly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.executors.cuda.body_choice import MAX_ROUNDINGS, layers_error, packing_of
from selfspec.executors.cuda.exact_body import ExactBody, with_fixed_order
from selfspec.executors.cuda.exact_views import BlockViews
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.runner import Runner
from selfspec.executors.cuda.self_check import round_problem
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import Layout
from selfspec.model.attention_backends import layout_of
from selfspec.model.exact import ExactStack, cut, parts_of
from selfspec.model.exact_check import difference
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.row_counts import MULTIPLES, measured
from selfspec.model.stack import Stack, Taps

_log = logging.getLogger("selfspec")


def install_exact(stack: ExactStack, source: Stack) -> None:
    """Let an exact stack decode from recordings, where its source does so: by fused layers, or else by the views.

    What then runs is checked: fused layers against the views, rounds against the eager layers, and bits in different
    calls. If neither passes, the stack stays as it was. Each that does not is logged.
    """
    if source.runner is None or source.runner.refused is not None:
        return
    for is_fused in (True, False) if stack.llama is not None else (False,):
        try:
            stack.runner = ExactRunner(stack, source, is_fused)
            problem = _problem_of(stack, stack.runner)
        except Exception as raised:  # compilers and drivers raise exceptions of any type
            problem = f"{type(raised).__name__}: {raised}"
        if not problem:
            return
        kind = "fused layers" if is_fused else "recordings"
        _log.warning("exact mode runs without %s for this model here (%s)", kind, problem)
        source.runner.graphs.forget(lambda key: True)
        stack.remove_runner()


def _problem_of(stack: ExactStack, runner: ExactRunner) -> str:
    """What is wrong with an exact stack's recordings; "" if nothing is."""
    if isinstance(runner.narrow, ExactBody):
        error = layers_error(stack, runner.narrow)
        if not error <= MAX_ROUNDINGS:  # it may be NaN
            return f"hidden states differ by {error:.2g} roundings"
    problem = round_problem(stack, runner) or runner.refused
    if problem:
        return problem
    differs = difference(stack)
    return f"its {differs} depend on the other tokens of a call" if differs else runner.refused or ""


class ExactRunner(Runner):
    """A runner of an exact stack. It shares recordings' memory with the runner of the source.

    All calls run the same layers, from recordings or not, so it never leaves a call to the stack. Tokens of prompts
    that fill blocks of `stack.wide` positions run in these blocks.

    Args:
        is_fused: run fused layers, not the views.
    """

    has_trees = False  # keys of a tree lie in another order than those of a row, so they are summed in another one

    def __init__(self, stack: ExactStack, source: Stack, is_fused: bool) -> None:
        given, body = source.runner, source.recorded
        kernels, wide_kernels = (with_fixed_order(given.kernels, is_wide) for is_wide in (False, True))
        super().__init__(stack, kernels, given.graphs.capture, max_rows=given.max_rows, shares=given)
        self.narrow: ExactBody | BlockViews
        self.wide: ExactBody | BlockViews
        with torch.inference_mode():
            if is_fused:
                assert stack.llama is not None
                if not isinstance(body, FusedBody):
                    body = FusedBody(stack.llama, kernels, packing_of(stack.llama, False))
                self.narrow = ExactBody(body, kernels, stack.rows, free=True)
                self.wide = ExactBody(body, wide_kernels, stack.wide, free=False)
            else:
                self.narrow = BlockViews(stack, kernels, stack.rows)
                self.wide = BlockViews(stack, wide_kernels, stack.wide)
            hidden = torch.randn(
                MULTIPLES * stack.rows, hidden_size_of(stack), generator=torch.Generator().manual_seed(0)
            )
            stack.head_counts = measured(stack.normed_logits, hidden.to(stack.device, stack.dtype), stack.rows)
        stack.recorded = self.narrow

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `Stack.run`."""
        first, rest = parts_of(rows, self.stack.wide)
        if not first:
            return self._run_narrow(rows, [span for span, _ in rest], start, stop, given, taps)
        inner = [depth for depth in taps or {} if start < depth <= stop]
        parts = list[tuple[Tensor, Tensor, Taps]]()  # indices, hidden states, taps
        calls = [(True, *call) for call in cut(first, self.stack.wide)]
        if rest:
            index = [at + i for span, at in rest for i in range(span.length)]
            calls.append((False, [span for span, _ in rest], index))
        for is_wide, spans, index in calls:
            place, seen = tensor_of(index, given.device), Taps(dict.fromkeys(inner))
            packed = PackedRows(rows.cache, spans, rows.device)
            args = (start, stop, given[place], seen or None)
            hidden = self._run_wide(packed, *args) if is_wide else self._run_narrow(packed, spans, *args)
            parts.append((place, hidden, seen))
        if taps is not None:
            taps.update({depth: _joined([(place, seen[depth]) for place, _, seen in parts]) for depth in inner})
        return _joined([(place, hidden) for place, hidden, _ in parts])

    def _run_wide(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None) -> Tensor:
        with torch.no_grad():
            return self.wide.run(StaticRows(rows.cache, layout_of(rows), self.wide.kernels), start, stop, given, taps)

    def _run_narrow(
        self, rows: PackedRows, spans: Sequence[Span], start: int, stop: int, given: Tensor, taps: Taps | None
    ) -> Tensor:
        """Run the tokens of `rows`. `spans`: its spans, those of trees split into their tokens."""
        is_chain = all(span.tree is None for span in spans)
        done = super().run(rows, start, stop, given, taps) if is_chain else None
        if done is not None:
            return done
        cache: Any = rows.cache if is_chain else _SlotCache(rows.cache)
        layout = layout_of(rows) if is_chain else _slot_layout(rows, spans)
        with torch.no_grad():
            return self.narrow.run(StaticRows(cache, layout, self.kernels), start, stop, given, taps)


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """States in the order of a call, from parts with the indices of their tokens."""
    index, states = (torch.cat(list(each)) for each in zip(*parts, strict=True))
    return states[index.argsort()]


class _SlotCache:
    """The pages of a cache as pages of one token each."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def layer(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `PagedCache.layer`."""
        keys, values = self._cache.layer(layer_idx, key, value)
        return keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]


def _slot_layout(rows: PackedRows, spans: Sequence[Span]) -> Layout:
    """The layout of a call over pages of one token. A token of a tree is a row of its own: its ancestors and itself."""
    size, lines, slots = rows.cache.page_size, list[Any](), list[Any]()
    for span in spans:
        at = np.arange(span.start + span.length) if span.tree is None else np.array([*range(span.root), *span.branch()])
        lines.append(np.asarray(span.pages)[at // size] * size + at % size)
        slots.append(lines[-1][-span.length :])
    table = np.zeros((len(spans), max(map(len, lines))), np.int32)
    for line, row in zip(lines, table, strict=True):
        row[: len(line)] = line
    counts, lengths = [span.length for span in spans], [len(line) for line in lines]
    starts, owners = np.cumsum([0, *counts[:-1]]), np.repeat(np.arange(len(spans)), counts)

    def ints(numbers: Any) -> Tensor:
        return torch.as_tensor(np.asarray(numbers, np.int32), device=rows.device)

    return Layout(
        ints(starts), ints(counts), ints(lengths), ints(table), ints(owners),
        torch.as_tensor(np.concatenate(slots), device=rows.device),
        rows.positions[0], max(counts), max(lengths),
    )  # fmt: skip
