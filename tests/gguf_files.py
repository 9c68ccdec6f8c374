"""Tiny GGUF files, written with the `gguf` package: random models, and a tokenizer of bytes with two merges."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.cli_fixtures import TEMPLATE

END = 256  # the id of the end-of-text token
NAMES = {"gemma3_text": "gemma3"}  # of architectures, where they are not the model's
PERMUTED = {"llama", "granite", "smollm3"}  # architectures whose queries and keys are in another order


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
    config = AutoConfig.for_model(family, **{**sizes, **heads, "vocab_size": 259, **options})
    return AutoModelForCausalLM.from_config(config).eval()


def write_gguf(
    file,
    model,
    kind="F32",
    *,
    architecture=None,
    tokenizer=True,
    without=(),
    kinds=None,
    rope=None,
    keys=None,
    tensors=None,
):
    """Write the model to `file`, its matrices in blocks of one `kind`.

    Args:
        without: names of tensors that are left out.
        kinds: the kind of single tensors, by their name in the file.
        rope: values of keys, without "<architecture>.rope.".
        keys: values of further keys.
        tensors: further tensors in float32, by name.
    """
    import gguf

    config = model.config
    own = NAMES.get(config.model_type, config.model_type)
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
    ropes = config.rope_parameters
    writer.add_rope_freq_base(float((ropes if "rope_theta" in ropes else ropes["full_attention"])["rope_theta"]))
    if own in ("gemma2", "gemma3", "qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if own in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if own == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if own == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in {
        **{f"{architecture}.rope.{key}": one for key, one in (rope or {}).items()},
        **(keys or {}),
    }.items():
        _add_key(writer, key, value)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer)
    for name, weight in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        values, short = _as_llama_cpp(name, weight.detach(), config).numpy(), f"{names.get_name(stem)}.{suffix}"
        blocks = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else (kinds or {}).get(short, kind)]
        if short not in without:
            writer.add_tensor(short, _quantized(values, blocks), raw_dtype=blocks)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
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


def _add_key(writer, key, value):
    {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)


def write_vocabulary(file, source, *, kind="gpt2", pre="default", keys=None, templates=(), space_prefix=True):
    """Write a model of one tiny layer with the vocabulary of another file.

    Args:
        source: a `GgufFile` with byte-level BPE; None: a small vocabulary of SentencePiece's kind.
        keys: values of further keys.
        templates: names of further chat templates.
    """
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    if source is None:
        words = ["th", "he", "▁t", "▁th", "▁the", "er", "ot", "▁o", "other", "in", "▁▁", "▁▁▁▁", "\n", "日", "é"]
        letters = [*map(chr, range(33, 127)), "▁"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words))]
        order = {token: -float(place) for place, token in enumerate([*words, *letters])}
        writer.add_token_scores([order.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(space_prefix)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        tokens, types = source.metadata["tokenizer.ggml.tokens"], source.metadata["tokenizer.ggml.token_type"].tolist()
        writer.add_token_merges(source.metadata["tokenizer.ggml.merges"])
        writer.add_tokenizer_pre(pre)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_chat_template("plain")
    if templates:
        writer.add_array("tokenizer.chat_templates", list(templates))
    for key, value in (keys or {}).items():
        _add_key(writer, key, value)
    sizes = {"block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32}
    for key, value in {
        **sizes,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 32,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
    if config.model_type.startswith("gemma") and "norm" in name:
        return weight + 1
    if config.model_type not in PERMUTED:
        return weight
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
