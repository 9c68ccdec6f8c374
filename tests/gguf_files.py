"""Tiny GGUF files, written with the `gguf` package: random models, and a tokenizer of bytes with two merges."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.cli_fixtures import TEMPLATE

END = 256  # the id of the end-of-text token
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def source_model(seed=0):
    """The model that is written: sizes are multiples of a block's 32 values."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 256}
    config = LlamaConfig(
        **sizes, vocab_size=259, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=END
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
        model.lm_head.weight[END] = 0.5 * model.lm_head.weight[0]  # never the likeliest
    return model


def family_model(family, seed=0, **options):
    """A model of another family; sizes are multiples of a block's 256 values, as K-quants want them."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": END}
    config = AutoConfig.for_model(family, **sizes, **heads, vocab_size=259, **options)
    return AutoModelForCausalLM.from_config(config).eval()


def write_gguf(file, model, kind="F32", *, architecture=None, tokenizer=True, without=(), kinds=None):
    """Write the model to `file`, its matrices in blocks of one `kind`.

    Args:
        without: names of tensors that are left out.
        kinds: the kind of single tensors, by their name in the file.
    """
    import gguf

    config = model.config
    own = ARCHITECTURES[config.model_type]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == own)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    architecture = architecture or own
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(getattr(config, "rope_theta", None) or 10000.0)
    if own == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer)
    for name, weight in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        values, short = _as_llama_cpp(name, weight.detach(), config).numpy(), f"{names.get_name(stem)}.{suffix}"
        blocks = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else (kinds or {}).get(short, kind)]
        if short not in without:
            writer.add_tensor(short, _quantized(values, blocks), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer):
    """256 bytes, the end of text, and two merges, "th" and "he"."""
    from gguf import TokenType

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "th", "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token == "<|end|>" else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(END)  # early versions of transformers want one
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _quantized(values, kind):
    """Values in blocks; random ones, with scales of about 0.002, of kinds that the package cannot write."""
    import gguf

    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // weights, size)
        blocks = np.random.default_rng(values.size).integers(0, 256, shape, np.uint8)
        scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
        for at in scales:
            scale = np.random.default_rng(at).uniform(0.001, 0.003, shape[:-1]).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)


def _as_llama_cpp(name, weight, config):
    """llama.cpp rotates neighbouring values of a head, transformers those half a head apart: rows change places."""
    if config.model_type == "gemma3_text" and "norm" in name:
        return weight + 1
    if config.model_type != "llama":
        return weight
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
