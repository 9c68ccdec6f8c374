"""llama.cpp as a method: the same weights, decoded greedily by another Python that has llama-cpp-python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eval.cpu import gguf
from eval.methods import Answer

PEER = Path(__file__).with_name("peer.py")


@dataclass
class LlamaCpp:
    """A running peer; `close` ends it. `seconds` and `processor` are what its last call took, by its own clocks.

    Args:
        python: an interpreter in whose environment llama-cpp-python is installed.
        folder: where the model's GGUF file is put.
        half: its matrices are in bfloat16. Then llama.cpp rounds activations too, so that tokens may differ.
    """

    python: str
    model: Any
    folder: Path
    context: int
    half: bool = False
    name: str = "llama.cpp"
    family: str = "llama.cpp"
    settings: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name += ", bfloat16" if self.half else ""
        file = self.folder / f"model{'-half' if self.half else ''}.gguf"
        gguf.write(self.model, file, self.half)
        command = [self.python, str(PEER), str(file), str(self.context), str(torch.get_num_threads())]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as problem:
            raise ValueError(f"--llama-python {self.python} cannot be started: {problem}") from problem
        self._line()

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        answers, self.seconds, self.processor = [], 0.0, 0.0
        for prompt in prompts:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "max_new_tokens": max_new_tokens}) + "\n")
            self._process.stdin.flush()
            done = self._line()
            self.seconds, self.processor = self.seconds + done["seconds"], self.processor + done["processor"]
            answers.append(Answer(done["tokens"], None))
        return answers

    @classmethod
    def all(cls, python: str, model: Any, folder: Path, context: int) -> list[LlamaCpp]:
        """In float32, and in bfloat16 where that holds the model's weights: the less memory read, the faster."""
        halves = (False, True) if gguf.fits_half(model) else (False,)
        return [cls(python, model, folder, context, half) for half in halves]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ValueError(f"--llama-python {self.python}: llama.cpp could not run this model; see its words above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(f"llama.cpp: {answer['error']}")
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._process.communicate(timeout=30)
