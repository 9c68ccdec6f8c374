"""Tiny GGUF files, written with the `gguf` package: a random Llama, and a tokenizer of bytes with two merges."""

from __future__ import annotations

import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli_fixtures import TEMPLATE

END = 256  # the id of the end-of-text token
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


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


def write_gguf(file, model, kind="F32", *, architecture="llama", tokenizer=True, without=()):
    """Write the model to `file`, its matrices in blocks of one `kind`.

    Args:
        without: names of tensors that are left out.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        values = _as_llama_cpp(name, weight, config).numpy()
        blocks = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        if (short := _name(name)) not in without:
            writer.add_tensor(short, gguf.quants.quantize(values, blocks), raw_dtype=blocks)
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


def _name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def _as_llama_cpp(name, weight, config):
    """llama.cpp rotates neighbouring values of a head, transformers those half a head apart: rows change places."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
