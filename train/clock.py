"""How far a run has come: by its steps, or by its time where that is limited."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SECONDS = "seconds"  # key of a log entry: time of training up to it


class Clock(TrainerCallback):
    """Ends a run after `seconds` of training, and tells its progress, which the schedules of a run follow.

    The time of a run that is resumed goes on from its last log entry, and it then has `seconds` more.
    """

    def __init__(self, max_steps: int, seconds: float = 0.0) -> None:
        self.max_steps, self.seconds = max_steps, seconds
        self._spent, self._begun = 0.0, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return self._spent + time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Seconds of training that are left; infinite without a limit."""
        return self._spent + self.seconds - self.elapsed if self.seconds else float("inf")

    def progress(self, step: int) -> float:
        """Progress in 0..1 before a 0-based step."""
        by_time = 1 - self.left / (self._spent + self.seconds) if self.seconds else 0.0
        return min(1.0, max(step / max(1, self.max_steps), by_time))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._spent = max((entry.get(SECONDS, 0.0) for entry in state.log_history), default=0.0)
        self._begun = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.left <= 0 and state.global_step < state.max_steps:
            print(f"step {state.global_step}  the time is over, so the run ends here", flush=True)
            control.should_training_stop = control.should_save = control.should_log = True
