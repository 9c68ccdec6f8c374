"""The four kernels as one value: Triton's on a device, their plain twins anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from selfspec.kernels import reference
from selfspec.kernels.layout import Accepted


class Kernels(NamedTuple):
    """Whoever runs rounds on a device is handed one of these; see each function for what it takes."""

    name: str
    scatter: Callable[..., None]
    attend: Callable[..., Tensor]
    pick: Callable[..., tuple[Tensor, Tensor]]
    accept: Callable[..., Accepted]


REFERENCE = Kernels("reference", reference.scatter, reference.attend, reference.pick, reference.accept)


def triton_kernels() -> Kernels:
    """Raises ImportError where Triton is not installed."""
    from selfspec.kernels.fused_accept import accept
    from selfspec.kernels.fused_pick import pick
    from selfspec.kernels.kv_scatter import scatter
    from selfspec.kernels.paged_attention import attend

    return Kernels("triton", scatter, attend, pick, accept)
