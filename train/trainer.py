"""transformers' Trainer with the early-exit loss, layer dropout, and fixed batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from train.config import TrainConfig
from train.data import Windows
from train.optim import MuonWithAdamW, warmup_stable_decay
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
        save_total_limit=3,
        seed=run.seed,
        data_seed=run.seed,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )


def collate(items: list[Tensor]) -> dict[str, Tensor]:
    """Unwrap the one ready batch `[rows, length]`."""
    return {"input_ids": items[0]}


class EarlyExitTrainer(Trainer):
    """Train with LayerSkip's loss (arXiv 2404.16710); the model stays an ordinary transformers model. One device."""

    def __init__(self, model: LlamaForCausalLM, config: TrainConfig, train_dataset: Windows, **kwargs: Any) -> None:
        super().__init__(
            model, training_arguments(config), data_collator=collate, train_dataset=train_dataset, **kwargs
        )
        self.config, self.windows = config, train_dataset
        self.model_accepts_loss_kwargs = False  # losses are means, divided by the accumulation steps
        self.exit_loss = EarlyExitLoss(config.exits, config.model.num_hidden_layers, config.run.compile)
        self.dropout = LayerDropout(model.model.layers, config.exits.dropout_max)
        self.recent: dict[int, list[Tensor]] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        step = self.state.global_step
        self.dropout.progress = step / self.state.max_steps if self.config.exits.dropout_ramp else 1.0
        tokens = inputs["input_ids"]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.run.bf16):
            loss, losses = self.exit_loss(self.accelerator.unwrap_model(model), tokens, step)
        for number, value in losses.items():
            self.recent.setdefault(number, []).append(value)
        return (loss, losses) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for number in sorted(self.recent):
                values = self.recent[number]
                logs[f"loss_exit_{number}"] = round(float(torch.stack(values).mean()), 4)
            self.recent.clear()
        super().log(logs, start_time)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            assert self.model is not None  # given to __init__
            self.optimizer = MuonWithAdamW(self.model, self.config.optim)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            optim = self.config.optim

            def factor(step: int) -> float:
                return warmup_stable_decay(step, num_training_steps, optim.warmup_steps, optim.decay_fraction)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.create_optimizer(), factor)
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Dataset[Tensor] | None = None) -> SequentialSampler:
        return SequentialSampler(self.windows)
