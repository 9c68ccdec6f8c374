"""Fingerprints of models, weights, tokenizers and devices: readable fields and short hashes."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.model.gguf_blocks import BlockWeight, release
from selfspec.model.quantized import dense, is_dense
from selfspec.model.split_model import SplitModel

NAMES = {"architectures", "dtype", "torch_dtype", "id2label", "label2id", "auto_map", "transformers_version"}
SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes of PEFT's layers
SAMPLES = 8  # numbers read from every weight


def shape_of(split: SplitModel) -> dict[str, Any]:
    """What a model's speed depends on: its config without names and token ids, its modules and their sizes."""
    return {
        "architecture": type(split.model).__name__,
        "num_layers": split.num_layers,
        "hidden_size": hidden_size_of(split),
        "vocab_size": split.vocab_size,
        "shape": _digest(_plain(split.config.to_dict()), _modules(split.model)),
    }


def hidden_size_of(split: SplitModel) -> int:
    return int(split.config.get_text_config().hidden_size)


def intermediate_size_of(split: SplitModel) -> int:
    """The inner width of the model's MLPs; where its config names none, four times the hidden size."""
    size = getattr(split.config.get_text_config(), "intermediate_size", None)
    return size if isinstance(size, int) and size > 0 else 4 * hidden_size_of(split)


def heads_of(split: SplitModel) -> str:
    """A hash over a few numbers of every weight of the exit heads; empty without them."""
    if split.exit_heads is None:
        return ""
    saved = split.exit_heads.state_dict()
    return _digest(list(saved), torch.cat(list(map(sample, saved.values()))).tolist())


def weights_of(split: SplitModel) -> str:
    """A hash over a few numbers of every saved weight. It is the same in float32 and bfloat16 and on any device."""
    saved = split.model.state_dict(keep_vars=True)
    saved = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    seen = [sample(value).tolist() for value in saved.values()]
    release(saved.values())
    return _digest(list(saved), [number for numbers in seen for number in numbers])


def vocabulary_of(tokenizer: Any) -> str:
    """A hash over the texts and ids of all tokens, added tokens included."""
    return _digest(tokenizer.get_vocab())


def device_name(device: torch.device) -> str:
    """The name of the accelerator, or of the processor where the system provides it, else its architecture."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{device.type}: {next(names, '') or platform.processor() or platform.machine()}"


def sample(tensor: Tensor) -> Tensor:
    """A few numbers at equal distances in a weight, rounded to bfloat16, on the host."""
    if tensor.is_meta:
        return torch.zeros(0)
    if hasattr(tensor, "to_local"):  # the local part, since gathering would involve all ranks
        tensor = tensor.to_local()
    step = max(1, tensor.numel() // SAMPLES)
    if isinstance(tensor, BlockWeight):  # only the rows that are asked for are dequantised
        places = torch.arange(0, tensor.numel(), step)[:SAMPLES]
        width = tensor.shape[1]
        picked = tensor.select(places // width).dequantize()[torch.arange(len(places)), places % width]
        return picked.to(torch.bfloat16).float()
    flat = dense(tensor.detach()).reshape(-1)
    return flat[::step][:SAMPLES].to(torch.bfloat16).float().cpu()


def _modules(model: Any) -> list[str]:
    """The class, weight sizes, classes of quantised weights and adapter switches of every module."""
    described = []
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        sizes = [list(weight.shape) if is_dense(weight) else [type(weight).__name__, *weight.shape] for weight in own]
        switches = [vars(module)[name] for name in SWITCHES if name in vars(module)]
        described.append(f"{type(module).__name__} {sizes} {switches}")
    return described


def _plain(value: Any) -> Any:
    """A config without fields that do not affect speed."""
    if not isinstance(value, dict):
        return value
    kept = {str(k): v for k, v in value.items() if k not in NAMES and not str(k).startswith("_")}
    return {k: _plain(v) for k, v in kept.items() if not k.endswith(("token_id", "token_ids"))}


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
