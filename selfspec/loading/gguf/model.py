"""The model of a GGUF file: its modules hold the file's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf.config import Architecture, architecture_of, read_config
from selfspec.loading.gguf.file import GgufFile, GgufTensor
from selfspec.loading.gguf.generation import read_generation_config
from selfspec.model.gguf_blocks import BlockWeight, file_numbers, mapped_blocks
from selfspec.model.mapped_file import MappedFile

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FREQUENCIES = "rope_freqs.weight"  # what the frequencies of rotary angles are divided by
# Tensors that `read_config` reads.
OF_CONFIG = {FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight"}


def read_model(file: GgufFile, dtype: torch.dtype | None = None, activation_bytes: int = 2) -> nn.Module:
    """The causal LM of a GGUF file, on CPU.

    Args:
        dtype: dtype of dense weights; None: weights in quantised blocks stay so, and others are float32.
        activation_bytes: see `BlockWeight`.

    Raises:
        UnsupportedModelError: the architecture, a key or a tensor is not supported.
        OSError: a tensor is missing or has another shape than the config says.
    """
    own, config = architecture_of(file), read_config(file)
    loader: Any = transformers.AutoModelForCausalLM
    with torch.inference_mode(False), _EmptyOnMeta():
        model = loader.from_config(config, dtype=dtype or torch.float32).eval()
    model.requires_grad_(False)
    model.generation_config = read_generation_config(file)
    sources = {path: MappedFile(path) for path in file.paths}
    unused = set(file.tensors) - OF_CONFIG
    for name, (tensor, parameter) in _named(file, model).items():
        unused.discard(tensor.name)
        with torch.inference_mode(False):
            made = _parameter(file, name, tensor, parameter, sources, own, config, dtype, activation_bytes)
        _replace(model, name, nn.Parameter(made, requires_grad=False))
    model.tie_weights()
    if unused:
        raise UnsupportedModelError(
            f"{file.name}: its tensor {min(unused)} is not known in the architecture {file.architecture!r} and may "
            "change the result; choose another file"
        )
    if FREQUENCIES in file.tensors:
        _divide_frequencies(file, model, numbers_of(file, file.tensors[FREQUENCIES]))
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Weights that are about to be replaced take no memory; buffers are made as usual."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def _named(file: GgufFile, model: nn.Module) -> dict[str, tuple[GgufTensor, Tensor]]:
    """The file's tensor of each parameter of the model, and the parameter.

    Raises:
        OSError: one is missing.
    """
    import gguf

    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    config: Any = model.config
    names = gguf.get_tensor_name_map(kinds[file.architecture], config.num_hidden_layers)
    found: dict[str, tuple[GgufTensor, Tensor]] = {}
    for name, parameter in model.named_parameters():  # a tied head is not listed twice
        stem, _, suffix = name.rpartition(".")
        tensor = file.tensors.get(f"{names.get_name(stem)}.{suffix}")
        if tensor is None:
            raise OSError(f"{file.name} lacks the tensor of {name}; copy or download it again")
        found[name] = tensor, parameter
    return found


def _parameter(
    file: GgufFile,
    name: str,
    tensor: GgufTensor,
    parameter: Tensor,
    sources: Mapping[Any, MappedFile],
    own: Architecture,
    config: Any,
    dtype: torch.dtype | None,
    activation_bytes: int,
) -> Tensor:
    if tensor.shape != tuple(parameter.shape):
        raise OSError(
            f"{file.name}: its tensor {tensor.name} has the shape {list(tensor.shape)}, and its metadata ask for "
            f"{list(parameter.shape)}; copy or download it again"
        )
    order, source = _order(name, tensor, own, config), sources[tensor.path]
    if parameter.ndim == 2 and tensor.type not in FLOATS:
        blocks = mapped_blocks(source, tensor.type, tensor.offset, tensor.shape, order)
        made: Tensor = BlockWeight(blocks, activation_bytes)
        return made if dtype is None else made.dequantize().to(dtype)
    if tensor.type in FLOATS:
        made = source.tensor(FLOATS[tensor.type], tensor.offset, tensor.shape)
        made = made.to(dtype or torch.float32, copy=True)
    else:
        made = file_numbers(tensor.type, source, tensor.offset, tensor.shape).to(dtype or torch.float32)
    if own.norm_offset and "norm" in name:
        made = made - own.norm_offset
    return made if order is None else made[order]


def _order(name: str, tensor: GgufTensor, own: Architecture, config: Any) -> Tensor | None:
    """The file's row of each output, int64 `[out]`; None: the same.

    llama.cpp rotates neighbouring numbers of a head in some architectures, transformers those half a head apart.
    """
    if not own.permuted:
        return None
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = counts.get(name.split(".")[-2])
    if heads is None:
        return None
    return torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    stem, _, suffix = name.rpartition(".")
    module = model.get_submodule(stem)
    del module._parameters[suffix]
    module.register_parameter(suffix, parameter)


def numbers_of(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """A small tensor as fp32 numbers."""
    return file_numbers(tensor.type, MappedFile(tensor.path), tensor.offset, tensor.shape)


def _divide_frequencies(file: GgufFile, model: nn.Module, factors: Tensor) -> None:
    """Divide the frequencies of rotary angles by a factor each, as Llama 3.1 and later want it."""
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            own = module._buffers.get(name)
            if own is not None:
                if own.shape != factors.shape:
                    raise OSError(
                        f"{file.name}: its tensor {FREQUENCIES} has {len(factors)} numbers of {len(own)}; copy or "
                        "download it again"
                    )
                module._buffers[name] = (own.float() / factors).to(own.dtype)
