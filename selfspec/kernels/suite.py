"""`Kernels`: the kernels of recordings together, by Triton or as reference implementations."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import reference
from selfspec.kernels.layout import Accepted, Prepared, SamplingTensors

_log = logging.getLogger("selfspec")
Pick = Callable[..., tuple[Tensor, Tensor]]


class Kernels(NamedTuple):
    """The kernels of recorded rounds. The Triton functions of the same names document arguments and results.

    `add_norm`, `rotate` and `gate` are those of fused layers, see `selfspec.executors.cuda.fused_body`; those after
    them of layers in five launches, see `selfspec.executors.cuda.skinny_body`.
    """

    name: str
    scatter: Callable[..., None]
    attend: Callable[..., Tensor]
    pick: Pick
    prepare: Callable[..., Prepared]
    accept: Callable[..., Accepted]
    add_norm: Callable[..., tuple[Tensor, Tensor | None]]
    rotate: Callable[..., Tensor]
    gate: Callable[[Tensor, str], Tensor]
    norm_product: Callable[..., Tensor]
    gate_product: Callable[..., Tensor]
    product_add: Callable[..., tuple[Tensor, Tensor]]
    squares_of: Callable[[Tensor], Tensor]
    rotate_attend: Callable[..., Tensor]
    prefetch: Callable[[Tensor], None]


REFERENCE = Kernels("reference", *(getattr(reference, name) for name in Kernels._fields[1:]))


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
        pairs = [(one(logits, sampling)[0], one(logits, sampling, names)[0]) for one in (pick, reference.pick)]
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
    from selfspec.kernels.fused_accept import accept
    from selfspec.kernels.fused_layer import add_norm, gate, rotate
    from selfspec.kernels.fused_pick import pick
    from selfspec.kernels.kv_scatter import scatter
    from selfspec.kernels.layer_attention import rotate_attend
    from selfspec.kernels.paged_attention import attend
    from selfspec.kernels.prefetch import prefetch
    from selfspec.kernels.prepare_round import prepare
    from selfspec.kernels.skinny_products import gate_product, norm_product, product_add, squares_of

    return Kernels(
        "triton", scatter, attend, pick, prepare, accept, add_norm, rotate, gate, norm_product, gate_product,
        product_add, squares_of, rotate_attend, prefetch,
    )  # fmt: skip
