"""Shapes of known models, by name: their configurations without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig


def _rope(theta: float, kind: str = "default", **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, **_rope(500000.0)}
SCALED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN_3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}


GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}


def _sizes(layers: int, hidden: int, inner: int, heads: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return {"num_hidden_layers": layers, **sizes}


# Shapes by name: model family and configuration, as in the published `config.json` files.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", {**_sizes(8, 64, 160, 4), "num_key_value_heads": 2, "vocab_size": 1024}),
    "smollm2-135m": (
        "llama",
        {**_sizes(30, 576, 1536, 9), "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
        | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, **_rope(100000.0)},
    ),
    "llama-3.2-1b": (
        "llama",
        {**LLAMA_3, **_sizes(16, 2048, 8192, 32)}
        | {"head_dim": 64, "tie_word_embeddings": True}
        | {"max_position_embeddings": 131072, **_rope(500000.0, "llama3", **SCALED)},
    ),
    "llama-3.2-3b": (
        "llama",
        {**LLAMA_3, **_sizes(28, 3072, 8192, 24), "head_dim": 128, "tie_word_embeddings": True}
        | {"max_position_embeddings": 131072, **_rope(500000.0, "llama3", **SCALED)},
    ),
    "llama-3.1-8b": (
        "llama",
        {**LLAMA_3, **_sizes(32, 4096, 14336, 32), "head_dim": 128}
        | {"max_position_embeddings": 131072, **_rope(500000.0, "llama3", **{**SCALED, "factor": 8.0})},
    ),
    "llama-2-7b": (
        "llama",
        {**_sizes(32, 4096, 11008, 32), "num_key_value_heads": 32, "vocab_size": 32000}
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "llama-3-8b": ("llama", {**LLAMA_3, **_sizes(32, 4096, 14336, 32), "max_position_embeddings": 8192}),
    "qwen3-0.6b": ("qwen3", {**QWEN_3, **_sizes(28, 1024, 3072, 16), **_rope(1000000.0), "tie_word_embeddings": True}),
    "qwen3-4b": ("qwen3", {**QWEN_3, **_sizes(36, 2560, 9728, 32), **_rope(1000000.0), "tie_word_embeddings": True}),
    "gemma-3-4b": (
        "gemma3_text",
        {**_sizes(34, 2560, 10240, 8), "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131072, "sliding_window": 1024}
        | {"query_pre_attn_scalar": 256, **GEMMA_ROPE},
    ),
}


def config_of(shape: str | Path, **overrides: Any) -> PretrainedConfig:
    """The configuration of a named shape, of a `config.json`, or of a folder with one.

    Args:
        overrides: keys to replace, such as `max_position_embeddings`.

    Raises:
        ValueError: the shape is neither a known name nor a file.
    """
    if str(shape) in SHAPES:
        family, given = SHAPES[str(shape)]
        return AutoConfig.for_model(family, **{"tie_word_embeddings": False, **given, **overrides})
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"shape must be one of {', '.join(SHAPES)} or a config.json, got {str(shape)!r}")
    given = json.loads(path.read_text("utf-8"))
    return AutoConfig.for_model(given.pop("model_type"), **{**given, **overrides})
