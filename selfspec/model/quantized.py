"""Weights quantised to integers with scales by torchao.

A quantised model is a target of its own. Speculation does not change its tokens, which differ from those of the model
before quantisation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec.model.quiet_imports import quiet_imports

Quantize = Literal["int8", "int4"]
KINDS: tuple[Quantize, ...] = ("int8", "int4")
GROUP = 32  # inputs that share a scale in int4


def check_kind(kind: str) -> Quantize:
    """Return `kind`; ValueError where there is no such kind."""
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def quantize(model: nn.Module, kind: str) -> nn.Module:
    """Quantise the weights of the layers in place and return the model. Embedding and head do not change.

    int8 has a scale per output, int4 one per output and 32 inputs.

    Raises:
        ImportError: torchao is not installed.
        ValueError: there is no such kind, or no linear layer can be quantised.
    """
    check_kind(kind)
    try:
        with quiet_imports():
            from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    except ImportError as problem:
        raise ImportError("quantize needs the package torchao; install it with: pip install torchao") from problem
    head = getattr(model, "get_output_embeddings", lambda: None)()
    step = 1 if kind == "int8" else GROUP
    chosen = {id(m) for m in model.modules() if type(m) is nn.Linear and m is not head and m.in_features % step == 0}
    if not chosen:
        raise ValueError(
            f"quantize must be None for {type(model).__name__}, whose linear layers cannot be quantised, got {kind!r}"
        )
    how: Any = (
        Int8WeightOnlyConfig()
        if kind == "int8"
        else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))  # type: ignore[attr-defined]
    )
    quantize_(model, how, filter_fn=lambda module, name: id(module) in chosen)
    return model.requires_grad_(False)


def is_dense(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor: not quantised, and no other tensor subclass."""
    return type(weight) in (Tensor, nn.Parameter)


def dense(weight: Tensor) -> Tensor:
    """The weight as an ordinary tensor; quantised weights are dequantised."""
    own = type(weight).dequantize is not Tensor.dequantize  # torch's own method would convert to float32
    return weight.dequantize() if own else weight
