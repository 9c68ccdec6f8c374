"""`PackedLinear`: linear layers of one input as one product, with their weights one after the other in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.model.llama_weights import Linear

Packing = Literal["share", "copy", "none"]


class _Part(NamedTuple):
    """A weight or bias of the model, and its place in the packed one."""

    own: Tensor
    place: Tensor


class PackedLinear:
    """Linear layers of one input, whose outputs lie side by side.

    Args:
        linears: the model's layers. A single one is used as it is.
        packing: "share": the model's parameters become views of the packed weight, so that it takes no more memory;
            they must not be tensors of inference mode.
            "copy": the model stays as it is, and the packed weight is a copy. "none": every layer is a product of its
            own.
    """

    def __init__(self, linears: Sequence[Linear], packing: Packing) -> None:
        self.linears, self.sizes = tuple(linears), [len(one.weight) for one in linears]
        self.packing: Packing = "none" if len(linears) == 1 else packing
        self._parts: list[_Part] = []
        self._versions: list[int] = []
        self._weight, self._bias = linears[0].weight, linears[0].bias
        if self.packing != "none":
            self._pack()

    @staticmethod
    def bytes_of(linears: Sequence[Linear]) -> int:
        """Bytes of a packed copy."""
        tensors = [one for linear in linears for one in (linear.weight, linear.bias) if one is not None]
        return sum(one.nbytes for one in tensors) if len(linears) > 1 else 0

    @property
    def weight(self) -> Tensor | None:
        """The weight of all layers, `[sum of outputs, in]`; None where each layer is a product of its own."""
        return None if len(self.linears) > 1 and self.packing == "none" else self._weight

    @property
    def bias(self) -> Tensor | None:
        """The biases of all layers, `[sum of outputs]`, zeros for those without one; None where there is none."""
        return self._bias

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of all layers, `[N, sum of outputs]`, for inputs `[N, in]`."""
        if len(self.linears) == 1 or self.packing != "none":
            return F.linear(x, self._weight, self._bias)
        out = x.new_empty((len(x), sum(self.sizes)))
        for linear, part in zip(self.linears, out.split(self.sizes, 1), strict=True):
            if linear.bias is None:
                torch.mm(x, linear.weight.t(), out=part)
            else:
                torch.addmm(linear.bias, x, linear.weight.t(), out=part)
        return out

    def refresh(self, deeply: bool = False) -> None:
        """Write the model's weights to their places again, if they were edited since the last call.

        Args:
            deeply: also after edits through `.data`, which are not counted: copies are written in any case, and shared
                weights if the model's are in other memory.

        Raises:
            ValueError: the shape of a weight changed.
        """
        for i, (own, place) in enumerate(self._parts):
            if own.shape != place.shape:
                raise ValueError(
                    f"a weight {list(place.shape)} was replaced by one {list(own.shape)}; load the model again"
                )
            if self.packing == "share":
                if deeply and own.data_ptr() != place.data_ptr():
                    place.copy_(own.detach())
                    own.data = place
            elif deeply or own.is_inference() or own._version != self._versions[i]:
                place.copy_(own.detach())
                self._versions[i] = _version_of(own)

    def _pack(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # they are used outside of inference mode, too
            self._weight = self._packed([one.weight for one in self.linears])
            if any(one.bias is not None for one in self.linears):
                zeros = [one.weight.new_zeros(len(one.weight)) for one in self.linears]
                biases = [one.bias for one in self.linears]
                self._bias = self._packed([z if b is None else b for z, b in zip(zeros, biases, strict=True)])
        if self.packing == "copy":
            self._versions = [_version_of(one.own) for one in self._parts]

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        packed = torch.cat([one.detach() for one in tensors])
        for own, place in zip(tensors, packed.split(self.sizes), strict=True):
            self._parts.append(_Part(own, place))
            if self.packing == "share":
                own.data = place
        return packed


def _version_of(tensor: Tensor) -> int:
    """The number of edits in place; tensors made in inference mode count none."""
    return 0 if tensor.is_inference() else tensor._version
