"""Prompts are read in chunks of a bounded time while other rows decode; no token depends on it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from selfspec.decoding import prompt_chunks
from selfspec.decoding.engine import Engine
from selfspec.decoding.prompt_chunks import LEAST, PromptChunks, chunks_for
from tests.helpers import Schedule, drain, generate, make_prompts
from tests.models import build
from tests.target import Target


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


@pytest.mark.parametrize("late", [0, 2])
def test_running_rows_get_a_round_after_every_chunk_and_the_same_tokens(late):
    target = Target(build("llama", max_position_embeddings=1024))
    long_prompts, short = make_prompts([700, 400], seed=3), make_prompts([5])[0]
    engine = Engine(target, policy=Schedule(1, 4), max_batch_size=3, max_cached_tokens=4096, prefill_chunk=256, burst=0)
    device = Device(2.0**-12, late)
    device.progress = lambda: sum(row.num_cached for row in engine.rows)
    engine.chunks = PromptChunks(256, 2.0**-5, device.timer)
    first = engine.submit(short, max_new_tokens=100)
    rounds = engine.step()
    others = [engine.submit(prompt, max_new_tokens=90) for prompt in long_prompts]
    read = [0]
    while read[-1] < 699 + 399:
        [round_] = engine.step()
        assert first in [row.request_id for row in round_.rows]
        rounds.append(round_)
        read.append(sum(min(row.num_cached, row.num_prompt_tokens - 1) for row in engine.rows[1:]))
    chunks = [after - before for before, after in pairwise(read)]
    assert set(chunks[: late + 1]) == {256}, "no time is known yet"
    assert set(chunks[late + 1 : -1]) == {128}, "what takes the time that a chunk may take"
    done = drain(engine, before=rounds).completions
    for number, prompt, length in [(first, short, 100), *zip(others, long_prompts, (90, 90), strict=True)]:
        assert done[number].tokens == generate(target.model, prompt, length)


def test_a_chunk_is_as_large_as_asked_for_where_no_row_waits():
    engine = Engine(Target(build("llama", max_position_embeddings=1024)), max_cached_tokens=1024, prefill_chunk=256)
    device = Device(1.0)
    device.progress = lambda: sum(row.num_cached for row in engine.rows)
    engine.chunks = PromptChunks(256, 1 / 30, device.timer)
    engine.submit(make_prompts([700])[0], max_new_tokens=2)
    read = []
    for _ in range(2):
        engine.step()
        read.append(device.progress())
    assert read == [256, 512]


def test_on_the_processor_a_chunk_is_bounded_where_no_bit_depends_on_it(monkeypatch):
    """The clock stands still for rounds, and each prompt token takes a hundredth of a second."""
    assert chunks_for(Target(build("llama"), engine="views").stack, 512).size() == 512
    target = Target(build("llama", max_position_embeddings=1024))
    assert target.engine == "compiled"
    prompts = make_prompts([5, 600], seed=3)
    wanted = [generate(target.model, prompt, 60) for prompt in prompts]
    engine = Engine(target, policy="plain", max_batch_size=2, max_cached_tokens=2048, prefill_chunk=256, burst=0)
    monkeypatch.setattr(
        prompt_chunks, "perf_counter", lambda: sum(row.num_cached for row in engine.rows if not row.is_read) / 100
    )
    engine.submit(prompts[0], max_new_tokens=60)
    rounds = engine.step()
    engine.submit(prompts[1], max_new_tokens=60)
    read = []
    while not all(row.is_read for row in engine.rows) or len(engine.rows) < 2:
        rounds += engine.step()
        read.append(engine.rows[-1].num_cached)
    assert read[0] == LEAST and {after - before for before, after in pairwise(read[:-1])} == {LEAST}
    done = drain(engine, before=rounds).completions
    assert [done[i].tokens for i in range(2)] == wanted
