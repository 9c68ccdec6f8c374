"""Tensor parallelism by transformers: one model over several processes, and values that must be equal in all of them.

Every process ("rank") runs the same rounds on its part of each weight, so all ranks must make the same decisions.
Tokens are equal, since logits are gathered and picks are a function of them. Values that depend on clocks or files may
differ; for these, rank 0's value is used (`Ranks.agreed`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from selfspec.errors import UnsupportedModelError

Value = TypeVar("Value")


class Ranks:
    """The processes of a tensor-parallel model."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.count = dist.get_world_size(group)
        self.leads = dist.get_rank(group) == 0
        self._source = dist.get_global_rank(group, 0)

    def agreed(self, value: Value) -> Value:
        """Broadcast rank 0's value, which must be picklable. All ranks must call this in the same order."""
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=self._source, group=self._group)
        return box[0]  # type: ignore[return-value]


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes of a tensor-parallel model; None where the model is in one process.

    Raises:
        UnsupportedModelError: the model is distributed in another way.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor  # takes a while to import

    # Newer versions of transformers use DTensors; older ones use local tensors with hooks.
    count, mesh = getattr(model, "_tp_size", None) or 1, getattr(model, "_device_mesh", None)
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if count == 1 and not meshes:
        return None
    names = sorted({str(name) for each in meshes for name in each.mesh_dim_names or ()})  # older ones have none
    if count == 1 or len(meshes) > 1 or not set(names) <= {"tp"}:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{kind}: weights must be distributed by tensor parallelism only, got {', '.join(names) or 'other means'}; "
            "load the model with distributed_config=DistributedConfig(tp_size=N) alone"
        )
    mesh = meshes.pop() if meshes else mesh
    return Ranks(mesh.get_group())  # type: ignore[union-attr]
