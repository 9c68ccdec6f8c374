"""Errors after which a process cannot use its device any more, and how errors are told."""

from __future__ import annotations

import torch


class LostContextError(RuntimeError):
    """No later call of this process can succeed on the device."""


def check_context(problem: Exception, device: torch.device) -> None:
    """Raise LostContextError if, after this error, the device cannot be used any more."""
    lost = problem if isinstance(problem, torch.AcceleratorError) else None
    if lost is None and device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as found:
            lost = found
    if lost is not None:
        raise LostContextError(told(lost)) from problem


def told(problem: BaseException) -> str:
    """An error in one line."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, LostContextError) else f"{type(problem).__name__}: {text}"
