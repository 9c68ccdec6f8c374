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
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from eval.decoders import neutral_generation_config
from eval.measurement import no_garbage_collection, rates, synchronize
from eval.shapes import config_of
from eval.synthetic import Synthetic, random_prompts
from train.configuration import build, check

FILE = "selfspec_peer.json"
KEPT = 2000  # last characters of a command's messages that are kept
TRANSFORMERS = {"hf": 4, "hf early exit": 4, "hf static": 6}  # tokens before the measurement
PEER_TOKENS = 512  # maximum new tokens of transformers' methods
SLICES = 3  # tokens that are timed at least


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


def transformers_rate(
    target: Synthetic, kind: str, batch: int, context: int, window: float, draft_tokens: int
) -> dict[str, Any]:
    """Measure transformers' decoding: `hf` (eager), `hf static` (a static cache, compiled on CUDA) or `hf early exit`.

    Raises:
        ValueError: early exit with several rows, which transformers does not support; or too few tokens were timed.
    """
    if kind == "hf early exit" and batch > 1:
        raise ValueError("transformers' early exit decodes one row only")
    model, where = target.split.model, target.split.device
    given = torch.tensor(random_prompts(target.split.vocab_size, batch, context, seed=3), device=where)
    options: dict[str, Any] = {"cache_implementation": "static"} if kind == "hf static" else {}
    if kind == "hf early exit":
        options = {"assistant_early_exit": target.made.exit_layer}
    watch = _Watch(where, TRANSFORMERS[kind], window)
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
    check(len(marks) > SLICES, "the number of timed tokens", f"above {SLICES}", len(marks))
    steps = [(later - earlier, more - less) for (earlier, less), (later, more) in pairwise(marks)]
    return {**rates(steps), "rounds": len(steps)}


@dataclass(frozen=True, slots=True)
class Peer:
    """The content of a peer's file; see the module."""

    command: tuple[str, ...]
    tokens_per_second: str = ""
    rate_is_per_row: bool = False
    seconds: float = 180.0
    shapes: tuple[str, ...] = ()
    version: str = ""
    folder: str = ""

    def __post_init__(self) -> None:
        check(bool(self.command), "command", "a list of texts", list(self.command))
        try:
            groups = re.compile(self.tokens_per_second or "()").groups
        except re.error as problem:
            raise ValueError(f"tokens_per_second: {problem}") from problem
        check(groups == 1, "tokens_per_second", "a regular expression with one group", self.tokens_per_second)

    @property
    def name(self) -> str:
        return Path(self.folder).name


def read_peer(folder: str | Path) -> Peer:
    """Read a peer's file.

    Raises:
        ValueError: the file cannot be read, or a key is unknown or of the wrong form.
    """
    path = Path(folder).resolve() / FILE
    try:
        return build(Peer, json.loads(path.read_text("utf-8")) | {"folder": str(path.parent)})
    except (OSError, TypeError, ValueError) as problem:
        raise ValueError(f"--peer needs a folder with {FILE}, see docs/measurements.md: {problem}") from problem


def folder_rate(peer: Peer, left: float, *, shape: str, batch: int, **about: Any) -> dict[str, Any]:
    """Run a peer's command; returns `tokens_per_second`, `version`, `wall_seconds` and the end of its `messages`.

    Args:
        left: seconds of the run that are left; the command is ended after the smaller of these and its own limit.
        about: context, new_tokens, dtype and device.

    Raises:
        ValueError: the peer does not run the shape, or its command fails, is too slow, or reports no rate.
    """
    if peer.shapes and shape not in peer.shapes:
        raise ValueError(f"it runs {', '.join(peer.shapes)} only")
    limit, begun = min(peer.seconds, left), perf_counter()
    with tempfile.TemporaryDirectory() as made:
        files = {"config": Path(made, "config.json"), "output": Path(made, "output.json")}
        config_of(shape).to_json_file(files["config"], use_diff=False)
        values = {"shape": shape, "batch": batch, "python": sys.executable, **about, **files}
        command = [re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), text) for text in peer.command]
        code, printed, messages = _run(command, peer.folder, limit)
        said = f"; its last words: {messages.strip()[-300:]}" if messages.strip() else ""
        if code is None:
            raise ValueError(f"it exceeded {limit:.0f} s and was ended{said}")
        if code:
            raise ValueError(f"it ended with exit code {code}{said}")
        found = _reported(peer, printed, files["output"], batch)
    return {**found, "wall_seconds": perf_counter() - begun, "messages": messages[-KEPT:]}


def _run(command: list[str], folder: str, limit: float) -> tuple[int | None, str, str]:
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
    if peer.tokens_per_second:
        matches = re.findall(peer.tokens_per_second, printed)
        if not matches:
            raise ValueError(f"nothing in its output matches {peer.tokens_per_second!r}")
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
