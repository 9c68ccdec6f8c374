"""The layers, final norm and head of a model with the structure of Llama."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Backbone(NamedTuple):
    """The parts of a causal language model for losses at early exits."""

    body: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module


def plain_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, with active adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_parts(model: nn.Module) -> Backbone:
    """Find the parts of a model.

    Raises:
        ValueError: the model does not have Llama's structure.
    """
    plain = plain_model(model)
    body: Any = getattr(plain, "model", None)
    layers: Any = getattr(body, "layers", None)
    norm: Any = getattr(body, "norm", None)
    head = plain.get_output_embeddings()
    found = isinstance(norm, nn.Module) and isinstance(head, nn.Module) and isinstance(layers, nn.ModuleList)
    if not found or len(layers) < 2:
        raise ValueError(
            "model.base must be a decoder like Llama (model.layers of at least 2, model.norm, an output head), "
            f"got {type(plain).__name__}; choose another model"
        )
    return Backbone(body, layers, norm, head)


def check_backbone(model: nn.Module) -> None:
    """Check on 8 tokens that norm and head turn the last layer's output into the model's logits.

    Raises:
        ValueError: they do not, for example in families that scale or cap logits, or whose layers return tuples.
    """
    parts, plain = find_parts(model), plain_model(model)
    kept: list[Any] = []
    handle = parts.layers[-1].register_forward_hook(lambda module, args, output: kept.append(output))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            tokens = torch.arange(8, device=next(model.parameters()).device)[None]
            logits = plain(input_ids=tokens, use_cache=False).logits
            own = parts.head(parts.norm(kept[0])) if isinstance(kept[0], Tensor) else None
    finally:
        handle.remove()
        model.train(was_training)
    if own is None or not torch.allclose(own, logits, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"model.base must compute logits from its last layer by norm and head alone, which "
            f"{type(plain).__name__} does not; choose another model"
        )
