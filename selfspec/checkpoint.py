"""Reads a checkpoint through transformers, and says in one sentence what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selfspec.errors import UnsupportedModelError


def read_model(source: str, name: str, dtype: torch.dtype | str, local_only: bool) -> nn.Module:
    """The causal LM in `source`, a folder or hub id; `name` is what the caller called it."""
    options: dict[str, Any] = {"local_files_only": local_only, "trust_remote_code": False}
    config = _read_config(source, name, options)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except SafetensorError as problem:
        raise OSError(
            f"{name}: a safetensors file is truncated or damaged ({first_line(problem)}); copy or download it again"
        ) from problem
    except Exception as problem:
        raise OSError(f"{name}: its weights cannot be loaded ({first_line(problem)})") from problem
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise OSError(
            f"{name}: {len(missing)} weights that its config.json asks for are not in the checkpoint "
            f"(the first is {missing[0]}); copy or download it again"
        )
    return model  # type: ignore[no-any-return]


def _read_config(source: str, name: str, options: dict[str, Any]) -> Any:
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{name} holds a PEFT adapter; give its base model, and this folder as the adapter")
        raise FileNotFoundError(f"{name} holds no config.json; give a folder that save_pretrained() wrote")
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(source, **options)
    except Exception as problem:
        if not folder.is_dir() and options["local_files_only"]:
            raise FileNotFoundError(
                f"there is no folder {name}, and as a hub id it is neither on this machine nor can the Hugging Face hub be "
                "reached; check the name, connect and try again, or use the embedded model 'demo'"
            ) from problem
        raise OSError(f"{name}: its config.json cannot be read ({first_line(problem)})") from problem
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(_unknown(name, kind, own_code="auto_map" in raw))
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as problem:
        raise OSError(f"{name}: its config.json does not make sense ({first_line(problem)})") from problem
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{name}: {kind} is no causal language model; give a model that writes text")
    return config


def _unknown(name: str, kind: str | None, own_code: bool) -> str:
    if own_code:
        return (
            f"{name}: {kind} needs code from its own repository, which is not run; load it with transformers "
            "(trust_remote_code=True) and pass the model object to selfspec.load"
        )
    if kind is None:
        return f"{name}: its config.json names no model_type; give a folder that save_pretrained() wrote"
    return (
        f"{name}: transformers {transformers.__version__} knows no architecture {kind!r}; "
        "update transformers or choose another model"
    )


def read_tokenizer(source: str, name: str, local_only: bool, files: tuple[str, ...]) -> Any:
    """The tokenizer in `source`; None for a folder that holds none of `files` (glob patterns)."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local_only, trust_remote_code=False)
    except Exception as problem:
        raise OSError(f"{name}: its tokenizer cannot be read ({first_line(problem)})") from problem


def read_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model with a PEFT adapter around it."""
    if not (folder / "adapter_config.json").is_file():
        what = "no adapter_config.json" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"adapter {folder}: {what}; give a folder that a PEFT model's save_pretrained() wrote")
    try:
        from peft import PeftModel
    except ImportError as problem:
        raise ImportError("adapter needs the package peft; install it with: pip install peft") from problem
    try:
        return PeftModel.from_pretrained(model, str(folder))  # type: ignore[arg-type]
    except Exception as problem:
        raise OSError(f"adapter {folder} cannot be put on this model ({first_line(problem)})") from problem


def first_line(problem: Exception) -> str:
    """An exception in a few words, to stand in brackets within a sentence."""
    if isinstance(problem, json.JSONDecodeError):
        return f"not valid JSON: {problem}"
    text = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return text.rstrip(".:") if len(text) <= 200 else text[:199].rstrip() + "…"
