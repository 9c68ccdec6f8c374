"""Counts what a host and a device exchange: uploads, copies to the host, and waits.

Both are the processor here. The device's memory is what recordings hold or read, and what is made of it. Operations of
a replay are the device's own and do not count.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from tests.cuda.tape import WAITS, Taped


class Transfers(TorchDispatchMode):
    """Counts copies by direction, and operations for which the host would wait.

    Args:
        is_whole: whether all that the device reads was uploaded to the inputs of recordings; else an error is raised.
    """

    def __init__(self, tape, is_whole):
        super().__init__()
        self.is_whole, self.held = is_whole, []
        self.counts = Counter()
        self.device = {storage._cdata for made in tape.made for storage in made.pool}
        self.device |= {storage for made in tape.made for storage in made.reads}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        on_device = [self.holds(one) for one in given]
        name = str(func).split(".")[1]
        if name == "copy_" and on_device[0] != on_device[1]:
            is_free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            assert is_free or not self.is_whole, "a copy between host and device blocks"
            self.counts["uploads" if on_device[0] else "downloads"] += 1
        elif any(on_device):
            self.counts["waits"] += name in WAITS
            hosts = [one for one, there in zip(given, on_device, strict=True) if not there]
            assert not (self.is_whole and any(one.dim() for one in hosts)), f"{name} reads memory of the host"
        out = func(*args, **kwargs)
        if any(on_device) and name != "copy_":
            made = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
            self.held += made  # or other memory would have their addresses
            self.device |= {key_of(one) for one in made}
        return out

    def holds(self, tensor):
        return key_of(tensor) in self.device


def key_of(tensor):
    return tensor.untyped_storage()._cdata


@contextmanager
def counted(tape, is_whole=True):
    """The exchange within."""
    replay = Taped.replay

    def quiet(self):
        with _disable_current_modes():
            replay(self)
        mode.counts["replays"] += 1

    mode = Transfers(tape, is_whole)
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(Taped, "replay", quiet)
        yield mode
