"""Choice of the executors for a split model."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.core import StageSeconds
from selfspec.executors.base import Executor
from selfspec.executors.cpu.executor import CpuExecutor
from selfspec.executors.cuda.executor import CudaExecutor
from selfspec.executors.eager import EagerExecutor
from selfspec.executors.picker import Picker
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel


def executors_for(
    split: SplitModel,
    cache: PagedCache,
    picker: Picker,
    new_seconds: Callable[[], StageSeconds] = StageSeconds,
) -> list[Executor]:
    """The executors of a split model, fastest first. The last one, the eager executor, serves every plan.

    Args:
        new_seconds: makes the clock of a round.
    """
    eager = EagerExecutor(split, cache, picker, new_seconds)
    compiled = CpuExecutor(split, cache, picker, new_seconds)
    return [compiled, eager] if split.runner is None else [CudaExecutor(eager), compiled, eager]
