"""The initial model of a run: an untrained one, or a folder or hub id, with or without low-rank adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from selfspec.loading import hub
from train import attention
from train.backbone import check_backbone, find_parts
from train.config import TrainConfig


def build_model(config: TrainConfig, end_of_text: int) -> LlamaForCausalLM:
    """Make an untrained Llama of the configured shape, with random weights by `run.seed`."""
    set_seed(config.run.seed)
    shape = config.model
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=None,
        )
    )


def load_base(config: TrainConfig) -> Any:
    """Load `model.base`, and check that the configuration fits it.

    Raises:
        ValueError: there is no such model, it does not have Llama's structure, or a key is out of its range.
    """
    name = config.model.base
    try:
        model = _open(name, config.model.dtype)
    except Exception as error:  # the hub, the network and every format have errors of their own
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.base must be a folder with a model, a .gguf file, smollm2 or a hub id, and {name!r} cannot be "
            f"loaded ({reason}); "
            "check the path, or the name and your access"
        ) from error
    check_backbone(model)
    positions = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    config.check_fits(len(find_parts(model).layers), positions)
    return model


def _open(name: str, dtype: str) -> Any:
    """A model by the names that `selfspec.LLM` knows, on the CPU."""
    return hub.open_model(name, dtype=dtype, device="cpu")[0]


def add_adapters(model: Any, config: TrainConfig) -> Any:
    """Add low-rank adapters to a model, initialised by `run.seed`; only they are trained.

    Raises:
        ValueError: peft finds none of the modules, or is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora needs the package peft; pip install peft") from error
    lora = config.lora
    set_seed(config.run.seed)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, so a fraction is fine
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ValueError(
            f"lora.target_modules must be names of linear modules in the layers, got {list(lora.target_modules)}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def start_model(config: TrainConfig, end_of_text: int) -> nn.Module:
    """Make the initial model of a run."""
    if config.model.base:
        model = load_base(config)
    else:
        model = build_model(config, end_of_text)
        model.set_attn_implementation(attention.register())
    if config.lora.rank:
        model = add_adapters(model, config)
    set_seed(config.run.seed)
    if config.run.gradient_checkpointing:
        checkpoint_layers(model)
    if config.run.compile:
        for layer in find_parts(model).layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)  # one compilation serves all layers
    return model


def checkpoint_layers(model: Any) -> None:
    """Turn on gradient checkpointing."""
    settings = {"use_reentrant": False}  # reentrant checkpointing gives no gradients below frozen embeddings
    if hasattr(model, "activation_checkpointing_enable"):  # the name from transformers 5.23 on
        model.activation_checkpointing_enable(settings)
    else:
        model.gradient_checkpointing_enable(settings)


def load_trained(config: TrainConfig, checkpoint: Path) -> Any:
    """Load the model of a checkpoint in float32; with `lora.merge`, adapters are merged into the weights."""
    if not config.lora.rank:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    import peft

    base = _open(config.model.base, "float32")
    model = peft.PeftModel.from_pretrained(base, checkpoint)
    return (model.merge_and_unload() if config.lora.merge else model).eval()
