"""Weights in the quantised blocks of a GGUF file: `Blocks`, and `BlockWeight`, the parameter of a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from selfspec.kernels.dequantize import TYPES, block_sizes, dequantized
from selfspec.kernels.rounding import rounded
from selfspec.model.mapped_file import MappedFile

CHUNK = 1 << 20  # weights that are dequantised at once, so that they stay in the processor's cache
_aten = torch.ops.aten


class Blocks(NamedTuple):
    """A weight `[out, in]` as a GGUF file holds it: quantised blocks along `in`."""

    type: str
    """The blocks' type in GGUF files."""
    data: Tensor
    """uint8 `[file rows, bytes per row]`."""
    rows: Tensor | None = None
    """int64 `[out]`: the file's row of each output; None: the outputs are in the file's order."""
    source: MappedFile | None = None
    """The file that `data` is mapped from."""

    def select(self, outputs: Tensor) -> Blocks:
        """The rows of some outputs, int64 `[n]`."""
        return self._replace(rows=outputs if self.rows is None else self.rows[outputs])

    def part(self, first: int, stop: int) -> Blocks:
        """The rows [first, stop); those in the file's order are not copied."""
        if self.rows is None:
            return self._replace(data=self.data[first:stop])
        return self._replace(rows=self.rows[first:stop])

    @property
    def is_packable(self) -> bool:
        """Whether compiled products read blocks of this type."""
        return self.type in TYPES

    @property
    def shape(self) -> torch.Size:
        """The weight's shape `[out, in]`."""
        weights, size = block_sizes(self.type)
        return torch.Size([len(self.data if self.rows is None else self.rows), self.data.shape[1] // size * weights])

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.shape[0] * self.data.shape[1]

    def dequantized(self) -> Tensor:
        """The weights, fp32 `[out, in]`.

        Raises:
            OSError: the file became shorter.
        """
        if self.source is not None:
            self.source.check()
        count, width = self.shape
        step = max(1, CHUNK // width)
        if count <= step:
            return dequantized(self.data if self.rows is None else self.data[self.rows], self.type)
        made = torch.empty(count, width)
        for first in range(0, count, step):
            made[first : first + step] = self.part(first, first + step).dequantized()
        return made


class BlockWeight(Tensor):
    """A weight in blocks, in the place of a float32 tensor `[out, in]`: modules hold it as their parameter.

    `F.linear` and `F.embedding` dequantise what they need and drop it; so does every other operation that reads the
    weight. An index of rows, int64 `[n]`, gives a `BlockWeight` of these rows. It cannot be edited.

    Args:
        activation_bytes: bytes of the numbers that are multiplied with it; with 2, `F.linear` rounds its input as
            `selfspec.kernels.rounding` says.
    """

    blocks: Blocks
    activation_bytes: int
    held: Tensor | None

    @staticmethod
    def __new__(cls, blocks: Blocks, activation_bytes: int) -> BlockWeight:
        made = Tensor._make_wrapper_subclass(cls, blocks.shape, dtype=torch.float32, device=torch.device("cpu"))
        made.blocks, made.activation_bytes, made.held = blocks, activation_bytes, None
        return made

    def __init__(self, blocks: Blocks, activation_bytes: int) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockWeight({self.blocks.type}, {list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockWeight:
        """A copy of its own that shares the blocks, which do not change."""
        memo[id(self)] = made = _restored(self.blocks, self.activation_bytes, isinstance(self, nn.Parameter))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        blocks = self.blocks._replace(data=self.blocks.data.clone(), source=None)
        return _restored, (blocks, self.activation_bytes, isinstance(self, nn.Parameter))

    def dequantize(self) -> Tensor:
        """The weights, fp32 `[out, in]`."""
        return self.blocks.dequantized() if self.held is None else self.held

    def hold(self, keep: bool) -> None:
        """Dequantise now and keep the result for the next uses, or drop it."""
        self.held = self.dequantize() if keep else None

    def select(self, rows: Tensor) -> BlockWeight:  # type: ignore[override]
        """Some rows, int64 `[n]`."""
        return BlockWeight(self.blocks.select(rows.cpu()), self.activation_bytes)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = _FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            return BlockWeight(args[0].blocks, args[0].activation_bytes)
        if func._schema.is_mutable:
            raise RuntimeError(
                "weights of a GGUF file are quantised blocks, which cannot be edited; open it with dtype='bfloat16' to "
                "have ordinary weights"
            )
        return func(*tree_map(_dense, list(args)), **tree_map(_dense, dict(kwargs or {})))


def _restored(blocks: Blocks, activation_bytes: int, is_parameter: bool) -> Any:
    made = BlockWeight(blocks, activation_bytes)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


def _itself(weight: BlockWeight) -> BlockWeight:
    return weight


def _dense(value: Any) -> Any:
    return value.dequantize() if isinstance(value, BlockWeight) else value


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """`x`, `[..., in]`, as a product with `weight` takes it: rounded, if that has blocks and two bytes per activation.

    The gradient is that of the unrounded numbers.
    """
    if not isinstance(weight, BlockWeight) or weight.activation_bytes != 2:
        return x
    made = rounded(x.detach() if x.requires_grad else x)
    return x + (made - x).detach() if x.requires_grad else made


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; a large weight is dequantised in parts, one after another."""
    if not isinstance(weight, BlockWeight):
        return F.linear(x, _dense(weight), _dense(bias))
    x, (count, width) = multiplied(x, weight), weight.shape
    step = max(1, CHUNK // width)
    if weight.held is not None or count <= step or x.requires_grad:
        return F.linear(x, weight.dequantize(), bias)
    made = x.new_empty(*x.shape[:-1], count)
    for first in range(0, count, step):
        made[..., first : first + step] = F.linear(x, weight.blocks.part(first, first + step).dequantized())
    return made if bias is None else made + bias


def _embedding(ids: Tensor, weight: BlockWeight, *options: Any, **named: Any) -> Tensor:
    """`F.embedding`, whose options matter to training alone."""
    rows, places = ids.flatten().unique(return_inverse=True)
    made: Tensor = weight.select(rows).dequantize()[places]
    return made.view(*ids.shape, weight.shape[1])


def _getitem(weight: BlockWeight, index: Any) -> Any:
    if isinstance(index, Tensor) and index.dtype == torch.int64:
        if index.ndim == 1:
            return weight.select(index)
        return _embedding(index, weight)
    return weight.dequantize()[index]


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.__getitem__: _getitem,
    Tensor.detach: _itself,
    torch.detach: _itself,
    Tensor.data.__get__: _itself,  # type: ignore[attr-defined]
}


def mapped_blocks(source: MappedFile, kind: str, offset: int, shape: tuple[int, ...], rows: Tensor | None) -> Blocks:
    """The blocks of a tensor `[out, in]` that begins `offset` bytes from the start of a file.

    Args:
        rows: as in `Blocks`.
    """
    weights, size = block_sizes(kind)
    data = source.tensor(torch.uint8, offset, (math.prod(shape[:-1]), shape[-1] // weights * size))
    return Blocks(kind, data, rows, source)


def file_numbers(kind: str, source: MappedFile, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A small tensor of any type, dequantised: fp32 of `shape`."""
    weights, size = block_sizes(kind)
    data = source.tensor(torch.uint8, offset, (1, math.prod(shape) // weights * size))
    return dequantized(data, kind).view(shape).clone()


def release(weights: Iterable[Tensor]) -> None:
    """Give back the memory of the file's pages that these weights are mapped from; reading them again maps them again.

    A read of a few bytes may map two megabytes.
    """
    for source in {one.blocks.source for one in weights if isinstance(one, BlockWeight)}:
        if source is not None:
            source.release()


class Holding:
    """Within it, the weights in blocks of some modules are dequantised once and kept."""

    def __init__(self, *modules: nn.Module) -> None:
        self._weights = [one for module in modules for one in module.parameters() if isinstance(one, BlockWeight)]

    def __enter__(self) -> Self:
        for weight in self._weights:
            weight.hold(True)
        return self

    def __exit__(self, *problem: object) -> None:
        for weight in self._weights:
            weight.hold(False)
