"""A training run, from a configuration to the last checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from train.agreement import held_out_windows
from train.callbacks import HeldOut, Progress
from train.chats import write_chats
from train.checkpoints import checkpoint_to_resume
from train.clock import Clock
from train.config import TrainConfig
from train.errors import RunFailed
from train.material import Material, gather, load_tokenizer, make_windows
from train.models import start_model
from train.quality import base_quality
from train.trainer import EarlyExitTrainer

TEXT_SHARE = 0.25  # of run.max_minutes that writing texts may take
EXPORT_SECONDS = 30.0  # of run.max_minutes that are kept for loading and writing


def make_trainer(
    config: TrainConfig, material: Material, windows: Dataset[Tensor] | None = None, seconds: float = 0.0
) -> EarlyExitTrainer:
    """Make the Trainer of a run, which ends after `seconds` of training if these are not 0.

    Raises:
        ValueError: model or data do not fit the configuration.
    """
    run = config.run
    windows = make_windows(config, material) if windows is None else windows
    model = start_model(config, material.tokenizer.eos_token_id)
    counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
    trained = sum(count for count, learns in counts if learns)
    print(f"model: {sum(count for count, _ in counts):,} parameters, {trained:,} of them trained", flush=True)
    held_out = held_out_windows(material.held_out, config.eval.window, config.eval.num_windows)
    clock = Clock(run.max_steps, seconds)
    callbacks = [
        Progress(run.tokens_per_batch * run.gradient_accumulation_steps, clock),
        HeldOut(held_out, config.eval.every_steps),
    ]
    return EarlyExitTrainer(model, config, windows, clock, processing_class=material.tokenizer, callbacks=callbacks)


def train(config: TrainConfig, resume: bool = False) -> EarlyExitTrainer:
    """Run a training to its end. The last checkpoint in `run.output` is the result.

    With `run.max_minutes`, training ends early enough to measure the model again in that time, counted from this call.

    Raises:
        ValueError: bad data or settings, or no checkpoint of this configuration to resume from.
        RunFailed: the loss is not finite, a checkpoint cannot be written, or `run.max_minutes` leaves no time.
    """
    begun, limit = time.monotonic(), 60 * config.run.max_minutes
    checkpoint = checkpoint_to_resume(config) if resume else None
    Path(config.run.output).mkdir(parents=True, exist_ok=True)
    if config.text.num_texts and not checkpoint:  # a run that is resumed keeps its data
        write_chats(config, load_tokenizer(config.model.base), TEXT_SHARE * limit)
    material = gather(config)
    measuring = time.monotonic()
    base_quality(config, material)
    now = time.monotonic()
    left = limit - (now - begun) - 1.2 * (now - measuring) - EXPORT_SECONDS if limit else 0.0
    if left < 0:
        raise RunFailed(
            f"run.max_minutes = {config.run.max_minutes:g} leaves no time to train, since texts and measuring took "
            f"{now - begun:.0f} s; raise it, or lower text.num_texts or the numbers in eval"
        )
    trainer = make_trainer(config, material, seconds=left)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer
