"""What a model's card says of its quality, and the same of the model that it is continued from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from torch import nn

from selfspec.files import write_whole
from train.agreement import ExitQuality, exit_agreement, held_out_scores, held_out_windows
from train.config import TrainConfig
from train.configuration import as_plain
from train.material import Material
from train.models import load_base

BASE_QUALITY = "base_quality.json"  # in run.output


def measure(model: nn.Module, material: Material, config: TrainConfig) -> ExitQuality:
    """Measure a model on held-out texts."""
    wanted, device = config.eval, next(model.parameters()).device
    windows = held_out_windows(material.held_out, wanted.window, wanted.num_windows).to(device)
    if material.prompts:
        prompts = list(material.prompts[: wanted.num_prompts])
    else:
        cut = held_out_windows(material.held_out, wanted.prompt_tokens, wanted.num_prompts)
        prompts = (cut[0] if cut.ndim == 3 else cut).tolist()
    agreement, counted = exit_agreement(model, prompts, wanted.new_tokens, wanted.batch_size)
    losses, _, loss_tokens = held_out_scores(model, windows)
    return ExitQuality(losses, agreement, loss_tokens, counted)


def base_quality(config: TrainConfig, material: Material) -> ExitQuality | None:
    """Return the quality of `model.base` on the same texts; it is measured once for a run. None without a base.

    Raises:
        ValueError: it was not measured yet and cannot be loaded.
    """
    if not config.model.base:
        return None
    file, settings = Path(config.run.output) / BASE_QUALITY, as_plain(config)
    about = {name: settings[name] for name in ("corpus", "data", "text", "model", "eval")}
    if file.is_file():
        saved = json.loads(file.read_text("utf-8"))
        if saved["about"] == about:
            values = {name: tuple(each) if isinstance(each, list) else each for name, each in saved["quality"].items()}
            return ExitQuality(**values)
    base = load_base(config).float().eval()
    quality = measure(base.cuda() if torch.cuda.is_available() else base, material, config)
    content = json.dumps({"about": about, "quality": dataclasses.asdict(quality)})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lambda stream: stream.write(content.encode()))
    return quality
