"""From a checkpoint to a model folder: weights, tokenizer, best exit, table of the losses."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from train.backbone import find_parts, plain_model
from train.config import TrainConfig
from train.models import load_trained

MOST_DRAFT_TOKENS = 8


def export_model(config: TrainConfig, checkpoint: Path, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Write the model and its tokenizer to `folder`; return it in float32 with the written values.

    Weights are written in bfloat16: a whole model, or adapters that are not merged, as a PEFT folder.
    """
    model = load_trained(config, checkpoint)
    if plain_model(model) is model:
        model = model.to(torch.bfloat16)
        model.config.use_cache = True
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.bfloat16)
    if not config.model.base:
        end = tokenizer.eos_token_id
        model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _plain_tokenizer_config(folder / "tokenizer_config.json", is_own=not config.model.base)
    return model.float().eval()


def store_exit(model: nn.Module, folder: Path, exit_layer: int, num_speculative_tokens: int) -> None:
    """Write selfspec's default exit layer and draft length into the folder's generation_config.json."""
    settings = plain_model(model).generation_config
    settings.exit_layer, settings.num_speculative_tokens = exit_layer, num_speculative_tokens
    settings._from_model_config = False  # else loading derives it from the model config
    settings.save_pretrained(folder)


def best_exit(model: nn.Module, agreement: Sequence[float]) -> tuple[int, int]:
    """Return the exit layer and draft length with the most tokens per weight read (arXiv 2504.05598, section 3).

    A round with exit layer l and d drafted tokens runs l layers and the head d times, and the whole model once. It
    emits 1 + a + ... + a^d tokens, where a in 0..1 is the exit's agreement with the last layer.
    """
    parts = find_parts(model)
    layer = sum(each.numel() for each in parts.layers.parameters()) / len(parts.layers)
    head = sum(each.numel() for each in parts.head.parameters())

    def tokens_per_weight(choice: tuple[int, int]) -> float:
        exit_layer, drafts = choice
        tokens = sum(agreement[exit_layer - 1] ** power for power in range(drafts + 1))
        return tokens / (drafts * (exit_layer * layer + head) + len(parts.layers) * layer + head)

    exits, lengths = range(1, len(parts.layers)), range(1, MOST_DRAFT_TOKENS + 1)
    return max(((number, drafts) for number in exits for drafts in lengths), key=tokens_per_weight)


def _plain_tokenizer_config(path: Path, is_own: bool) -> None:
    """Set a tokenizer class that all releases of transformers know, and drop keys about how it was loaded.

    A base model's tokenizer with a class of its own does not change.
    """
    settings = json.loads(path.read_text("utf-8"))
    if not is_own and settings.get("tokenizer_class") != "TokenizersBackend":
        return
    kept = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only", "backend")}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def read_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the log entries of a checkpoint."""
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    return [entry for entry in state["log_history"] if "learning_rate" in entry]


def write_curve(history: list[dict[str, Any]], path: Path) -> None:
    """Save the loss of every exit over the steps of the run as CSV."""
    exits = {key for entry in history for key in entry if key.startswith("loss_exit_")}
    columns = ["step", "learning_rate", *sorted(exits, key=lambda key: int(key.removeprefix("loss_exit_")))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
