"""A stand-in for graph capture that is as strict as the real thing, and tells what was recorded.

As on a device, a body may not read a number from a tensor, nor make a tensor from the host's numbers; results lie at
fixed addresses, and the replay of one recording overwrites those of all others.
"""

from __future__ import annotations

import torch

from selfspec.device.capture import CannotCapture, Repeats, Watched
from selfspec.device.runner import Runner
from selfspec.kernels.suite import REFERENCE
from selfspec.target.lean import LeanBody

HOST = ("item", "_local_scalar_dense", "is_nonzero", "equal", "resolve_neg")  # the last: what `tolist` asks first
HOST += ("lift_fresh", "nonzero", "unique", "masked_select")


class Refusing(Watched):
    """Raises at what a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.last = name
        by_mask = name.startswith(("aten.index.", "aten.index_put")) and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if by_mask or name.split(".")[1].rstrip("_") in HOST:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


class Strict(Repeats):
    """Records like a device does."""

    def __init__(self, num_bytes=None):
        self.made, self.num_bytes = [], num_bytes

    def record(self, body):
        body()  # makes what is made once, as the run before a capture does
        watch = Refusing()

        def watched():
            with watch:
                return body()

        try:
            made = _Poisoning(super().record(watched), self)
        except Exception as problem:
            raise CannotCapture(watch.last, str(problem)) from problem
        if self.num_bytes is not None:
            made.num_bytes = self.num_bytes
        self.made.append(made)
        return made


class _Poisoning:
    def __init__(self, recording, owner):
        self._recording, self._owner = recording, owner
        self.outputs, self.num_bytes = recording.outputs, recording.num_bytes
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        for other in self._owner.made:
            if other is not self:
                for one in other.outputs:
                    one.fill_(float("nan") if one.is_floating_point() else -(1 << 40))
        self._recording.replay()


def with_runner(target, budget=1 << 40, most_rows=8, num_bytes=None):
    """The same target, run from recordings by the plain twins."""
    if target.engine == "compiled":  # it reads rows where no recording has them: on the host
        target.stack.lean = LeanBody.of(target.stack.twin)
    target.stack.runner = Runner(target.stack, REFERENCE, Strict(num_bytes), budget, most_rows)
    return target
