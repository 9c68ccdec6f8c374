"""`Trace`: what every layer would have drafted along a finished output, and the outcome of any draft on it.

`eval.recording` makes traces, `eval.replay` runs policies on them. A file holds several traces and the acceptance
statistics stored with their model.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import abc
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import OWN_TEXT, confidence_bin
from selfspec.core import Draft, Plan, RowRound, Sequence
from selfspec.kernels.pick import num_accepted

VERSION = 6  # of the file format
WRONG_TOKEN = -1
WRONG_STEPS = 17  # tokens recorded after a wrong one; 1 + WRONG_STEPS is the longest draft of any policy

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
_BY_TOKEN = ("hits", "confidences", "divergences", "wrong", "short_hits", "short_confidences")


@dataclass(frozen=True, eq=False)
class Trace:
    """One finished output of n tokens by a model of L layers; row e - 1 of each array is exit layer e.

    Attributes:
        prompt, tokens: token ids, of the prompt and of the output.
        hits: bool `[L - 1, n]`, whether the layer's pick is the output's token.
        confidences: `[L - 1, n]`, the layer's probability of its pick.
        divergences: `[L - 1, n]`, KL(whole model || layer) in nats.
        wrong: `[L - 1, n, steps]`, confidences of the tokens that the layer drafts after a wrong pick; NaN elsewhere.
        short_hits, short_confidences: `[L - 1, n]`, hits and confidences of shadow picks over a shortlist.
        prompt_hits, prompt_confidences: `[L - 1, up to SEED_POSITIONS]`, the same at the prompt's last positions.
        copied_right: int16 `[C, n]`, number of accepted tokens when 4-bit copies of the first 1..C layers draft from
            each position; C is 0 where the model has no copies.
        copied: `[C, n, steps]`, confidences of the copies' drafts; NaN beyond the context.
        is_sampled: whether the output was sampled rather than greedy.
    """

    task: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    hits: Bools
    confidences: Floats
    divergences: Floats
    wrong: Floats
    short_hits: Bools
    short_confidences: Floats
    prompt_hits: Bools
    prompt_confidences: Floats
    copied_right: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0), np.int16))
    copied: Floats = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    is_sampled: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def num_layers(self) -> int:
        return len(self.hits) + 1

    def cut(self, num_tokens: int) -> Trace:
        """The trace of the first `num_tokens` tokens."""
        cut = {name: getattr(self, name)[:, :num_tokens] for name in (*_BY_TOKEN, "copied_right", "copied")}
        return dataclasses.replace(self, tokens=self.tokens[:num_tokens], **cut)


def save(traces: abc.Sequence[Trace], path: str | Path, prior: Any = None) -> None:
    """Write traces into one `.npz` file, completely or not at all.

    Args:
        prior: the acceptance statistics stored with their model, as plain values; None: there are none.
    """
    arrays: dict[str, Any] = {"version": np.array(VERSION), "count": np.array(len(traces))}
    for i, trace in enumerate(traces):
        arrays |= {f"{i}.{f.name}": np.asarray(getattr(trace, f.name)) for f in dataclasses.fields(Trace)}
    if prior is not None:
        arrays["prior"] = np.array(json.dumps(prior))
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)


def load(path: str | Path) -> tuple[list[Trace], Any]:
    """Read the traces of a file of `save`, and its acceptance statistics or None.

    Raises:
        ValueError: the file is missing, damaged or of another format, or its arrays have inconsistent shapes.
    """
    try:
        with Path(path).open("rb") as file, np.lib.npyio.NpzFile(file) as arrays:
            version = int(arrays["version"]) if "version" in arrays else 1
            if version != VERSION:
                raise ValueError(f"its format is {version}, this version reads {VERSION}; record the outputs again")
            prior = json.loads(str(arrays["prior"])) if "prior" in arrays else None
            return [_trace(arrays, i) for i in range(int(arrays["count"]))], prior
    except (OSError, KeyError, TypeError, ValueError, EOFError, BadZipFile, zlib.error) as problem:
        raise ValueError(f"cannot read the traces {str(path)!r}: {' '.join(str(problem).split())}") from problem


def _trace(arrays: Any, i: int) -> Trace:
    given = {f.name: arrays[f"{i}.{f.name}"] for f in dataclasses.fields(Trace)}
    given |= {
        "task": str(given["task"]),
        "prompt": tuple(int(t) for t in given["prompt"]),
        "tokens": tuple(int(t) for t in given["tokens"]),
        "is_sampled": bool(given["is_sampled"]),
    }
    shape = (len(given["hits"]), len(given["tokens"]))
    shapes = {given[name].shape[:2] for name in _BY_TOKEN}
    copied, right = given["copied"], given["copied_right"]
    if (
        shapes != {shape}
        or copied.shape[:2] != right.shape
        or (len(right) and right.shape[1] != shape[1])
        or given["prompt_hits"].shape != given["prompt_confidences"].shape
    ):
        raise ValueError(f"the arrays of output {i} have inconsistent shapes")
    return Trace(**given)


def draft(sequence: Sequence, trace: Trace, at: int, plan: Plan, length: int) -> RowRound:
    """What a plan's draft of `length` tokens gives a sequence at output position `at`.

    Raises:
        ValueError: the plan reads confidences of more tokens after a wrong one than the trace has.
    """
    if plan.exit_layer is None or length == 0:
        return _row_round(sequence, trace, at, 0, 0)
    layer = plan.exit_layer - 1
    accepted = _num_accepted(trace, layer, at, length, _uses_copies(trace, plan))
    confidences = tuple(_confidences(trace, at, length, plan)) if plan.reads_confidence else ()
    if plan.reads_confidence and len(confidences) < length:
        raise ValueError(f"a draft continues for {length - accepted - 1} tokens after a wrong one, beyond the trace")
    verified = length - _withdraws(plan, confidences)
    judged = min(accepted + 1, verified)
    divergences = tuple(trace.divergences[layer, at : at + judged].tolist()) if plan.keep_divergence else ()
    made = _row_round(sequence, trace, at, verified, min(accepted, verified))
    made.confidences, made.divergences = confidences, divergences
    if verified < length:
        made.withdrawn = trace.tokens[at + verified] if accepted == length else WRONG_TOKEN
    return made


def _withdraws(plan: Plan, confidences: abc.Sequence[float]) -> bool:
    """Whether the last token of a draft is not verified."""
    stop = plan.stop
    return stop is not None and prod([stop.calibration[confidence_bin(one)] for one in confidences]) < stop.keep


def _row_round(sequence: Sequence, trace: Trace, at: int, drafted: int, accepted: int) -> RowRound:
    """What a draft of which so many tokens are accepted gives a sequence at output position `at`."""
    return RowRound(sequence, drafted, accepted, list(trace.tokens[at : at + accepted + 1]))


def draft_lengths(places: abc.Sequence[tuple[Trace, int]], plan: Plan) -> list[int]:
    """The number of tokens that each row drafts until the plan's stop rule ends the draft.

    Args:
        places: each row's trace and output position.

    Raises:
        ValueError: the plan reads confidences of more tokens after a wrong one than the trace has.
    """
    if plan.exit_layer is None:
        return [0] * len(places)
    lengths = list(plan.draft_lengths)
    if plan.stop is None and plan.min_confidence <= 0:
        return lengths
    confidences = [_confidences(trace, at, n, plan) for (trace, at), n in zip(places, lengths, strict=True)]
    survival = [1.0] * len(places)
    live = [i for i, length in enumerate(lengths) if length]
    step = 0
    while live:  # all rows draft in lock step: a stop rule may depend on all of them
        if any(step >= len(confidences[i]) for i in live):
            raise ValueError(f"a draft continues for {WRONG_STEPS} tokens after a wrong one, beyond the trace")
        if plan.stop is not None:
            for i in live:
                survival[i] *= plan.stop.calibration[confidence_bin(confidences[i][step])]
            continues = [plan.stop.goes_on([survival[i] for i in live])] * len(live)
        else:
            continues = [confidences[i][step] >= plan.min_confidence for i in live]
        step += 1
        for i, is_live in zip(live, continues, strict=True):
            lengths[i] = lengths[i] if is_live else step
        live = [i for i in live if lengths[i] > step]
    return lengths


def lookup_round(sequence: Sequence, trace: Trace, at: int, given: Draft) -> RowRound:
    """What a draft by lookup gives a sequence at output position `at`."""
    made = _row_round(sequence, trace, at, len(given.token_ids), num_accepted(given.token_ids, trace.tokens[at:]))
    made.match_length, made.source = (given.match_length, given.source) if given.token_ids else (0, OWN_TEXT)
    return made


def _uses_copies(trace: Trace, plan: Plan) -> bool:
    """Whether copies draft and the trace has their drafts; otherwise they are assumed to draft as the layers do.

    A plan that keeps divergences drafts with the layers themselves.
    """
    if plan.draft_bits is None or not plan.exit_layer or plan.keep_divergence:
        return False
    return plan.exit_layer <= len(trace.copied)


def _num_accepted(trace: Trace, layer: int, at: int, length: int, copies: bool) -> int:
    """The number of accepted tokens of a draft by a layer, or its copy, from output position `at`."""
    if copies:
        right, recorded = int(trace.copied_right[layer, at]), trace.copied.shape[2]
        if right == recorded < length:
            raise ValueError(f"copies draft {length} tokens, beyond the trace, which has {recorded}")
        return min(length, right)
    hits = trace.hits[layer, at : at + length]
    return length if hits.all() else int(hits.argmin())


def _confidences(trace: Trace, at: int, length: int, plan: Plan) -> list[float]:
    """Confidences of the plan's draft of `length` tokens, as far as they are recorded after a wrong token."""
    assert plan.exit_layer is not None
    layer, end = plan.exit_layer - 1, at + length
    if _uses_copies(trace, plan):
        found: list[float] = trace.copied[layer, at, :length].tolist()
        return found
    hits = trace.hits[layer, at:end]
    wrong_at = end if hits.all() else at + int(hits.argmin())
    found = trace.confidences[layer, at : min(wrong_at + 1, end)].tolist()
    if wrong_at + 1 < end:
        found += trace.wrong[layer, wrong_at, : end - wrong_at - 1].tolist()
    return found
