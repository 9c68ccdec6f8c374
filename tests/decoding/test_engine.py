"""The engine: rows join and leave between rounds, wait for pages, and keep their tokens whatever its settings."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from contextlib import suppress

import pytest

from selfspec.control.published.layerskip import Fixed
from selfspec.decoding.engine import LLMEngine
from selfspec.errors import CacheFullError
from selfspec.loading.hub import open_target
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import (
    Always,
    Run,
    Schedule,
    audit_cache,
    decode,
    engine_of,
    generate,
    make_prompts,
    request,
    tokens_of,
)
from tests.models import build, tiny


@pytest.fixture
def target():
    return tiny("llama")


def params(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, **more)


def run_of(target, prompts, max_tokens, policy="plain", audit=None, **options):
    run = Run(engine_of(target, policy, **options), audit)
    for prompt in prompts:
        run.add(prompt, params(max_tokens))
    return run


@pytest.mark.parametrize("policy", ["plain", "adaptive"])
@pytest.mark.parametrize("backend", ["views", "auto"])
def test_keys_and_values_are_given_back_as_soon_as_nobody_decodes_with_them(policy, backend):
    """They may be gigabytes: they do not wait for the collector of reference cycles."""
    target = Target(build("llama"), backend=backend)
    engine = run_of(target, make_prompts([9, 5]), 12, policy, max_num_seqs=2).finish().engine
    storage = [weakref.ref(tensor) for pair in engine.cache._layers.values() for tensor in pair]
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None and storage and not any(one() for one in storage)
    finally:
        gc.enable()


def test_a_waiting_list_longer_than_the_batch_is_drained(target):
    prompts, batches = make_prompts([3 + i % 9 for i in range(25)]), []
    run = run_of(target, prompts, 7, Schedule(0, 4), lambda one: batches.append(one.num_running), max_num_seqs=3)
    assert (run.engine.num_waiting, run.engine.has_unfinished_requests()) == (25, True)
    assert tokens_of(run.finish().outputs) == [generate(target.model, prompt, 7) for prompt in prompts]
    assert max(batches) == 3
    assert (run.engine.num_waiting, run.engine.has_unfinished_requests()) == (0, False)


def test_rows_join_between_rounds_of_a_running_batch(target):
    prompts, sizes = make_prompts([5, 8, 2, 11]), []
    run = Run(engine_of(target, Schedule(1, 4), max_num_seqs=4), audit_cache)
    for prompt in prompts:
        run.add(prompt, params(12))
        sizes += [len(round_.rows) for _ in range(2) for round_ in run.step()]
    assert sizes[0] == 1 < max(sizes)
    assert tokens_of(run.finish().outputs) == [generate(target.model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("prefill_chunk", [1, 5, 512])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("page_size", [1, 6, 60])
def test_settings_of_the_engine_change_no_token(target, prefill_chunk, max_num_seqs, page_size):
    prompts = make_prompts([1, 17, 40, 6, 9], seed=3)
    options = {"prefill_chunk": prefill_chunk, "max_num_seqs": max_num_seqs, "page_size": page_size}
    done = decode(target, prompts, Schedule(2, 4), params(10), max_num_cached_tokens=180, **options)
    assert tokens_of(done) == [generate(target.model, prompt, 10) for prompt in prompts]


def test_a_prompt_is_read_in_chunks_while_others_decode(target):
    short, long = make_prompts([2, 30], seed=3)
    run, cached = Run(engine_of(target, Always(2, 2), max_num_seqs=2, prefill_chunk=4), audit_cache), []
    first, second = run.add(short, params(20)), run.add(long, params(4))
    while len(cached) < 7:
        assert all([row.sequence.request_id for row in round_.rows] == [first] for round_ in run.step())
        cached.append(next(row.num_cached for row in run.engine.running if row.request_id == second))
    assert cached == [3, 7, 11, 15, 19, 23, 27]  # one token of the first chunk was the other row's
    assert run.finish().output(second).token_ids == generate(target.model, long, 4)


@pytest.mark.parametrize("max_step_seconds", [None, 60.0])
def test_a_first_token_is_handed_out_alone_where_somebody_watches(target, max_step_seconds):
    """Plans are long, and tokens come after one; a row that joins gets its first token after one round."""
    run = Run(engine_of(target, Always(None, 0, num_rounds=1000), max_step_seconds=max_step_seconds))
    run.add(make_prompts([5])[0], params(40))
    assert len(run.step()) == (1 if max_step_seconds is None else 40)
    if max_step_seconds is None:
        run.step()
        run.add(make_prompts([4])[0], params(3))
        assert len(run.step()) == 1


def test_a_step_that_only_reads_prompts_decodes_nothing(target):
    run = run_of(target, make_prompts([8]), 2, prefill_chunk=3)
    [round_] = run.step()
    assert (round_.rows, round_.plan) == ([], None)
    assert round_.seconds.prefill > 0 == round_.seconds.verify


def test_an_engine_with_nothing_to_do_says_so(target):
    engine, rounds = engine_of(target), []
    assert not engine.has_unfinished_requests()
    assert engine.step(rounds.append) == [] and [round_.rows for round_ in rounds] == [[]]


def test_counters_say_what_runs_and_what_is_held(target):
    run = run_of(target, make_prompts([10, 10, 10]), 6, max_num_seqs=2, max_num_cached_tokens=80, page_size=5)
    run.engine._is_streamed, run.engine._deadline = False, 0.0
    run.step()
    engine = run.engine
    assert (engine.num_running, engine.num_waiting, engine.num_pages_in_use) == (2, 1, 6)
    assert (engine.kv_cache_usage, engine.max_num_cached_tokens) == (6 / 16, 80)
    assert engine.prefix_cache_queries == engine.prefix_cache_hits == 0
    run.finish()
    assert (engine.num_running, engine.num_pages_in_use, engine.kv_cache_usage) == (0, 0, 0.0)


# ---------------------------------------------------------------------------------------------------------- aborting


def test_an_aborted_row_keeps_its_tokens_and_frees_its_pages_at_the_next_step(target):
    prompts = make_prompts([5, 5, 5])
    options = {"max_num_seqs": 2, "max_num_cached_tokens": 60, "page_size": 5}
    run = run_of(target, prompts, 20, Schedule(0, 4), **options)
    for _ in range(3):
        run.step()
    so_far = [token for row in run.rows("0") for token in row.token_ids]
    cache = run.engine.cache
    free = cache.num_free_pages
    owned = len(run.engine.running[0].pages)
    run.engine.abort("0")
    assert cache.num_free_pages == free
    [ended] = [row for round_ in run.step() for row in round_.rows if row.sequence.request_id == "0"]
    assert (ended.token_ids, str(ended.text), ended.drafted, ended.finish_reason) == ([], "", [], "abort")
    assert (run.output("0").token_ids, run.output("0").finish_reason) == (so_far, "abort")
    assert {row.request_id for row in run.engine.running} == {"1", "2"}  # the waiting one took its place at once
    assert cache.num_free_pages == free + owned - len(run.engine.running[-1].pages)
    assert tokens_of(run.finish().outputs[1:]) == [generate(target.model, prompt, 20) for prompt in prompts[1:]]


def test_requests_can_be_aborted_while_they_wait_and_while_their_prompts_are_read(target):
    run = run_of(target, make_prompts([9, 5]), 6, max_num_seqs=1, prefill_chunk=2)
    run.step()
    run.engine.abort("0")
    run.engine.abort("1")
    run.finish()
    assert [(one.token_ids, one.finish_reason) for one in run.outputs] == [([], "abort")] * 2
    assert run.engine.num_waiting == 0


def test_aborting_unknown_finished_or_aborted_requests_changes_nothing(target):
    run, [prompt] = Run(engine_of(target, Schedule(0, 4))), make_prompts([5])
    first = run.add(prompt, params(1))
    with pytest.raises(ValueError, match=f"request_id must be a text that no unfinished request has, got '{first}'"):
        run.engine.add_request(first, prompt, params(1))
    run.engine.abort("99")
    assert run.finish().output(first).finish_reason == "length"
    run.engine.abort(first)
    second = run.add(prompt, params(6))
    run.engine.abort(second)
    run.engine.abort(second)
    assert run.finish().output(second).finish_reason == "abort"
    third = run.add(prompt, params(6))
    assert run.finish().output(third).token_ids == generate(target.model, prompt, 6)


# ------------------------------------------------------------------------------------------------------------- pages


def test_rows_wait_while_pages_are_out_and_all_finish(target):
    prompts, batches = make_prompts([10] * 9, seed=2), []

    def audit(engine):
        batches.append(engine.num_running)
        audit_cache(engine)

    run = run_of(target, prompts, 6, Schedule(0, 4), audit, max_num_cached_tokens=45, page_size=5)  # three pages each
    assert tokens_of(run.finish().outputs) == [generate(target.model, prompt, 6) for prompt in prompts]
    assert max(batches) == 3


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_served(target):
    run, [prompt] = Run(engine_of(target, Always(2, 4), max_num_cached_tokens=20, page_size=5)), make_prompts([12])
    with pytest.raises(CacheFullError, match=r"a request of 21 tokens .* exceeds the engine's 20 cached tokens; raise"):
        run.engine.add_request("a", prompt, params(10))
    assert not run.engine.has_unfinished_requests()
    run.add(prompt, params(9))  # the last token needs no keys
    assert run.finish().outputs[0].token_ids == generate(target.model, prompt, 9)


def test_the_first_in_line_is_not_overtaken(target):
    big, small = make_prompts([25, 3])
    run = run_of(target, [big, big, small], 4, max_num_seqs=4, max_num_cached_tokens=40, page_size=5).finish()
    ends = [row.sequence.request_id for round_ in run.rounds for row in round_.rows if row.finish_reason]
    assert ends == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"max_num_cached_tokens": 10, "page_size": 16}, "max_num_cached_tokens must hold a page of 16 tokens, got 10"),
        ({"max_step_seconds": -1}, "max_step_seconds must be a number of at least 0, got -1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(target, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LLMEngine(target.split, Fixed(2, 3), target.defaults, **options)


def test_a_round_has_its_plan_and_where_its_time_went(target):
    run = run_of(target, make_prompts([6]), 9, Fixed(2, 3))
    round_ = run.step()[0]
    assert (round_.plan.exit_layer, round_.plan.draft_lengths) == (2, (3,))
    [row] = round_.rows
    assert len(row.drafted) == 3
    assert row.token_ids[: row.num_accepted] == row.drafted[: row.num_accepted]
    seconds = round_.seconds
    assert seconds.shadow == 0  # a fixed policy asks for none
    parts = [seconds.prefill, seconds.draft, seconds.verify, seconds.head, seconds.pick, seconds.control, seconds.rest]
    assert all(part > 0 for part in parts)
    assert seconds.total == pytest.approx(sum(parts))


def test_a_row_does_not_depend_on_who_had_its_page_before():
    model, poison = build("llama"), 9
    model.get_input_embeddings().weight.data[poison] = float("nan")
    target, prompts = Target(model, check=False), [[5, 6], [7, 8, 10, 11, 12, 13, 14, 15, 16, 17]]
    expected = [decode(target, [prompt], "plain", params(8))[0].token_ids for prompt in prompts]
    run = Run(engine_of(target, max_num_seqs=2, max_num_cached_tokens=60))
    run.add([poison] * 21, params(2))
    while run.engine.has_unfinished_requests():
        run.step()
    ids = [run.add(prompt, params(8)) for prompt in prompts]
    run.finish()
    assert [run.output(one).token_ids for one in ids] == expected


def test_tokens_that_were_decoded_beyond_an_end_of_text_are_counted():
    target = open_target("demo")
    prompt = target.tokenizer("def mean(values):\n")["input_ids"]

    def rounds_of(eos):
        run = Run(engine_of(target, Fixed(8, 4), max_num_seqs=1))
        run.add(request(prompt, params(64), eos_token_ids=frozenset(eos)))
        return [round_ for round_ in run.finish().rounds if round_.plan is not None]

    blocks = [round_.rows[0].token_ids for round_ in rounds_of([])]
    tokens = [token for block in blocks for token in block]
    block, at = next((b, i) for b in blocks for i in range(len(b) - 1) if tokens.count(b[i]) == 1)
    rounds = rounds_of([block[at]])
    assert [round_.num_wasted for round_ in rounds] == [0] * (len(rounds) - 1) + [len(block) - at - 1]
    assert rounds[-1].rows[0].token_ids == block[: at + 1]


def test_a_complete_request_with_an_empty_prompt_is_refused(target):
    with pytest.raises(ValueError, match="prompt is empty"):
        engine_of(target).add_request("a", request([]))


def test_an_abort_that_came_too_late_leaves_a_later_request_of_the_same_name_alone(target):
    class Late(Always):
        def observe(self, plan, rounds):
            if rounds[-1].rows[0].finish_reason is not None:
                engine.abort("a")  # its end is not reported yet

    engine, [prompt] = engine_of(target, Late(None, 0)), make_prompts([5])
    for _ in range(2):
        engine.add_request("a", prompt, params(3))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [one.outputs[0].finish_reason for one in outputs if one.finished] == ["length"]


def test_an_abort_from_another_thread_is_never_lost(target):
    """It comes at each of the calls by which the engine drops other requests; the next step ends it at the latest."""
    at, is_left = 0, False
    while not is_left:  # until there are not so many calls
        at, is_left = at + 1, True
        run, calls = run_of(target, make_prompts([5, 6, 7, 8]), 400, max_num_seqs=2), itertools.count(1)

        def look(frame, event, argument, run=run, calls=calls, at=at):
            nonlocal is_left
            if event == "call" and frame.f_code.co_filename.endswith("decoding/engine.py") and next(calls) == at:
                is_left = False
                for request_id in ("1", "3"):  # one of them runs, the other waits
                    other = threading.Thread(target=run.engine.abort, args=(request_id,))
                    other.start()
                    other.join()

        run.step()
        run.engine.abort("0")
        run.engine.abort("2")
        sys.setprofile(look)
        try:
            run.engine._drop_finished()
        finally:
            sys.setprofile(None)
        for _ in range(2 if not is_left else 0):
            run.step()
        has_unfinished = run.engine.has_unfinished_requests()
        assert is_left or not has_unfinished
    assert at > 3


class Interrupt:
    """A profiler that interrupts the engine where the interpreter looks for signals, at one of those places."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(("decoding/engine.py", "stopping.py")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_an_interrupt_while_requests_are_aborted_loses_none_of_them(target):
    """Each ends once, and all pages are free."""
    prompts, at = make_prompts([5, 6, 7]), 0
    interrupt = Interrupt(0)
    while interrupt.left <= 0:  # until there are not so many places
        at += 1
        run = run_of(target, prompts, 9, max_num_seqs=2)
        run.step()
        for request_id in ("0", "1", "2"):
            run.engine.abort(request_id)
        interrupt = Interrupt(at)
        sys.setprofile(interrupt)
        try:
            with suppress(KeyboardInterrupt):
                run.engine._drop_finished()
        finally:
            sys.setprofile(None)
        assert [one.finish_reason for one in run.finish(check=False).outputs] == ["abort"] * 3
    assert at > 10
