"""One model over several processes: tensor parallelism by transformers, and what all of them must agree upon.

Every process ("rank") runs the same rounds on its share of each weight, so all of them must take the same decisions.
Tokens agree by themselves: logits are gathered, and picks are a function of them. What depends on clocks and files does
not, so it is rank 0's that counts (`Ranks.agreed`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from selfspec.errors import UnsupportedModelError

Value = TypeVar("Value")


class Ranks:
    """The processes that a model is spread over."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.count = dist.get_world_size(group)
        self.leads = dist.get_rank(group) == 0
        self._source = dist.get_global_rank(group, 0)

    def agreed(self, value: Value) -> Value:
        """Rank 0's value, on every rank; all of them must ask, in the same order. Any object that can be pickled."""
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=self._source, group=self._group)
        return box[0]  # type: ignore[return-value]


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes over which a model's weights are spread; None: it lies in one.

    Raises:
        UnsupportedModelError: it is spread in another way than by tensor parallelism.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor  # takes a while to import

    # Weights are DTensors in newer versions of transformers; in older ones each rank's own part, with hooks around it.
    count, mesh = getattr(model, "_tp_size", None) or 1, getattr(model, "_device_mesh", None)
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if count == 1 and not meshes:
        return None
    names = sorted({str(name) for each in meshes for name in each.mesh_dim_names or ()})  # older ones have none
    if count == 1 or len(meshes) > 1 or not set(names) <= {"tp"}:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{kind}: its weights are spread over processes by {', '.join(names) or 'other means'}, and only tensor "
            "parallelism is supported; load it with distributed_config=DistributedConfig(tp_size=N) alone"
        )
    mesh = meshes.pop() if meshes else mesh
    return Ranks(mesh.get_group())  # type: ignore[union-attr]
