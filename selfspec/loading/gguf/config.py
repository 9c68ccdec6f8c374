"""The config of a GGUF file's model, from its metadata alone. What is not known is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers

from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf.file import GgufFile

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of layers


@dataclass(frozen=True)
class Architecture:
    """How an architecture of GGUF files is read as a model of transformers."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further keys of the architecture, with the field of the config that each one sets."""
    permuted: bool = False
    """Whether the rows of queries and keys are in the order of a rotation of neighbouring numbers."""
    norm_offset: float = 0.0
    """What the file's weights of norms have added."""
    finish: Callable[[dict[str, Any], GgufFile], None] | None = None
    """Completes the fields of the config."""
    partial_rotary: bool = False
    """Whether a part of each head may be rotated."""


COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Keys that `_rope` and `_checked` read, and keys that only describe what the tensors show.
READ = {
    *("vocab_size", "attention.value_length", "rope.dimension_count", "tensor_data_layout", "attention.causal"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_ext_factor"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys that change nothing if they are zero, false or empty.
NEUTRAL_IF_ZERO = {
    *("expert_count", "expert_used_count", "nextn_predict_layers", "leading_dense_block_count", "pooling_type"),
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window", "attn_logit_softcapping"),
    *("final_logit_softcapping", "use_parallel_residual", "attention.shared_kv_layers"),
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
WINDOW = {"attention.sliding_window": "sliding_window"}


def _biased(fields: dict[str, Any], file: GgufFile) -> None:
    fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    fields["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors


def _gemma(fields: dict[str, Any], file: GgufFile) -> None:
    fields["hidden_activation"] = "gelu_pytorch_tanh"


def _gemma2(fields: dict[str, Any], file: GgufFile) -> None:
    _gemma(fields, file)
    fields["query_pre_attn_scalar"] = _query_scale(fields, layers_of_27b=46)
    fields.setdefault("sliding_window", 4096)
    fields["layer_types"] = [LOCAL if i % 2 == 0 else GLOBAL for i in range(fields["num_hidden_layers"])]


def _gemma3(fields: dict[str, Any], file: GgufFile) -> None:
    """Five layers of six attend within a window, and rotate by a base of their own, without scaling."""
    _gemma(fields, file)
    fields["query_pre_attn_scalar"] = _query_scale(fields, layers_of_27b=62)
    pattern = fields.pop("sliding_window_pattern", 6)
    count = fields["num_hidden_layers"]
    if isinstance(pattern, int):
        pattern = [(i + 1) % pattern != 0 for i in range(count)]
    fields["layer_types"] = [LOCAL if is_local else GLOBAL for is_local in pattern]
    local = {"rope_type": "default", "rope_theta": fields.pop("rope_local_base_freq", 10000.0)}
    fields["rope_parameters"] = {GLOBAL: fields["rope_parameters"], LOCAL: local}


def _query_scale(fields: Mapping[str, Any], layers_of_27b: int) -> float:
    """The square of the divisor of attention's scores: a head's size, but for the models of 27B parameters."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    return fields["hidden_size"] / fields["num_attention_heads"] if is_27b else fields["head_dim"]


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True, finish=_biased),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_offset=1.0, finish=_gemma),
    "gemma2": Architecture("gemma2", {**CAPS, **WINDOW}, norm_offset=1.0, finish=_gemma2),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **CAPS,
            **WINDOW,
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        norm_offset=1.0,
        finish=_gemma3,
    ),
    "phi3": Architecture("phi3", WINDOW, partial_rotary=True),
    "granite": Architecture("granite", SCALES, permuted=True, finish=_biased),
    "smollm3": Architecture("smollm3", permuted=True),
    "olmo2": Architecture("olmo2"),
}


def architecture_of(file: GgufFile) -> Architecture:
    """How a file's architecture is read; UnsupportedModelError for one that is not known."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise UnsupportedModelError(
            f"{file.name}: GGUF files of the architecture {file.architecture!r} are not supported; "
            f"choose one of {', '.join(ARCHITECTURES)}"
        )
    return known


def read_config(file: GgufFile) -> Any:
    """The transformers config of a GGUF file's model.

    The factors of a tensor rope_freqs.weight are not part of it; see `selfspec.loading.gguf.model`.

    Raises:
        UnsupportedModelError: an architecture, or a key that may change the result, is not known.
        OSError: a key is missing.
    """
    own = architecture_of(file)
    values = _values(file)
    _check_known(file, values, own)
    is_tied = "output.weight" not in file.tensors
    fields: dict[str, Any] = {"vocab_size": _vocab_size(file), "tie_word_embeddings": is_tied}
    for key, name in {**COMMON, **own.keys}.items():
        if key in values:
            fields[name] = _plain(file, key, values[key])
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"):
        if name not in fields:
            [key] = [key for key, field in COMMON.items() if field == name]
            raise OSError(f"{file.name} lacks the key {file.architecture}.{key}; convert it again")
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    fields["rope_parameters"] = _rope(file, values, fields)
    _check_sizes(file, values, fields, own)
    if own.finish is not None:
        own.finish(fields, file)
    for name in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        fields[f"{name}_token_id"] = None if token is None else int(token)
    pad = file.metadata.get("tokenizer.ggml.padding_token_id")
    fields["pad_token_id"] = None if pad is None or int(pad) >= fields["vocab_size"] else int(pad)
    made = transformers.AutoConfig.for_model(own.model_type, **fields)
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    made.architectures = [kind.__name__]
    return made


def _values(file: GgufFile) -> dict[str, Any]:
    """The keys of the file's own architecture, without its name."""
    start = file.architecture + "."
    return {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}


def _check_known(file: GgufFile, values: Mapping[str, Any], own: Architecture) -> None:
    for key, value in values.items():
        if key in COMMON or key in own.keys or key in READ:
            continue
        if key in NEUTRAL_IF_ZERO and not np.any(value):
            continue
        shown = list(value) if isinstance(value, np.ndarray | list) else value
        raise UnsupportedModelError(
            f"{file.name}: the key {file.architecture}.{key} = {str(shown)[:60]} is not supported and may change the "
            "result; choose another file"
        )


def _plain(file: GgufFile, key: str, value: Any) -> Any:
    """A number. Some files have one for every layer, which must be the same."""
    if not isinstance(value, np.ndarray | list):
        return value
    if key == "attention.sliding_window_pattern":
        return [bool(one) for one in value]
    if len({*list(value)}) != 1:
        raise UnsupportedModelError(
            f"{file.name}: {file.architecture}.{key} differs between layers, which is not supported; choose another one"
        )
    return value[0].item() if hasattr(value[0], "item") else value[0]


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise OSError(f"{file.name} has no tensor token_embd.weight; choose a file with a whole model")
    return embedding.shape[0]


def _check_sizes(file: GgufFile, values: Mapping[str, Any], fields: dict[str, Any], own: Architecture) -> None:
    head_dim, arch = fields["head_dim"], file.architecture
    if (values_size := values.get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{file.name}: {arch}.attention.value_length = {values_size} differs from the size of keys {head_dim}, "
            "which is not supported; choose another file"
        )
    if not values.get("attention.causal", True):
        raise UnsupportedModelError(f"{file.name}: {arch}.attention.causal is false; choose a model that writes text")
    rotated = int(values.get("rope.dimension_count", head_dim))
    if rotated != head_dim:
        if not own.partial_rotary:
            raise UnsupportedModelError(
                f"{file.name}: {arch}.rope.dimension_count = {rotated} of heads of {head_dim} is not supported; choose "
                "another file"
            )
        fields["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim


def _rope(file: GgufFile, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the config."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": float(fields.pop("rope_theta", 10000.0))}
    kind = str(values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none"))
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    original = int(values.get("rope.scaling.original_context_length", fields.get("max_position_embeddings", 0)))
    long, short = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is not None and short is not None:
        from selfspec.loading.gguf.model import numbers_of

        made |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        made |= {"long_factor": numbers_of(file, long).tolist(), "short_factor": numbers_of(file, short).tolist()}
        made |= {"factor": fields["max_position_embeddings"] / original}
        if "rope.scaling.attn_factor" in values:
            made["attention_factor"] = float(values["rope.scaling.attn_factor"])
        fields["original_max_position_embeddings"] = original
        return made
    if kind in ("none", "") or (kind == "linear" and factor in (0.0, 1.0)):
        return made
    if kind == "linear":
        return made | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        made |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        made |= {"beta_fast": float(values.get("rope.scaling.yarn_beta_fast", 32.0))}
        made |= {"beta_slow": float(values.get("rope.scaling.yarn_beta_slow", 1.0))}
        scale = values.get("rope.scaling.yarn_attn_factor", values.get("rope.scaling.attn_factor", 1.0))
        made["attention_factor"] = float(scale) * (1.0 + 0.1 * float(np.log(factor)))
        if float(values.get("rope.scaling.yarn_ext_factor", 1.0)) == 1.0:
            return made
    raise UnsupportedModelError(
        f"{file.name}: {file.architecture}.rope.scaling.type = {kind!r} with these parameters is not supported; choose "
        "another file"
    )
