"""Choice of the executors for a stack."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.control.rows import StageSeconds
from selfspec.executors.after_round import Teach
from selfspec.executors.cpu.executor import CpuExecutor
from selfspec.executors.cuda.executor import CudaExecutor
from selfspec.executors.eager import EagerExecutor
from selfspec.executors.picker import Picker
from selfspec.executors.program import Executor
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack


def executors_for(
    stack: Stack,
    cache: PagedCache,
    picker: Picker,
    teach: Teach | None = None,
    new_seconds: Callable[[], StageSeconds] = StageSeconds,
) -> list[Executor]:
    """The executors of a stack, fastest first. The last one, the eager executor, serves every plan.

    Args:
        teach: called with training examples for exit heads. Only the eager executor provides them, so it is then the
            only one.
        new_seconds: makes the clock of a round.
    """
    eager = EagerExecutor(stack, cache, picker, new_seconds, teach)
    if teach is not None:
        return [eager]
    return [CudaExecutor(eager), CpuExecutor(stack, cache, picker, new_seconds), eager]
