"""Tiny random models of every family, made so that an early exit is right now and then, and no two logits are tied."""

from __future__ import annotations

import re
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec.model.exit_heads import ExitHeads
from tests.target import Target

EOS = 2
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": EOS,  # padding by the end-of-text token, as most checkpoints have it
    "tie_word_embeddings": False,  # a tiny model with tied embeddings repeats its input
}
TWO_KINDS = ["sliding_attention", "full_attention"] * 2
FAMILIES = {  # what a tiny model of the family needs beyond SMALL; sliding windows are shorter than the prompts
    "llama": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": {"head_dim": 8, "sliding_window": 5, "layer_types": TWO_KINDS},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "layer_types": TWO_KINDS, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": TWO_KINDS},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "starcoder2": {"sliding_window": 5},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": {},
    "cohere2": {"sliding_window": 5, "layer_types": TWO_KINDS},
    "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 5, "layer_types": TWO_KINDS},
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": TWO_KINDS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 64,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "phi": {},
    "stablelm": {},
    "nemotron": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}

GROUPED = {
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
}  # experts by grouped products: on a device bfloat16 alone in graphs
EAGER_ONLY = {"gemma2", "gpt_oss"}  # soft-capping and sinks: transformers has them in its eager attention alone
SHARED = []  # models that stay as they are
POST_NORMED = {"olmo2", "exaone4", "glm4", "gemma2", "gemma3_text"}  # a norm after each sublayer sets its size


def build(family, attn=None, seed=0, **overrides):
    """A fresh tiny model, with transformers' own attention; `tiny` shares one between tests."""
    attn = attn or ("eager" if family in EAGER_ONLY else "sdpa")
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(family, name, parameter)
    return model


def rounded(model):
    """The model with bfloat16 numbers for weights, in its own dtype: as a checkpoint is after loading."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@cache
def tiny(family, attn=None, seed=0, backend="auto"):
    """A tiny target, shared: nothing that decodes may change it, so that what its model generates is kept, too."""
    target = Target(build(family, attn, seed), backend=backend)
    SHARED.append(target.model)
    return target


def _fill(family, name, parameter):
    """Later layers add less than early ones, so that every exit is right now and then."""
    layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    size = 1.0 if layer is None else (1.5, 1.0, 0.6, 0.4)[min(3, int(layer[1]))]
    noise = torch.randn_like(parameter)
    if parameter.dim() == 1:
        centre = 1.0 if name.endswith("weight") else 0.0
        if family in POST_NORMED and "post_" in name:
            centre *= size / 2
        if family.startswith("gemma"):  # its norms multiply by 1 + weight
            centre -= 1.0
        parameter.copy_(noise * 0.1 + centre)
    elif layer is not None:
        parameter.copy_(noise * size * parameter.shape[-1] ** -0.5)
    else:
        scaled = family.startswith("gemma") and "embed" in name  # by the square root of the width
        parameter.copy_(noise * (0.2 if scaled else 1.0))


def some_heads(layers=(1, 3), width=32, inner=5, seed=0):
    """Random exit heads of a tiny model, which change its early picks."""
    heads = ExitHeads(layers, width, inner).requires_grad_(False)
    torch.manual_seed(seed)
    for head in heads.heads.values():
        head.down.normal_(0, 0.5)
    return heads
