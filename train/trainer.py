"""transformers' Trainer with early-exit losses, layer dropout, and a fixed order of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from train.backbone import find_parts
from train.callbacks import HeldOut
from train.checkpoints import check_finite, checkpoint_folder, describe_remaining
from train.clock import SECONDS, Clock
from train.config import TrainConfig
from train.errors import RunFailed
from train.optim import MuonWithAdamW, plain_adamw, warmup_stable_decay
from train.recipe import EarlyExitLoss, LayerDropout


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """Translate a TrainConfig into transformers' TrainingArguments."""
    run = config.run
    return TrainingArguments(
        output_dir=run.output,
        max_steps=run.max_steps,
        per_device_train_batch_size=1,  # one item of the data set is a whole batch
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        max_grad_norm=config.optim.max_grad_norm,
        logging_steps=run.log_steps,
        save_steps=run.save_steps,
        seed=run.seed,
        data_seed=run.seed,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        label_names=["labels"],
        logging_nan_inf_filter=False,  # a loss that is not finite ends the run
        disable_tqdm=True,
    )


def collate(items: list[Tensor]) -> dict[str, Tensor]:
    """Unpack a batch: tokens `[rows, length]`, or tokens and labels `[2, rows, length]`."""
    batch = items[0]
    return {"input_ids": batch} if batch.ndim == 2 else {"input_ids": batch[0], "labels": batch[1]}


class EarlyExitTrainer(Trainer):
    """Trains with LayerSkip's loss (arXiv 2404.16710) on one device; the model's class does not change."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, train_dataset: Dataset[Tensor], clock: Clock, **kwargs: Any
    ) -> None:
        super().__init__(
            model, training_arguments(config), data_collator=collate, train_dataset=train_dataset, **kwargs
        )
        self.remove_callback(PrinterCallback)  # replaced by Progress
        self.add_callback(clock)
        self.config, self.windows, self.clock = config, train_dataset, clock
        self.model_accepts_loss_kwargs = False  # losses are means, divided by the accumulation steps
        layers = find_parts(model).layers
        has_labels = config.data.path or config.text.num_texts  # then the number of rows varies
        self.exit_loss = EarlyExitLoss(config.exits, len(layers), config.run.compile and not has_labels)
        LayerDropout(layers, config.exits.dropout_max)
        self.step_losses: dict[int, list[Tensor]] = {}
        self.unfinished: Path | None = None
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, HeldOut):
                callback.log = super().log

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        step = self.state.global_step
        tokens, own = inputs["input_ids"], self.accelerator.unwrap_model(model)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.run.bf16):
            loss, losses = self.exit_loss(own, tokens, step, inputs.get("labels"))
        for number, value in losses.items():
            self.step_losses.setdefault(number, []).append(value)
        return (loss, losses) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not bool(loss.isfinite()):
            remaining = describe_remaining(self.config.run.output)
            step = self.state.global_step + 1
            raise RunFailed(f"the loss is {float(loss)} at step {step}; {remaining}, with a lower rate or other data")
        return loss

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.unfinished or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        check_finite(model, step, self.config.run.output)
        try:
            with checkpoint_folder(self.config, step) as self.unfinished:
                super()._save_checkpoint(model, trial)
        finally:
            self.unfinished = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for number in sorted(self.step_losses):
                values = self.step_losses[number]
                logs[f"loss_exit_{number}"] = round(float(torch.stack(values).mean()), 4)
            self.step_losses.clear()
            logs[SECONDS] = round(self.clock.elapsed, 1)
        super().log(logs, start_time)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            assert self.model is not None  # given to __init__
            make = MuonWithAdamW if self.config.optim.kind == "muon" else plain_adamw
            self.optimizer = make(self.model, self.config.optim)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            optim = self.config.optim

            def factor(step: int) -> float:
                return warmup_stable_decay(step, self.clock.progress(step), optim.warmup_steps, optim.decay_fraction)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.create_optimizer(), factor)
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Dataset[Tensor] | None = None) -> SequentialSampler:
        return SequentialSampler(self.windows)  # type: ignore[arg-type]  # it has a length
