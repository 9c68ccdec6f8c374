"""Random weights for a model of any shape: drawn on the device, so that none is copied or initialised twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

GAIN = 1.9  # of a random matrix on a vector of unit size: outputs then neither stand still nor go round in circles


@torch.no_grad()
def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A causal LM whose weights are drawn on the device: no default initialisation, no copy of another dtype."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(seed)
    known: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in known:
                real = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                known[id(parameter)] = nn.Parameter(_fill(real, config, name, generator), requires_grad=False)
            module._parameters[name] = known[id(parameter)]
        if any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            _renew_buffers(module, config, device)
    return model


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Make every weight the bfloat16 number next to it, in place and in its own dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def _fill(weight: Tensor, config: PretrainedConfig, name: str, generator: torch.Generator) -> Tensor:
    """Uniform of a spread by fan-in, norms 1, biases 0."""
    if weight.dim() > 1:
        bound = GAIN * (3 / weight.shape[-1]) ** 0.5
        return weight.uniform_(-bound, bound, generator=generator)
    adds_one = str(config.model_type).startswith("gemma")  # its norms multiply by 1 + weight
    return weight.fill_(0.0 if name.endswith("bias") or adds_one else 1.0)


def _renew_buffers(module: nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """Buffers are computed, not drawn: by a module of the same kind, as rotary embeddings are made."""
    try:
        fresh = type(module)(config=config).to(device)  # type: ignore[arg-type]
    except TypeError as problem:
        raise ValueError(
            f"{config.model_type}: cannot compute the buffers of {type(module).__name__} anew; "
            "choose a Llama-shaped configuration"
        ) from problem
    module._buffers.update(fresh._buffers)
