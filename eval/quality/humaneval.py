"""HumanEval: functions completed from their docstring, scored by running their tests (Chen et al. 2021, arXiv
2107.03374).

WARNING: scoring runs code that a language model wrote. `eval.quality.sandbox` limits what that code can do and says
what it does not protect; nothing here is run unless `--run-code` was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from eval.quality import sandbox
from eval.quality.lines import read_lines
from eval.quality.sandbox import USUAL, Limits, Verdict

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # section 2.1 of the paper: what follows is another function


class Problem(NamedTuple):
    """One function to complete; `test` defines `check(candidate)`."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """Prompt, completion and test as one module that raises unless the completion is right."""
        return f"{self.prompt}{completion}\n\n{self.test}\n\ncheck({self.entry_point})\n"


def read(path: str | Path, limit: int = 0) -> list[Problem]:
    """The problems of a JSONL file, the first `limit` of them unless that is 0.

    Raises:
        ValueError: the file cannot be read or is empty, a line lacks a field, or `entry_point` is no name.
    """
    problems = []
    for number, fields in read_lines(path, Problem._fields, limit):
        if not fields["entry_point"].isidentifier():
            raise ValueError(f"{path}, line {number}: 'entry_point' must be a name, got {fields['entry_point']!r}")
        problems.append(Problem(**fields))
    return problems


def check(problem: Problem, completion: str, limits: Limits = USUAL) -> Verdict:
    """Run one completion with its tests in the sandbox. WARNING: this runs code that a model wrote."""
    return sandbox.run(problem.program(completion), limits)


def pass_at_k(num_samples: int, num_correct: int, k: int = 1) -> float:
    """Unbiased estimate of the chance that one of k samples passes, of which `num_correct` of `num_samples` did.

    1 - C(n - c, k) / C(n, k), written as a product so that nothing overflows: Chen et al. 2021, equation 1, figure 3.

    Raises:
        ValueError: unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        told = "pass@k needs 0 <= correct <= samples and 1 <= k <= samples"
        raise ValueError(f"{told}, got {num_correct} correct of {num_samples}, k = {k}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def score(verdicts: Sequence[Sequence[Verdict]], k: int = 1) -> float:
    """pass@k, 0 to 1: the mean over problems of the unbiased estimate from each problem's verdicts.

    Raises:
        ValueError: no problems, or a problem with fewer than k verdicts.
    """
    if not verdicts:
        raise ValueError("pass@k needs at least one problem, got none")
    estimates = [pass_at_k(len(each), sum(verdict.passed for verdict in each), k) for each in verdicts]
    return sum(estimates) / len(estimates)
