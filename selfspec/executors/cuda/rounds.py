"""`RecordedRounds`: rounds of a batch from one recording, launched without waiting for their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from selfspec.executors.cuda.graphs import Recorded
from selfspec.executors.cuda.round_inputs import MAX_IN_FLIGHT, RoundInputs, RowResult, read_record
from selfspec.model.kv_cache import tensor_of


class RecordedRounds:
    """Rounds of a batch, each of which continues where the one before ended: the device itself advances the rows.

    A row that has ended, by a token or by its length, is an empty slot in later rounds.

    Args:
        made: the recording; its inputs hold the first round's rows.
        lock: held while a round is launched, since recordings share memory.
        num_rows: rows of the batch.
        reports_confidence: whether results have confidences.
        max_rounds: rounds that the recording has capacity for.
    """

    def __init__(
        self,
        made: Recorded[RoundInputs],
        lock: AbstractContextManager[Any],
        num_rows: int,
        reports_confidence: bool,
        max_rounds: int,
    ) -> None:
        self._made, self._lock, self._num_rows = made, lock, num_rows
        self._reports_confidence, self.max_rounds = reports_confidence, max_rounds
        self._in_flight: deque[int] = deque()

    @property
    def num_in_flight(self) -> int:
        """Rounds that were launched and not taken, at most `MAX_IN_FLIGHT`."""
        return len(self._in_flight)

    @torch.inference_mode()
    def launch(self, kept: Sequence[int] = ()) -> Tensor | None:
        """Launch the next round, without waiting for the device.

        Args:
            kept: indices of rows.

        Returns:
            of K such rows, the last hidden states at all of their W places, `[K, W, hidden_size]`; None for no rows.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT
        with self._lock:
            self._made.recording.replay()
            record, hidden = self._made.recording.outputs
            self._in_flight.append(self._made.inputs.records.send(record))
            if not kept:
                return None
            return hidden.unflatten(0, (-1, self._made.inputs.key.width))[tensor_of([*kept], hidden.device)]

    @torch.inference_mode()
    def take(self) -> list[RowResult]:
        """Wait for the earliest round in flight, and return its results, one per row."""
        record = self._made.inputs.records.wait(self._in_flight.popleft())
        return read_record(record, self._num_rows, self._made.inputs.key, self._reports_confidence)
