"""What the host takes for a round, on recordings that do nothing: `python -m tests.cuda.host_time`.

A replay writes a plausible record at once. `idle` is the time in which a device would have nothing to do: no round is
launched and not taken. `wall` is all of the host's time. Both are microseconds a round, medians over plans of 64
rounds, with the recordings that were made and the rounds that were launched ahead.
"""

from __future__ import annotations

import math
import random
from statistics import median
from time import perf_counter

from selfspec import SamplingParams
from selfspec.control.plan import NUM_LOOKUP_BINS, NUM_MATCH_BINS, SOURCES, LookupTable, ShadowPlan
from selfspec.executors.cuda.rounds import RecordedRounds
from tests.cuda.standin import with_runner
from tests.cuda.tape import Tape, Taped
from tests.helpers import Always, engine_of, make_prompts, request
from tests.models import build
from tests.target import Target

ROUNDS, PLANS, WARM = 64, 7, 2
DICE = random.Random(0)


class Idle(Taped):
    """A recording whose replay emits a token in each row, and accepts one more where rows draft."""

    def replay(self):
        record = self.outputs[0]
        width = (
            1 if record.shape[1] == 5 else (record.shape[1] - 2) // 3
        )  # of plain rounds, else by layers drafted ones
        self.num_replays += 1
        record[:, :3] = record.new_tensor([width - 1, int(width > 1), 1 + int(width > 1)])
        record[:, 3 : 3 + 2 * width] = DICE.randrange(96)


def measured(num_rows, plan, params):
    """The medians of `idle` and `wall` in microseconds, recordings, and how many rounds were launched ahead."""
    target = with_runner(Target(build("llama", max_position_embeddings=1 << 16), backend="views"), max_rows=32)
    capture, honest = target.split.runner.graphs.capture, Tape.record

    def record(body):
        made = honest(capture, body)
        made.__class__ = Idle
        return made

    capture.record = record
    engine = engine_of(target, plan, max_num_seqs=num_rows, max_num_cached_tokens=4096 * num_rows, page_size=256,
                       max_step_seconds=math.inf, prefill_chunk=1 << 16)  # fmt: skip
    for at, prompt in enumerate(make_prompts([9] * num_rows)):
        engine.add_request(str(at), request(prompt, SamplingParams(max_tokens=2000, **params)))
    clock = {"idle": 0.0, "since": None, "ahead": 0, "all": 0}
    launch, take = RecordedRounds.launch, RecordedRounds.take

    def launched(self, *given):
        clock["ahead"], clock["all"] = clock["ahead"] + (self.num_in_flight > 0), clock["all"] + 1
        done = launch(self, *given)
        if clock["since"] is not None:
            clock["idle"] += perf_counter() - clock["since"]
            clock["since"] = None
        return done

    def taken(self):
        done = take(self)
        clock["since"] = None if self.num_in_flight else perf_counter()
        return done

    found = []
    RecordedRounds.launch, RecordedRounds.take = launched, taken
    try:
        engine.step()  # prompts
        while len(found) < PLANS + WARM:
            clock |= {"idle": 0.0, "ahead": 0, "all": 0}
            rounds, begun = [], perf_counter()
            engine.step(rounds.append)
            wall, count = perf_counter() - begun, max(1, len(rounds))
            found.append((1e6 * clock["idle"] / count, 1e6 * wall / count, clock["ahead"], len(rounds)))
    finally:
        RecordedRounds.launch, RecordedRounds.take = launch, take
    idle, wall, ahead, rounds = zip(*found[WARM:], strict=True)
    return median(idle), median(wall), target.split.runner.graphs.num_recorded, f"{sum(ahead)} of {sum(rounds)}"


def main():
    bins = [0] * NUM_MATCH_BINS
    bins[-1] = 4  # a match that does not come
    print("rows  plan                      idle us  wall us  recordings  launched ahead")
    for num_rows in (1, 8, 32):
        gains = ((1.0,) * NUM_LOOKUP_BINS,) * num_rows
        table = LookupTable((tuple(bins * len(SOURCES)),) * num_rows, gains, (0.0,))
        for name, plan, params in (
            ("plain", Always(None, 0, num_rounds=ROUNDS), {}),
            ("plain, a lookup table", Always(None, 0, num_rounds=ROUNDS, lookups=table), {}),
            ("drafts of 4", Always(1, 4, num_rounds=ROUNDS), {}),
            ("drafts of 4, a table", Always(1, 4, num_rounds=ROUNDS, lookups=table), {}),
            ("a probe", Always(None, 0, shadow=ShadowPlan((1, 2, 3), (0,), 1)), {}),
            ("rows with penalties", Always(None, 0, num_rounds=ROUNDS), {"repetition_penalty": 1.1}),
        ):
            idle, wall, recordings, ahead = measured(num_rows, plan, params)
            print(f"{num_rows:4}  {name:24}  {idle:7.0f}  {wall:7.0f}  {recordings:10}  {ahead}")


if __name__ == "__main__":
    main()
