"""Choice of the executors for a stack."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.core import StageSeconds
from selfspec.executors.after_round import TrainingExamples
from selfspec.executors.base import Executor
from selfspec.executors.cpu.executor import CpuExecutor
from selfspec.executors.cuda.executor import CudaExecutor
from selfspec.executors.eager import EagerExecutor
from selfspec.executors.picker import Picker
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack


def executors_for(
    stack: Stack,
    cache: PagedCache,
    picker: Picker,
    examples: TrainingExamples | None = None,
    new_seconds: Callable[[], StageSeconds] = StageSeconds,
) -> list[Executor]:
    """The executors of a stack, fastest first. The last one, the eager executor, serves every plan.

    Args:
        examples: called with training examples for exit heads. Only the eager executor provides them, so it is then the
            only one.
        new_seconds: makes the clock of a round.
    """
    eager = EagerExecutor(stack, cache, picker, new_seconds, examples)
    if examples is not None:
        return [eager]
    return [CudaExecutor(eager), CpuExecutor(stack, cache, picker, new_seconds), eager]
