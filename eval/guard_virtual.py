"""The cells of `python -m eval guard` in virtual time: a device that is not here, texts of set acceptance.

Rounds take what `eval.virtual` computes for the device. A decision is charged with what it took the processor
that runs this, since the device waits for it, and the policy knows of it, as in the engine. The shapes of rounds that
a policy names (`Policy.likely`) are recorded before decoding, as many as fit into `START_SECONDS`, for the fixed
policies as for the default one. Any other shape is charged with `RECORDING` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from eval.measurement import no_garbage_collection
from eval.replay import Replayed, make, replay
from eval.shapes import config_of
from eval.traces import Trace
from eval.virtual import GPUS, gpu_costs, synthetic_traces
from selfspec.control.costs import Costs, RoundLimits
from selfspec.control.drafters import recorded_lengths
from selfspec.control.plan import Policy
from selfspec.executors.cuda.executor import in_order
from selfspec.executors.cuda.runner import START_SECONDS

SHAPE, GPU = "llama-3-8b", "h200"
LIMITS = RoundLimits(longest=15, tokens=256, rows=32)
RECORDING = 0.15  # seconds of recording one shape of a round: a guess, not measured
ROWS, ACCEPTANCE = (1, 4, 8, 32, 128), (0.02, 0.8)
LEAST_OF_PLAIN, LEAST_OF_FIXED = 0.98, 0.95
EXITS, LENGTHS = (2, 4, 8), (2, 4, 7)  # of the fixed policies
OUTPUTS, TOKENS = 4, 512  # outputs of a row's place, one after the other, and their tokens


class Virtual(NamedTuple):
    """A cell: rows that decode together, and acceptance of a quarter of the layers."""

    rows: int
    acceptance: float


class Seconds(NamedTuple):
    """Virtual seconds of a cell."""

    adaptive: float
    plain: float
    fixed: float  # of the best fixed policy
    recordings: int
    recording: float  # seconds of them within `adaptive`

    @property
    def of_plain(self) -> float:
        return self.plain / self.adaptive

    @property
    def of_fixed(self) -> float:
        return self.fixed / self.adaptive

    def passes(self, acceptance: float) -> bool:
        """Whether the default policy is not slower than plain decoding, and near the best fixed policy."""
        return self.of_plain >= LEAST_OF_PLAIN and (acceptance < 0.5 or self.of_fixed >= LEAST_OF_FIXED)


def cells() -> Iterator[Virtual]:
    """All cells."""
    for rows, acceptance in product(ROWS, ACCEPTANCE):
        yield Virtual(rows, acceptance)


def simulate(cell: Virtual, tokens: int = TOKENS, outputs: int = OUTPUTS) -> Seconds:
    """Replay a cell by plain decoding, the default policy, and the fixed policies."""
    config = config_of(SHAPE)
    costs = replace(gpu_costs(config, GPUS[GPU]), recorded=LIMITS)
    count = cell.rows * max(1, outputs // max(1, cell.rows // 8))
    traces = synthetic_traces(costs.num_layers, count, 64, tokens, cell.acceptance, seed=0)
    policy = make("adaptive", costs)
    named = _named(policy, cell.rows)
    with no_garbage_collection():  # a replay keeps all of its rounds, which a decision would take the time of visiting
        done = replay(traces, policy, costs, batch_size=cell.rows, is_timed=True)
    recordings = len(_shapes(done, costs) - named)
    recording = recordings * RECORDING
    plain = _replayed("plain", traces, costs, cell.rows).seconds
    fixed = [
        _replayed(f"fixed:{exit_layer},{length}", traces, costs, cell.rows).seconds
        for exit_layer, length in product(EXITS, LENGTHS)
        if cell.rows <= LIMITS.rows
    ]
    return Seconds(done.seconds + done.control + recording, plain, min(fixed, default=plain), recordings, recording)


def _replayed(policy: str, traces: list[Trace], costs: Costs, rows: int) -> Replayed:
    return replay(traces, make(policy, costs), costs, batch_size=rows)


def _shapes(done: Replayed, costs: Costs) -> set[tuple[int, int, int]]:
    """The drafting shapes that were run: exit layer, draft length, slots.

    A draft that is cut at the end of an output is run by the recording of a longer one.
    """
    shapes = set[tuple[int, int, int]]()
    for one in done.rounds:
        if one.exit_layer:
            drafted, count = max(row.num_drafted for row in one.rows), len(one.rows)
            lengths = recorded_lengths(costs.recorded_length(count) or drafted)
            shapes.add((one.exit_layer, next((n for n in lengths if n >= drafted), drafted), _slots(count)))
    return shapes


def _named(policy: Policy, rows: int) -> set[tuple[int, int, int]]:
    """The drafting shapes that are recorded before decoding: a start goes on until it has taken `START_SECONDS`."""
    wanted = in_order(policy.likely, rows)
    shapes = dict.fromkeys((plan.exit_layer or 0, max(plan.draft_lengths), _slots(count)) for count, plan in wanted)
    recorded = list(shapes)[: int(START_SECONDS / RECORDING) + 1]
    return {shape for shape in recorded if shape[0]}


def _slots(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
