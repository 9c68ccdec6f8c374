"""A Llama-shaped model as a GGUF file, for llama.cpp (the format: github.com/ggml-org/ggml, docs/gguf.md).

It has no tokenizer: both sides are given and give token ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
WHOLE, FRACTION, TEXT = 4, 6, 8  # kinds of values: uint32, float32, string
FLOAT32, BFLOAT16 = 0, 30  # kinds of tensors
MOSTLY_BFLOAT16 = 32  # kind of file; of float32, 0
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fits_half(model: Any) -> bool:
    """Whether bfloat16 holds every number of the model's matrices exactly."""
    return all(bool((tensor.bfloat16() == tensor).all()) for _, tensor in _tensors(model) if tensor.dim() == 2)


def write(model: Any, path: Path, half: bool = False) -> None:
    """Write a Llama without biases and with unscaled rotary positions, in float32.

    Args:
        half: its matrices in bfloat16.

    Raises:
        ValueError: a model of another kind.
    """
    rope = model.config.rope_parameters
    biased = any(name.endswith("bias") for name, _ in model.named_parameters())
    if model.config.model_type != "llama" or rope.get("rope_type", "default") != "default" or biased:
        raise ValueError(
            f"only a Llama without biases and with default rotary positions can be handed to llama.cpp here, "
            f"got {model.config.model_type} with rotary positions {rope.get('rope_type')!r}"
        )
    named, facts = dict(_tensors(model)), _facts(model.config)
    facts["general.file_type"] = MOSTLY_BFLOAT16 if half else 0
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(named), len(facts)))
        for key, value in facts.items():
            _fact(file, key, value)
        at = 0
        for name, tensor in named.items():
            sizes = tensor.shape[::-1]  # the innermost first
            _text(file, name)
            kind = BFLOAT16 if half and tensor.dim() == 2 else FLOAT32
            file.write(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at))
            at += _padded((2 if kind == BFLOAT16 else 4) * tensor.numel())
        file.write(b"\0" * (_padded(file.tell()) - file.tell()))
        for name, tensor in named.items():
            turned = _turned(model.config, name, tensor).contiguous()
            data = (turned.bfloat16().view(torch.int16) if half and turned.dim() == 2 else turned).numpy()
            data.tofile(file)
            file.write(b"\0" * (_padded(data.nbytes) - data.nbytes))


def _facts(config: Any) -> dict[str, int | float | str]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "general.architecture": "llama",
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "none",
    }


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    base, config = model.model, model.config
    yield "token_embd.weight", base.embed_tokens.weight.detach()
    yield "output_norm.weight", base.norm.weight.detach()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach()
    for i, layer in enumerate(base.layers):
        for name, module in PARTS.items():
            yield f"blk.{i}.{name}.weight", layer.get_submodule(module).weight.detach()


def _turned(config: Any, name: str, tensor: Tensor) -> Tensor:
    """float32 on the host; llama.cpp turns neighbouring pairs of a head, where transformers turns its two halves."""
    tensor = tensor.to("cpu", torch.float32)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(file: BinaryIO, text: str) -> None:
    file.write(struct.pack("<Q", len(text.encode())) + text.encode())


def _fact(file: BinaryIO, key: str, value: int | float | str) -> None:
    _text(file, key)
    if isinstance(value, str):
        file.write(struct.pack("<I", TEXT))
        _text(file, value)
    elif isinstance(value, float):
        file.write(struct.pack("<If", FRACTION, value))
    else:
        file.write(struct.pack("<II", WHOLE, value))
