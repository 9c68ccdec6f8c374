"""A training run, from a configuration to the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from train.agreement import held_out_windows
from train.callbacks import HeldOut, Progress
from train.checkpoints import checkpoint_to_resume
from train.config import TrainConfig
from train.material import Material, gather, make_windows
from train.models import start_model
from train.trainer import EarlyExitTrainer


def make_trainer(config: TrainConfig, material: Material, windows: Dataset[Tensor] | None = None) -> EarlyExitTrainer:
    """Make the Trainer of a run.

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
    callbacks = [
        Progress(run.tokens_per_batch * run.gradient_accumulation_steps),
        HeldOut(held_out, config.eval.every_steps),
    ]
    return EarlyExitTrainer(model, config, windows, processing_class=material.tokenizer, callbacks=callbacks)


def train(config: TrainConfig, resume: bool = False) -> EarlyExitTrainer:
    """Run a training to its end. The last checkpoint in `run.output` is the result.

    Raises:
        ValueError: bad data or settings, or no checkpoint of this configuration to resume from.
        RunFailed: the loss is not finite, or a checkpoint cannot be written.
    """
    checkpoint = checkpoint_to_resume(config) if resume else None
    material = gather(config)
    Path(config.run.output).mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(config, material)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer
