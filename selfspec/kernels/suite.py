"""`Kernels`: the kernels of recordings together, by Triton or as reference implementations."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import layer_reference, reference, reference_trees
from selfspec.kernels.layout import Accepted, Branches, DraftTree, SamplingTensors

_log = logging.getLogger("selfspec")
Pick = Callable[..., tuple[Tensor, Tensor]]


class Kernels(NamedTuple):
    """The kernels of recorded rounds. The Triton functions of the same names document arguments and results.

    `add_norm`, `rotate` and `gate` are those of fused layers, see `selfspec.executors.cuda.fused_body`.
    """

    name: str
    scatter: Callable[..., None]
    attend: Callable[..., Tensor]
    pick: Pick
    accept: Callable[..., Accepted]
    advance: Callable[..., None]
    add_norm: Callable[..., tuple[Tensor, Tensor | None]]
    rotate: Callable[..., Tensor]
    gate: Callable[[Tensor, str], Tensor]
    pick_two: Callable[..., tuple[Tensor, Tensor, Tensor]]
    grow: Callable[..., DraftTree]
    follow: Callable[..., Branches]
    move: Callable[..., None]


REFERENCE = Kernels(
    "reference", reference.scatter, reference.attend, reference.pick, reference.accept, reference.advance,
    layer_reference.add_norm, layer_reference.rotate, layer_reference.gate,
    reference.pick_two, reference_trees.grow, reference_trees.follow, reference_trees.move,
)  # fmt: skip


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; selfspec works without it."""
    return importlib.util.find_spec("triton") is not None


@cache
def pick_for(device: torch.device) -> Pick | None:
    """The fused pick for a CUDA device, after a test on it; None on other devices, without Triton, or if it fails."""
    if device.type != "cuda" or not has_triton():
        return None
    try:
        from selfspec.kernels.fused_pick import pick

        logits = torch.arange(99.0, device=device).view(3, 33)
        floats, ints = logits.new_tensor([0.0, 1.0, 0.5]), torch.arange(3, device=device)
        sampling = SamplingTensors(floats, ints.int(), 1 - floats / 4, floats / 9, ints, ints)
        names = 2 * torch.arange(33, device=device)
        pairs = [(one(logits, sampling)[0], one(logits, sampling, None, names)[0]) for one in (pick, reference.pick)]
        agree = all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        problem = "its picks are wrong"
    except Exception as raised:  # compilers and drivers raise exceptions of any type
        agree, problem = False, f"{type(raised).__name__}: {raised}"
    if not agree:
        _log.warning("the fused pick does not work on %s (%s), so torch operations are used instead", device, problem)
    return pick if agree else None


def triton_kernels() -> Kernels:
    """The Triton kernels.

    Raises:
        ImportError: Triton is not installed.
    """
    from selfspec.kernels.draft_tree import follow, grow
    from selfspec.kernels.fused_accept import accept
    from selfspec.kernels.fused_advance import advance
    from selfspec.kernels.fused_gate import gate
    from selfspec.kernels.fused_norm import add_norm
    from selfspec.kernels.fused_pick import pick, pick_two
    from selfspec.kernels.fused_rotary import rotate
    from selfspec.kernels.kv_scatter import move, scatter
    from selfspec.kernels.paged_attention import attend

    return Kernels(
        "triton", scatter, attend, pick, accept, advance, add_norm, rotate, gate, pick_two, grow, follow, move
    )
