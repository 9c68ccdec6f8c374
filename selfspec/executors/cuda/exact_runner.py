"""Exact mode on CUDA: fused layers and whole rounds from recordings, in place of blocks that run eagerly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.executors.cuda.body_choice import layers_error, packing_of
from selfspec.executors.cuda.exact_body import ExactBody, with_fixed_order
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.runner import Runner
from selfspec.executors.cuda.self_check import round_problem
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import Layout
from selfspec.model.attention_backends import layout_of
from selfspec.model.exact import ExactStack, cut, parts_of
from selfspec.model.exact_check import difference
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.row_counts import MULTIPLES, measured, random_rows
from selfspec.model.stack import Stack, Taps

_log = logging.getLogger("selfspec")


def install_exact(stack: ExactStack, source: Stack) -> None:
    """Let an exact stack decode from recordings, where its source does so and its layers can be fused.

    What then runs is checked: layers against the views, rounds against the eager layers, and bits in different calls.
    If anything is wrong, the stack stays as it was, with a warning.
    """
    if source.runner is None or source.runner.refused is not None or stack.llama is None:
        return
    try:
        runner = stack.runner = ExactRunner(stack, source)
        stack.recorded = runner.narrow
        error = layers_error(stack, runner.narrow)
        problem = f"hidden states differ by {error:.2g} roundings" if not error <= 1 else round_problem(stack, runner)
        if problem is None and runner.refused is None and (differs := difference(stack)):
            problem = f"its {differs} depend on the other tokens of a call"
        problem = problem or runner.refused
    except Exception as raised:  # compilers and drivers raise exceptions of any type
        problem = f"{type(raised).__name__}: {raised}"
    if problem:
        _log.warning("fused layers are not exact for this model here (%s), so exact mode runs without them", problem)
        stack.remove_runner()


class ExactRunner(Runner):
    """A runner of an exact stack. It shares recordings' memory with the runner of the source.

    All calls run the same layers, from recordings or not, so it never leaves a call to the stack. Tokens of prompts
    that fill blocks of `stack.wide` positions run in these blocks.
    """

    def __init__(self, stack: ExactStack, source: Stack) -> None:
        weights, given, body = stack.llama, source.runner, source.recorded
        assert weights is not None
        share = len(weights.layers[0].q.weight) // len(weights.layers[0].k.weight)
        narrow, wide = (with_fixed_order(given.kernels, share, is_wide) for is_wide in (False, True))
        super().__init__(stack, narrow, given.graphs.capture, max_rows=given.max_rows, shares=given)
        if not isinstance(body, FusedBody):
            body = FusedBody(weights, given.kernels, packing_of(weights, False))
        with torch.inference_mode():
            self.narrow = ExactBody(body, narrow, stack.rows, free=True)
            self.wide = ExactBody(body, wide, stack.wide, free=False)
            hidden = random_rows(MULTIPLES * stack.rows, weights.embedding)
            stack.head_counts = measured(stack.normed_logits, hidden, stack.rows)

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
