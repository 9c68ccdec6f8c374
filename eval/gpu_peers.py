"""Peers of `python -m eval gpu`: transformers' own decoding, and engines that a person puts beside it as folders.

A peer's folder contains selfspec_peer.json:

    command            list of texts; {config} (the shape's config.json), {shape}, {dtype}, {batch}, {context},
                       {new_tokens}, {device}, {output} and {python} are replaced in each
    tokens_per_second  optional: a regular expression with one group, whose last match in the standard output is the
                       rate of all rows together; without it, the command writes one JSON line to {output}:
                       {"tokens_per_second": 123.4, "version": "1.2"}
    rate_is_per_row    optional, false: whether the matched rate is that of one row
    seconds            optional, 180: time limit of a run
    shapes             optional: the shapes that it can run; none given: all
    version            optional: the version to record, if the command writes none

The command runs in the folder, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from eval.decoders import neutral_generation_config
from eval.gpu_rates import SLICES, Rate, rate_between
from eval.measurement import no_garbage_collection, synchronize
from eval.synthetic import Synthetic, config_of, random_prompts

FILE = "selfspec_peer.json"
KEYS = {"command", "tokens_per_second", "rate_is_per_row", "seconds", "shapes", "version"}
SECONDS = 180.0  # time limit of a folder's command
TOLD = 2000  # last characters of a command's messages that are kept
WARM_CALLS = {"hf": 4, "hf early exit": 4, "hf static": 6}  # before the measurement
PEER_TOKENS = 512  # maximum new tokens of transformers' methods


class _Watch(StoppingCriteria):
    """Records the time of every token, and ends the output after `window` seconds."""

    def __init__(self, device: torch.device, warm_calls: int, window: float) -> None:
        self.device, self.warm_calls, self.window = device, warm_calls, window
        self.marks: list[tuple[float, int]] = []  # (time, tokens of all rows)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(self.device)
        self.marks.append((perf_counter(), input_ids.numel()))
        counted = self.marks[self.warm_calls :]
        over = len(counted) > SLICES and counted[-1][0] - counted[0][0] >= self.window
        return torch.full((input_ids.shape[0],), over, device=input_ids.device)


def peer_rate(target: Synthetic, kind: str, batch: int, context: int, window: float, draft_tokens: int) -> Rate:
    """Measure transformers' decoding: `hf` (eager), `hf static` (a static cache, compiled on CUDA) or `hf early exit`.

    Raises:
        ValueError: early exit with several rows, which transformers does not support; or too few tokens were timed.
    """
    if kind == "hf early exit" and batch > 1:
        raise ValueError("transformers' early exit decodes one row only")
    model, where = target.stack.model, target.stack.device
    given = torch.tensor(random_prompts(target.stack.vocab_size, batch, context, seed=3), device=where)
    options: dict[str, Any] = {"cache_implementation": "static"} if kind == "hf static" else {}
    if kind == "hf early exit":
        options = {"assistant_early_exit": target.made.exit_layer}
    watch = _Watch(where, WARM_CALLS[kind], window)
    with no_garbage_collection(), neutral_generation_config(model) as config:
        if kind == "hf early exit":
            config.num_assistant_tokens = draft_tokens  # assisted generation reads it from there
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=PEER_TOKENS,
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
        )
    marks = watch.marks[watch.warm_calls :]
    if len(marks) <= SLICES:
        raise ValueError(f"only {len(marks)} tokens were timed; a longer window is needed")
    return rate_between(marks, len(marks) - 1)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's folder; see the module for its file."""

    folder: Path
    command: tuple[str, ...]
    pattern: re.Pattern[str] | None
    rate_is_per_row: bool
    seconds: float
    shapes: tuple[str, ...]
    version: str | None

    @property
    def name(self) -> str:
        return self.folder.name


def read_peer(folder: str | Path) -> Peer:
    """Read a peer's file.

    Raises:
        ValueError: the file cannot be read, or a key is unknown or of the wrong form.
    """
    path = Path(folder).resolve() / FILE
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"--peer needs a folder with {FILE}, see docs/measurements.md: {problem}") from problem
    if not isinstance(given, dict) or not given.keys() <= KEYS:
        raise ValueError(f"{path} must be an object with some of the keys {', '.join(sorted(KEYS))}, got {given!r}")
    command, shapes, pattern = given.get("command"), given.get("shapes", []), given.get("tokens_per_second")
    lists = {"command": command, "shapes": shapes}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value) or (value == command == []):
            raise ValueError(f"{path}: {key} must be a list of texts, got {value!r}")
    try:
        compiled = None if pattern is None else re.compile(pattern)
        seconds = float(given.get("seconds", SECONDS))
    except (TypeError, ValueError, re.error) as problem:
        raise ValueError(f"{path}: {problem}") from problem
    if compiled is not None and compiled.groups != 1:
        raise ValueError(f"{path}: tokens_per_second must have one group, got {pattern!r}")
    per_row = bool(given.get("rate_is_per_row", False))
    return Peer(path.parent, tuple(command), compiled, per_row, seconds, tuple(shapes), given.get("version"))


def folder_rate(
    peer: Peer, shape: str, batch: int, context: int, new_tokens: int, dtype: str, device: str, left: float
) -> dict[str, Any]:
    """Run a peer's command; returns `tokens_per_second`, `version`, `wall_seconds` and the end of its `messages`.

    Args:
        left: seconds of the run that are left; the command is ended after the smaller of these and its own limit.

    Raises:
        ValueError: the peer does not run the shape, or its command fails, is too slow, or reports no rate.
    """
    if peer.shapes and shape not in peer.shapes:
        raise ValueError(f"it runs {', '.join(peer.shapes)} only")
    limit, begun = min(peer.seconds, left), perf_counter()
    with tempfile.TemporaryDirectory() as made:
        files = {"config": Path(made, "config.json"), "output": Path(made, "output.json")}
        config_of(shape).to_json_file(files["config"], use_diff=False)
        values = {"shape": shape, "batch": batch, "context": context, "new_tokens": new_tokens, "dtype": dtype}
        values |= {"device": device, "python": sys.executable, **files}
        command = [_filled(text, values) for text in peer.command]
        code, printed, messages = _run(command, peer.folder, limit)
        said = f"; its last words: {messages.strip()[-300:]}" if messages.strip() else ""
        if code is None:
            raise ValueError(f"it exceeded {limit:.0f} s and was ended{said}")
        if code:
            raise ValueError(f"it ended with exit code {code}{said}")
        found = _reported(peer, printed, files["output"], batch)
    return {**found, "wall_seconds": perf_counter() - begun, "messages": messages[-TOLD:]}


def _filled(text: str, values: dict[str, Any]) -> str:
    """The text with the placeholders of `values` replaced; other braces are left alone."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def _run(command: list[str], folder: Path, limit: float) -> tuple[int | None, str, str]:
    """Exit code (None: too slow), standard output and messages of a command; its whole process group is ended."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
    try:
        process = subprocess.Popen(command, cwd=folder, encoding="utf-8", start_new_session=True, **pipes)
    except OSError as problem:
        return 127, "", str(problem)
    try:
        printed, messages = process.communicate(timeout=limit)
        return process.returncode, printed, messages
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, messages = process.communicate()
        return None, printed, messages
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _reported(peer: Peer, printed: str, output: Path, batch: int) -> dict[str, Any]:
    if peer.pattern is not None:
        matches = peer.pattern.findall(printed)
        if not matches:
            raise ValueError(f"nothing in its output matches {peer.pattern.pattern!r}")
        rate, version = matches[-1], peer.version
    else:
        try:
            given = json.loads(output.read_text("utf-8"))
            rate, version = given["tokens_per_second"], given.get("version", peer.version)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"it wrote no JSON line with tokens_per_second: {problem!r}") from problem
    try:
        return {"tokens_per_second": float(rate) * (batch if peer.rate_is_per_row else 1), "version": version}
    except (TypeError, ValueError):
        raise ValueError(f"its tokens per second are no number: {rate!r}") from None
