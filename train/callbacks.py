"""Messages during a run: progress, remaining time, and the quality of every exit on held-out text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.agreement import held_out_scores
from train.clock import Clock


class Progress(TrainerCallback):
    """Prints a line per logging step: step, learning rate, tokens per second, remaining time, loss of every exit."""

    def __init__(self, tokens_per_step: int, clock: Clock) -> None:
        self.tokens_per_step, self.clock = tokens_per_step, clock
        self.last_step, self.last_time = 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.last_step, self.last_time = state.global_step, time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "learning_rate" not in logs:
            return
        now = time.perf_counter()
        steps, seconds = max(1, state.global_step - self.last_step), now - self.last_time
        self.last_step, self.last_time = state.global_step, now
        left = min((state.max_steps - state.global_step) * seconds / steps, self.clock.left)
        print(
            f"step {state.global_step}/{state.max_steps}  lr {logs['learning_rate']:.2e}  "
            f"{steps * self.tokens_per_step / seconds:.0f} tokens/s  {left / 60:.1f} min left  "
            f"loss by exit {by_exit(logs, 'loss_exit_')}",
            flush=True,
        )


class HeldOut(TrainerCallback):
    """Measures loss and agreement of every exit on the same held-out windows, every `every` steps.

    windows: tokens `[N, T]`, or tokens and labels `[2, N, T]`. Results go to `log`, which the Trainer sets.
    """

    def __init__(self, windows: Tensor, every: int) -> None:
        self.windows, self.every = windows, every
        self.log: Callable[[dict[str, float]], None] | None = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        assert model is not None and self.log is not None  # set by the Trainer
        losses, agreement, _ = held_out_scores(model, self.windows.to(args.device))
        entry = {f"held_out_exit_{number}": round(loss, 4) for number, loss in enumerate(losses, start=1)}
        entry |= {f"held_out_agreement_{number}": round(share, 4) for number, share in enumerate(agreement, start=1)}
        due = control.should_log
        self.log(dict(entry))
        control.should_log = due  # `log` resets it
        print(f"step {state.global_step}  held-out loss by exit {by_exit(entry, 'held_out_exit_')}", flush=True)
        print(f"step {state.global_step}  agreement by exit {by_exit(entry, 'held_out_agreement_')}", flush=True)


def by_exit(values: dict[str, float], prefix: str) -> str:
    """Format the entries with a prefix as `exit:value` pairs."""
    chosen = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    return " ".join(f"{number}:{value:.2f}" for number, value in chosen.items())
