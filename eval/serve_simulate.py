"""A server in virtual time: arrivals, admission, prefill and programs as in the engine, at the seconds of a cost table.

Policies are the library's own (`plan`, `observe`); their rounds are replayed from traces. Decisions of a policy take no
virtual time. As in the server, tokens are delivered after a program. It ends after a thirtieth of a second; one with a
row's first token has one round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from eval.replay import PREFILL_CHUNK, Replayed, SimulatedRow, make, prefill, run_program
from eval.serve_load import Served, output_lengths
from eval.serve_synthetic import GPUS, gpu_costs, synthetic_traces
from eval.shapes import config_of
from eval.tasks import read_costs
from eval.traces import Trace, load
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.core import LOOKUP
from selfspec.decoding.checks import CheckedPolicy
from selfspec.decoding.engine import STREAM_SECONDS

if TYPE_CHECKING:
    from eval.serve import ServeConfig

POOL = 32  # different random outputs; requests share them


class Simulated:
    """Serves loads in virtual time, each by a new policy.

    Raises:
        ValueError: a file cannot be read, or costs and traces are of models of different depth.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        given = read_costs(config.costs) if config.costs else {}
        self.costs = next(iter(given.values())) if given else gpu_costs(config_of(config.shape), GPUS[config.gpu])
        self.prior, layers = None, self.costs.num_layers
        if config.traces:
            pool, self.prior = load(config.traces)
            if any(trace.num_layers != layers for trace in pool):
                raise ValueError(f"the costs are of {layers} layers, the traces {config.traces!r} of others")
        else:
            longest, (low, high) = config.output_tokens[1], config.prompt_tokens
            lengths = np.random.default_rng(config.seed).integers(low, high + 1, POOL)
            pool = [
                synthetic_traces(layers, 1, int(n), longest, config.acceptance, (config.seed, i))[0]
                for i, n in enumerate(lengths)
            ]
        lengths = output_lengths(config.num_requests, config.output_tokens, config.seed)
        self.traces = [pool[i % len(pool)].cut(n) for i, n in enumerate(lengths)]
        texts = config.traces or f"random outputs of acceptance {config.acceptance:g} at a quarter of the layers"
        self.title = (
            f"virtual time at the costs of {config.costs or f'{config.shape}, {config.gpu}, computed'}; {texts}"
        )

    def serve(self, policy: str, arrivals: Sequence[float]) -> list[Served]:
        """Serve the load once, after the uncounted requests."""
        config = self.config
        made = make(policy, self.costs, config.exit_layer or None, config.num_speculative_tokens or None, self.prior)
        one = SimulatedServer(made, self.costs, config.max_batch_size, config.max_cached_tokens)
        for trace in self.traces[: config.warmups]:
            one.serve([trace], [0.0])
        return one.serve(self.traces, arrivals)


class SimulatedServer:
    """Serves loads one after another with the same policy.

    Args:
        max_batch_size: rows decoded together.
        max_cached_tokens: a request waits until its prompt and output fit in; 0: no limit.
        prefill_chunk: most prompt tokens read between two programs.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        max_batch_size: int,
        max_cached_tokens: int = 0,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.costs, self.max_batch_size, self.prefill_chunk = costs, max_batch_size, prefill_chunk
        self.max_cached_tokens = max_cached_tokens or float("inf")
        self._checked = CheckedPolicy(policy, costs.num_layers)
        self._next_id = 0

    def serve(self, traces: Sequence[Trace], arrivals: Sequence[float]) -> list[Served]:
        """Serve a request per trace, which arrives after so many seconds; the results are in the traces' order.

        Raises:
            ValueError: a request exceeds `max_cached_tokens`.
        """
        first, self._next_id = self._next_id, self._next_id + len(traces)
        made = [SimulatedRow.of(first + i, trace) for i, trace in enumerate(traces)]
        if made and (largest := max(map(_cached, made))) > self.max_cached_tokens:
            raise ValueError(f"max_cached_tokens must hold every request, the largest needs {largest}")
        coming = deque(sorted(zip(arrivals, range(len(made)), strict=True)))
        waiting, rows, now = deque[SimulatedRow](), list[SimulatedRow](), 0.0
        times: dict[int, list[float]] = {row.sequence.seq_id: [] for row in made}
        while coming or waiting or rows:
            if not (waiting or rows):
                now = max(now, coming[0][0])
            while coming and coming[0][0] <= now:
                waiting.append(made[coming.popleft()[1]])
            self._admit(waiting, rows)
            self._checked.policy.set_waiting(len(waiting))
            before = [row.at for row in rows]
            now += self._step(rows)
            for row, at in zip(rows, before, strict=True):
                if row.at > at:
                    times[row.sequence.seq_id].append(now)
            rows = [row for row in rows if row.sequence.num_remaining]
        rooms = [(row.trace.prompt_length, row.at) for row in made]
        return [
            Served(sent, tuple(times[row.sequence.seq_id]), *counts)
            for sent, row, counts in zip(arrivals, made, rooms, strict=True)
        ]

    def _admit(self, waiting: deque[SimulatedRow], rows: list[SimulatedRow]) -> None:
        """First come, first served, while there is a place and room for all tokens, as `Scheduler.admitted` does."""
        while waiting and len(rows) < self.max_batch_size:
            if sum(map(_cached, rows)) + _cached(waiting[0]) > self.max_cached_tokens:
                return
            rows.append(waiting.popleft())

    def _step(self, rows: Sequence[SimulatedRow]) -> float:
        """Read prompts, and run a program of the rows that are ready; its seconds."""
        before = [row.sequence.num_cached for row in rows]
        seconds = prefill(rows, self.prefill_chunk, self._checked.policy, self.costs)
        for row, start in zip(rows, before, strict=True):
            if (end := row.sequence.num_cached) > start:
                whole = self.costs.verify(LOOKUP, 1, end - start, (start + end) / 2)
                seconds += whole - self.costs.head(end - start)  # prompts need no logits but the last
        ready = [row for row in rows if row.sequence.is_prefilled]
        if not ready:
            return seconds
        done = Replayed()
        is_single = len(ready) < len(rows) or not all(row.at for row in ready)  # as in `LLMEngine`
        run_program(ready, is_single, self._checked, self.costs, done, {}, STREAM_SECONDS)
        return seconds + done.seconds


def _cached(row: SimulatedRow) -> int:
    """Tokens whose keys and values are kept when the row ends."""
    return row.trace.prompt_length + len(row.trace.tokens) - 1
