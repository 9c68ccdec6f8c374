"""Prompts are read in chunks of a bounded time while other rows decode; no token depends on it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from selfspec.decoding import scheduler
from selfspec.decoding.scheduler import LEAST, PromptChunks, chunks_for
from selfspec.executors.prefill import shares
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import Run, Schedule, engine_of, generate, make_prompts, tokens_of
from tests.models import build, tiny


class Device:
    """A device that takes so many seconds per token; its timers know the time from the `late`-th question on."""

    def __init__(self, per_token, late=0):
        self.per_token, self.late, self.num_read = per_token, late, 0

    def progress(self):
        """The number of tokens that it has read so far."""
        return self.num_read

    def timer(self):
        device, begin = self, self.progress()

        class Timer:
            asked = 0

            def stop(self):
                self.time = (device.progress() - begin) * device.per_token

            def seconds(self):
                self.asked += 1
                return None if self.asked <= device.late else self.time

        return Timer()

    def take(self, num):
        self.num_read += num
        return num


def sizes(device, chunks, count):
    found = []
    for _ in range(count):
        size = chunks.size()
        found.append(size)
        chunks.measured(lambda size=size: device.take(size))
    return found


def test_a_chunk_takes_at_most_its_time_by_that_of_the_last_one():
    device = Device(2.0**-13)
    chunks = PromptChunks(1024, 2.0**-5, device.timer)
    assert sizes(device, chunks, 3) == [1024, 256, 256]
    device.per_token = 2.0**-12
    assert sizes(device, chunks, 2) == [256, 128]
    device.per_token = 2.0**-20
    assert sizes(device, chunks, 2) == [128, 1024]
    device.per_token = 1.0
    assert sizes(device, chunks, 3) == [1024, LEAST, LEAST]


def test_the_host_does_not_wait_for_a_time():
    device = Device(2.0**-13, late=2)
    chunks = PromptChunks(1024, 2.0**-5, device.timer)
    assert sizes(device, chunks, 4) == [1024, 1024, 1024, 256]


def test_the_time_of_few_tokens_says_nothing():
    device = Device(2.0**-13)
    chunks = PromptChunks(1024, 2.0**-5, device.timer)
    chunks.measured(lambda: device.take(512))
    assert chunks.size() == 256
    device.per_token = 1.0
    chunks.measured(lambda: device.take(LEAST - 1))
    assert chunks.size() == 256


def test_without_a_limit_nothing_is_measured():
    chunks = PromptChunks(512, None, new_timer=None)
    chunks.measured(lambda: 5)
    assert chunks.size() == 512


def run_of(target, device, policy="plain", **options):
    """A run whose device has read what its rows have cached."""
    run = Run(engine_of(target, policy, prefill_chunk=256, max_step_seconds=0.0, **options))
    if device is not None:
        device.progress = lambda: sum(row.num_cached for row in run.engine.running)
        run.engine.chunks = PromptChunks(256, 2.0**-5, device.timer)
    return run


@pytest.mark.parametrize("late", [0, 2])
def test_running_rows_get_a_round_after_every_chunk_and_the_same_tokens(late):
    target = Target(build("llama", max_position_embeddings=1024))
    prompts, lengths = [*make_prompts([5]), *make_prompts([700, 400], seed=3)], (100, 90, 90)
    run = run_of(target, Device(2.0**-12, late), Schedule(1, 4), max_num_seqs=3, max_num_cached_tokens=4096)
    first = run.add(prompts[0], SamplingParams(max_tokens=100))
    run.step()
    for prompt in prompts[1:]:
        run.add(prompt, SamplingParams(max_tokens=90))
    read = [0]
    while read[-1] < 699 + 399:
        [round_] = run.step()
        assert first in [row.sequence.request_id for row in round_.rows]
        read.append(sum(min(row.num_cached, row.num_prompt_tokens - 1) for row in run.engine.running[1:]))
    chunks = [after - before for before, after in pairwise(read)]
    assert set(chunks[: late + 1]) == {256}, "no time is known yet"
    assert set(chunks[late + 1 : -1]) == {128}, "what takes the time that a chunk may take"
    wanted = [generate(target.model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert tokens_of(run.finish().outputs) == wanted


def test_a_chunk_is_as_large_as_asked_for_where_no_row_waits():
    device = Device(1.0)
    run = run_of(Target(build("llama", max_position_embeddings=1024)), device)
    run.add(make_prompts([700])[0], SamplingParams(max_tokens=2))
    read = []
    for _ in range(2):
        run.step()
        read.append(device.progress())
    assert read == [256, 512]


def test_on_the_processor_a_chunk_is_bounded_where_no_bit_depends_on_it(monkeypatch):
    """The clock stands still for rounds, and each prompt token takes a hundredth of a second."""
    assert chunks_for(Target(build("llama"), backend="views").split, 512).size() == 512
    target = Target(build("llama", max_position_embeddings=1024), backend="compiled")
    prompts, params = make_prompts([5, 600], seed=3), SamplingParams(max_tokens=60)
    run = run_of(target, None, max_num_seqs=2, max_num_cached_tokens=2048)

    def running():
        return run.engine.running

    def now():
        return sum(row.num_cached for row in running() if not row.is_prefilled) / 100

    monkeypatch.setattr(scheduler, "perf_counter", now)
    run.add(prompts[0], params)
    run.step()
    run.add(prompts[1], params)
    read = []
    while not all(row.is_prefilled for row in running()) or len(running()) < 2:
        run.step()
        read.append(running()[-1].num_cached)
    assert read[0] == LEAST and {after - before for before, after in pairwise(read[:-1])} == {LEAST}
    assert tokens_of(run.finish().outputs) == [generate(target.model, prompt, 60) for prompt in prompts]


@pytest.mark.parametrize(
    ("lacking", "budget", "expected"),
    [
        ([], 8, []),
        ([100], 8, [8]),
        ([100, 3, 50], 16, [8, 3, 5]),
        ([0, 100, 3], 8, [0, 5, 3]),
        ([2, 100, 100], 9, [2, 7, 0]),
        ([100, 0, 7], 1, [1, 0, 0]),
        ([4, 4], 100, [4, 4]),
        ([100, 90, 80], 10, [5, 0, 5]),
    ],
)
def test_half_of_a_step_is_for_the_row_that_came_first_and_half_for_those_that_need_least(lacking, budget, expected):
    assert shares(lacking, budget) == expected


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_other_way_round():
    run = Run(engine_of(tiny("llama"), max_num_seqs=2, prefill_chunk=4, max_step_seconds=0.0))
    long = run.add(make_prompts([100], seed=1)[0], SamplingParams(max_tokens=1))
    shorts = [run.add(make_prompts([3], seed=seed)[0], SamplingParams(max_tokens=3)) for seed in range(40)]
    ended = [*run.finish().sequences]
    assert ended[0] == shorts[0]
    assert 5 < ended.index(long) < 30, "half of every step is its own"
