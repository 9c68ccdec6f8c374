"""Reads checkpoints by transformers, with one-sentence errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selfspec.errors import UnsupportedModelError

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def read_model(source: str, name: str, dtype: torch.dtype | str) -> nn.Module:
    """Read the causal LM of `source`, a folder or hub id; `name` stands for it in errors."""
    options: dict[str, Any] = {"local_files_only": Path(source).is_dir(), "trust_remote_code": False}
    config = _read_config(source, name, options)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as problem:
        raise OSError(
            f"{name}: a safetensors file is truncated or damaged ({in_brief(problem)}); copy or download it again"
        ) from problem
    except Exception as problem:
        raise OSError(f"{name}: its weights cannot be loaded ({in_brief(problem)})") from problem
    check_complete(report, name)
    return model


def check_complete(report: dict[str, Any], name: str) -> None:
    """Raise OSError where weights are missing or have wrong shapes; transformers would fill them with random numbers.

    Args:
        report: the loading info of `from_pretrained`.
    """
    wrong = [*sorted(report["missing_keys"]), *(key for key, *_ in sorted(report["mismatched_keys"]))]
    if wrong:
        raise OSError(
            f"{name}: {len(wrong)} weights of its config are missing from the checkpoint or have wrong shapes "
            f"(the first is {wrong[0]}); copy or download it again"
        )


def _read_config(source: str, name: str, options: dict[str, Any]) -> Any:
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{name} holds a PEFT adapter; give its base model, and this folder as the adapter")
        raise FileNotFoundError(f"{name} holds no config.json; give a folder that save_pretrained() wrote")
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(source, **options)
    except Exception as problem:
        raise OSError(f"{name}: its config.json cannot be read ({in_brief(problem)})") from problem
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(_unknown(name, kind, own_code="auto_map" in raw))
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as problem:
        raise OSError(f"{name}: its config.json is not valid ({in_brief(problem)})") from problem
    check_writes_text(config, name)
    return config


def check_writes_text(config: Any, name: str) -> None:
    """Raise UnsupportedModelError unless it is the config of a causal LM."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{name}: {config.model_type} is no causal language model; give a model that writes text"
        )


def _unknown(name: str, kind: str | None, own_code: bool) -> str:
    if own_code:
        return (
            f"{name}: {kind} needs code from its own repository, which is not run; load it with transformers "
            "(trust_remote_code=True) and pass the model object to selfspec.LLM"
        )
    if kind is None:
        return f"{name}: its config.json names no model_type; give a folder that save_pretrained() wrote"
    return (
        f"{name}: transformers {transformers.__version__} knows no architecture {kind!r}; "
        "update transformers or choose another model"
    )


def read_tokenizer(source: str, name: str) -> Any:
    """Read the tokenizer of `source`; None for a folder without one."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=folder.is_dir(), trust_remote_code=False)
    except Exception as problem:
        raise OSError(f"{name}: its tokenizer cannot be read ({in_brief(problem)})") from problem


def read_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Add a PEFT adapter to a model."""
    if not (folder / "adapter_config.json").is_file():
        what = "no adapter_config.json" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"adapter {folder}: {what}; give a folder that a PEFT model's save_pretrained() wrote")
    try:
        from peft import PeftModel
    except ImportError as problem:
        raise ImportError("adapter needs the package peft; install it with: pip install peft") from problem
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except Exception as problem:
        raise OSError(f"adapter {folder} does not fit this model ({in_brief(problem)})") from problem


def in_brief(problem: Exception) -> str:
    """The message of an exception on one line, at most 200 characters long."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text.rstrip(".:") if len(text) <= 200 else text[:199].rstrip() + "…"
