"""What early exits cost in training: tokens per second with and without them, measured in turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from train.config import TrainConfig
from train.material import gather, make_windows
from train.run import make_trainer
from train.trainer import EarlyExitTrainer, collate


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """Median tokens per second of the recipe, of the same without early exits and dropout, and their ratio.

    The ratio is the median over rounds of each round's own ratio; low and high are its smallest and largest value.
    """

    recipe: float
    plain: float
    ratio: float
    low: float
    high: float
    rounds: int


def without_exits(config: TrainConfig) -> TrainConfig:
    """Return the same training with the last layer's loss alone and no layer dropout."""
    exits = dataclasses.replace(config.exits, curriculum="rotational", scale=0.0, distill=0.0, dropout_max=0.0)
    return dataclasses.replace(config, exits=exits)


def measure_throughput(config: TrainConfig, rounds: int = 10, steps: int = 0) -> Throughput:
    """Train both a few steps in turns, so that what else the machine does falls on both alike; nothing is saved.

    Every turn has `steps` steps, by default so many that every window length and every exit has its share. A gradual
    curriculum is measured in the middle of its run, where all exits are on.
    """
    material = gather(config)
    pair = []
    for each in (config, without_exits(config)):
        trainer = make_trainer(each, material, make_windows(config, material))
        trainer.create_optimizer_and_scheduler(config.run.max_steps)
        trainer.state.max_steps = config.run.max_steps
        trainer.state.global_step = config.run.max_steps // 2 if config.exits.curriculum == "gradual" else 0
        trainer.current_gradient_accumulation_steps = 1
        pair.append(trainer)
    steps = steps or max(len(config.run.windows), config.exits.period)
    rates: list[tuple[float, float]] = []
    for turn in range(rounds + 1):
        order = pair if turn % 2 else pair[::-1]  # neither always follows the other
        seconds = {id(trainer): timed(trainer, turn * steps, steps) for trainer in order}
        tokens = steps * config.run.tokens_per_batch
        if turn:  # the first turn warms up
            rates.append((tokens / seconds[id(pair[0])], tokens / seconds[id(pair[1])]))
    ratios = [recipe / plain for recipe, plain in rates]
    recipe, plain = (statistics.median(rate[side] for rate in rates) for side in (0, 1))
    return Throughput(recipe, plain, statistics.median(ratios), min(ratios), max(ratios), rounds)


def timed(trainer: EarlyExitTrainer, first: int, steps: int) -> float:
    """Return the seconds that forward, backward and update of some steps take, data and gradients' norm included."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    num_batches = len(trainer.windows)  # type: ignore[arg-type]
    begin = time.perf_counter()
    for step in range(first, first + steps):
        trainer.training_step(model, collate([trainer.windows[step % num_batches]]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        trainer.state.global_step += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    trainer.recent.clear()
    return time.perf_counter() - begin
