"""From a training checkpoint to the folder that ships: bfloat16 weights, tokenizer, curve of the losses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM


def newest_checkpoint(output: str | Path) -> Path:
    """Return the newest checkpoint below a run's output folder.

    Raises:
        ValueError: there is none.
    """
    found = [path for path in Path(output).glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    if not found:
        raise ValueError(f"run.output {str(output)!r} holds no checkpoint; train first")
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]))


def export_model(checkpoint: Path, folder: Path) -> LlamaForCausalLM:
    """Write weights in bfloat16, configuration and tokenizer to `folder`; return the rounded model in float32."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.config.use_cache = True
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _plain_tokenizer_config(folder / "tokenizer_config.json")
    for path in folder.iterdir():
        path.chmod(0o644)
    return model.float().eval()


def _plain_tokenizer_config(path: Path) -> None:
    """Name the tokenizer class as every transformers release does, and drop how it happened to be loaded."""
    settings = json.loads(path.read_text("utf-8"))
    kept = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only", "backend")}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def read_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Return what was logged on the way to a checkpoint."""
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
