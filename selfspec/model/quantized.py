"""Weights kept as small integers with scales (torchao): made when a model is loaded, and read where numbers are needed.

A quantised model is a target of its own: it judges its drafts by its own arithmetic, so that speculation changes none
of its tokens. Its tokens are not those of the model that it was made from.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.hushed import hushed

Quantize = Literal["int8", "int4"]
KINDS: tuple[Quantize, ...] = ("int8", "int4")
GROUP = 32  # inputs that share a scale in int4


def check_kind(kind: str) -> Quantize:
    """The kind by name, or ValueError."""
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def quantize(model: nn.Module, kind: str) -> nn.Module:
    """The model with its layers' weights rounded to small integers, in place; embedding and head stay as they are.

    int8 has a scale for every output, int4 one for every 32 inputs of it.

    Raises:
        ImportError: torchao is not installed.
        ValueError: another kind, or a model of which nothing can be quantised.
    """
    check_kind(kind)
    try:
        with hushed():
            from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    except ImportError as problem:
        raise ImportError("quantize needs the package torchao; install it with: pip install torchao") from problem
    head = getattr(model, "get_output_embeddings", lambda: None)()
    step = 1 if kind == "int8" else GROUP
    chosen = {id(m) for m in model.modules() if type(m) is nn.Linear and m is not head and m.in_features % step == 0}
    if not chosen:
        raise ValueError(f"quantize={kind!r} found no linear layers that it could round in {type(model).__name__}")
    how: Any = (
        Int8WeightOnlyConfig()
        if kind == "int8"
        else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
    )
    quantize_(model, how, filter_fn=lambda module, name: id(module) in chosen)
    return model.requires_grad_(False)


def is_dense(weight: Tensor) -> bool:
    """Whether a weight is plain numbers in memory: no quantised tensor or other subclass with a layout of its own."""
    return type(weight) in (Tensor, nn.Parameter)


def dense(weight: Tensor) -> Tensor:
    """The numbers of a weight; of a quantised one, whose class says how, those that it stands for."""
    own = type(weight).dequantize is not Tensor.dequantize  # torch's would make any other weight float32
    return weight.dequantize() if own else weight
