"""The engine: rows join and leave between rounds, wait for room, and keep their tokens whatever its settings."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from selfspec.control.fixed import Fixed
from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.errors import CacheFullError
from tests.helpers import Always, Schedule, audit_cache, decode, drain, generate, make_prompts
from tests.models import build, tiny
from tests.target import Target, load


@pytest.fixture
def target():
    return tiny("llama")


def submit_all(engine, prompts, **options):
    return [engine.submit(prompt, **options) for prompt in prompts]


def test_request_ids_count_up_and_completions_carry_them(target):
    engine = Engine(target, policy=Schedule(0, 4))
    ids = submit_all(engine, make_prompts([4, 4, 4]), max_new_tokens=3)
    assert ids == [0, 1, 2]
    assert {c.request_id for c in drain(engine).completions.values()} == {0, 1, 2}
    assert engine.submit([5], max_new_tokens=1) == 3


@pytest.mark.parametrize("policy", ["plain", "fixed", "adaptive"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "any engine"])
def test_keys_and_values_are_given_back_as_soon_as_nobody_decodes_with_them(policy, views):
    """They may be gigabytes: they do not wait for the collector of reference cycles."""
    target = Target(build("llama"), engine="views" if views else "auto")
    engine = Engine(target, policy=policy, max_batch_size=2)
    submit_all(engine, make_prompts([9, 5]), max_new_tokens=12)
    drain(engine)
    storage = [weakref.ref(tensor) for pair in engine.cache._layers.values() for tensor in pair]
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None and storage and not any(one() for one in storage)
    finally:
        gc.enable()


def test_a_waiting_list_longer_than_the_batch_is_drained(target):
    prompts = make_prompts([3 + i % 9 for i in range(25)])
    engine = Engine(target, policy=Schedule(0, 4), max_batch_size=3)
    submit_all(engine, prompts, max_new_tokens=7)
    assert (engine.num_waiting, engine.has_work) == (25, True)
    batches = []
    done = drain(engine, lambda engine: batches.append(len(engine.rows))).completions
    assert max(batches) == 3
    assert (engine.num_waiting, engine.has_work) == (0, False)
    assert [done[i].tokens for i in range(25)] == [generate(target.model, prompt, 7) for prompt in prompts]


def test_rows_join_between_rounds_of_a_running_batch(target):
    prompts = make_prompts([5, 8, 2, 11])
    engine = Engine(target, policy=Schedule(1, 4), max_batch_size=4)
    rounds = []
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=12)
        rounds += [*engine.step(), *engine.step()]
        audit_cache(engine, target.model)
    sizes = [len(round_.rows) for round_ in rounds]
    assert sizes[0] == 1 < max(sizes)
    rest = drain(engine, before=rounds).completions
    assert [rest[i].tokens for i in range(4)] == [generate(target.model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("prefill_chunk", [1, 5, 512])
@pytest.mark.parametrize("max_batch_size", [1, 2, 8])
@pytest.mark.parametrize("page_size", [1, 6, 60])
def test_settings_of_the_engine_change_no_token(target, prefill_chunk, max_batch_size, page_size):
    prompts = make_prompts([1, 17, 40, 6, 9], seed=3)
    expected = [generate(target.model, prompt, 10) for prompt in prompts]
    engine = {"prefill_chunk": prefill_chunk, "max_batch_size": max_batch_size, "page_size": page_size}
    done = decode(target, prompts, Schedule(2, 4), engine={**engine, "max_cached_tokens": 180}, max_new_tokens=10)
    assert [c.tokens for c in done] == expected


def test_a_prompt_is_read_in_chunks_while_others_decode(target):
    short, long = make_prompts([2, 30], seed=3)
    engine = Engine(target, policy=Always(2, 2), max_batch_size=2, prefill_chunk=4)
    first, second = engine.submit(short, max_new_tokens=20), engine.submit(long, max_new_tokens=4)
    cached, rounds = [], []
    while len(cached) < 7:
        rounds += engine.step()
        audit_cache(engine, target.model)
        cached.append(next(row.num_cached for row in engine.rows if row.request_id == second))
    assert cached == [3, 7, 11, 15, 19, 23, 27]  # one token of the first chunk was the other row's
    assert all([row.request_id for row in round_.rows] == [first] for round_ in rounds)
    done = drain(engine, before=rounds).completions
    assert done[second].tokens == generate(target.model, long, 4)


@pytest.mark.parametrize("burst", [None, 60.0])
def test_a_first_token_is_handed_out_alone_where_somebody_watches(target, burst):
    """Programs are long, and tokens come after one; a row that joins gets its first token after one round."""
    engine = Engine(target, policy=Always(None, 0, num_rounds=1000), burst=burst)
    engine.submit(make_prompts([5])[0], max_new_tokens=40)
    first = len(engine.step())
    assert first == (1 if burst is None else 40)
    if burst is None:
        engine.step()
        engine.submit(make_prompts([4])[0], max_new_tokens=3)
        assert len(engine.step()) == 1


def test_a_step_that_only_reads_prompts_decodes_nothing(target):
    engine = Engine(target, prefill_chunk=3)
    engine.submit(make_prompts([8])[0], max_new_tokens=2)
    [round_] = engine.step()
    assert (round_.rows, round_.plan) == ([], None)
    assert round_.seconds.prefill > 0 == round_.seconds.verify


def test_an_engine_with_nothing_to_do_says_so(target):
    engine = Engine(target)
    assert not engine.has_work
    assert list(engine.run()) == []
    assert [round_.rows for round_ in engine.step()] == [[]]


# ------------------------------------------------------------------------------------------------------- cancelling


def test_a_cancelled_row_keeps_its_tokens_and_frees_its_pages_at_the_next_step(target):
    engine = Engine(target, policy=Schedule(0, 4), max_batch_size=2, max_cached_tokens=60, page_size=5)
    prompts = make_prompts([5, 5, 5])
    first, second, third = submit_all(engine, prompts, max_new_tokens=20)
    before = [round_ for _ in range(3) for round_ in engine.step()]
    so_far = [token for round_ in before for row in round_.rows if row.request_id == first for token in row.tokens]
    free = engine.cache.num_free_pages
    owned = next(len(row.pages) for row in engine.rows if row.request_id == first)
    engine.cancel(first)
    assert engine.cache.num_free_pages == free
    [round_] = engine.step()
    [ended] = [row for row in round_.rows if row.request_id == first]
    assert (ended.tokens, ended.text, ended.drafted, ended.completion.tokens) == ([], "", [], so_far)
    assert ended.completion.finish_reason == "cancelled"
    assert {row.request_id for row in engine.rows} == {second, third}  # the waiting row took its place in the same step
    assert engine.cache.num_free_pages == free + owned - len(engine.rows[-1].pages)
    done = drain(engine, before=[*before, round_]).completions
    assert done[second].tokens == generate(target.model, prompts[1], 20)
    assert done[third].tokens == generate(target.model, prompts[2], 20)


def test_a_cancelled_waiting_request_ends_with_no_tokens(target):
    engine = Engine(target, max_batch_size=1)
    first, second = submit_all(engine, make_prompts([5, 5]), max_new_tokens=6)
    before = engine.step()
    engine.cancel(second)
    done = drain(engine, before=before).completions
    assert (done[second].tokens, done[second].finish_reason) == ([], "cancelled")
    assert engine.num_waiting == 0
    assert done[first].finish_reason == "length"


def test_a_row_can_be_cancelled_while_its_prompt_is_read(target):
    engine = Engine(target, prefill_chunk=2)
    number = engine.submit(make_prompts([9])[0], max_new_tokens=6)
    engine.step()
    engine.cancel(number)
    done = drain(engine).completions
    assert (done[number].tokens, done[number].finish_reason) == ([], "cancelled")


def test_cancelling_unknown_finished_or_cancelled_requests_changes_nothing(target):
    engine = Engine(target, policy=Schedule(0, 4))
    [prompt] = make_prompts([5])
    first = engine.submit(prompt, max_new_tokens=1)
    engine.cancel(99)
    engine.cancel(-1)
    assert drain(engine).completions[first].finish_reason == "length"
    engine.cancel(first)
    second = engine.submit(prompt, max_new_tokens=6)
    engine.cancel(second)
    engine.cancel(second)
    assert drain(engine).completions[second].finish_reason == "cancelled"
    third = engine.submit(prompt, max_new_tokens=6)
    assert drain(engine).completions[third].tokens == generate(target.model, prompt, 6)


# ------------------------------------------------------------------------------------------------------------ room


def test_rows_wait_while_pages_are_out_and_all_finish(target):
    prompts = make_prompts([10] * 9, seed=2)
    engine = Engine(target, policy=Schedule(0, 4), max_batch_size=8, max_cached_tokens=45, page_size=5)
    submit_all(engine, prompts, max_new_tokens=6)  # three pages each of nine
    batches = []
    audit = partial(audit_cache, model=target.model)
    done = drain(engine, lambda engine: (batches.append(len(engine.rows)), audit(engine))).completions
    assert max(batches) == 3
    assert [done[i].tokens for i in range(9)] == [generate(target.model, prompt, 6) for prompt in prompts]


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_served(target):
    engine = Engine(target, policy=Always(2, 4), max_batch_size=2, max_cached_tokens=20, page_size=5)
    [prompt] = make_prompts([12])
    with pytest.raises(CacheFullError, match=r"a request of 21 tokens .* exceeds the engine's 20 cached tokens; raise"):
        engine.submit(prompt, max_new_tokens=10)
    assert not engine.has_work
    engine.submit(prompt, max_new_tokens=9)  # the last token needs no keys
    assert drain(engine).completions[0].tokens == generate(target.model, prompt, 9)


def test_the_first_in_line_is_not_overtaken(target):
    engine = Engine(target, policy="plain", max_batch_size=4, max_cached_tokens=40, page_size=5)
    big, small = make_prompts([25, 3])
    order = []
    submit_all(engine, [big, big, small], max_new_tokens=4)
    while engine.has_work:
        order += [row.request_id for round_ in engine.step() for row in round_.rows if row.completion]
    assert order == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"max_cached_tokens": 10, "page_size": 16}, "max_cached_tokens must hold a page of 16 tokens, got 10"),
        ({"policy": "clever"}, "policy must be one of adaptive, plain, fixed.*, got 'clever'"),
        ({"exit_layer": 4}, r"exit_layer must lie in 1\.\.3 for this model, got 4"),
        ({"exit_layer": 0}, r"exit_layer must lie in 1\.\.3 for this model, got 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0 .*, got -1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(target, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Engine(target, **options)


def test_a_round_tells_its_plan_and_where_its_time_went(target):
    engine = Engine(target, policy="fixed", exit_layer=2, num_draft_tokens=3)
    engine.submit(make_prompts([6])[0], max_new_tokens=9)
    round_ = engine.step()[0]
    assert (round_.plan.exit_layer, round_.plan.draft_lengths) == (2, (3,))
    [row] = round_.rows
    assert len(row.drafted) == 3
    assert row.tokens[: row.num_accepted] == row.drafted[: row.num_accepted]
    seconds = round_.seconds
    assert seconds.shadow == 0  # a fixed policy asks for none
    parts = [seconds.prefill, seconds.draft, seconds.verify, seconds.head, seconds.pick, seconds.control, seconds.rest]
    assert all(part > 0 for part in parts)
    assert seconds.total == pytest.approx(sum(parts))


def test_a_row_does_not_depend_on_who_had_its_page_before():
    model = build("llama")
    poison = 9
    model.get_input_embeddings().weight.data[poison] = float("nan")
    target, prompts = Target(model, check=False), [[5, 6], [7, 8, 10, 11, 12, 13, 14, 15, 16, 17]]
    expected = [target.generate([p], max_new_tokens=8)[0].tokens for p in prompts]
    engine = Engine(target, max_batch_size=2, max_cached_tokens=60)
    engine.submit([poison, *[poison] * 20], max_new_tokens=2)
    list(engine.run())
    ids = [engine.submit(p, max_new_tokens=8) for p in prompts]
    done = {r.request_id: r.completion for round_ in engine.run() for r in round_.rows if r.completion is not None}
    assert [done[i].tokens for i in ids] == expected


def test_a_processor_that_raises_ends_its_own_row_and_no_other():
    target = tiny("llama")
    engine = Engine(target, max_batch_size=2)

    def fails(ids, scores):
        raise RuntimeError("no")

    bad = engine.submit([5, 6, 7], max_new_tokens=6, logits_processor=fails)
    good = engine.submit([8, 9], max_new_tokens=6)
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    done = {r.request_id: r.completion for round_ in engine.run() for r in round_.rows if r.completion is not None}
    assert done[bad].finish_reason == "cancelled"
    assert done[good].tokens == target.generate([[8, 9]], max_new_tokens=6, policy="plain")[0].tokens


@pytest.mark.parametrize("wrong", [{"prompt": []}, {"prompt": [3], "max_new_tokens": 0}, {"prompt": [3], "stop": [""]}])
def test_a_request_made_by_hand_is_checked_too(wrong):
    with pytest.raises(ValueError, match=r"^(prompt is empty|max_new_tokens must|stop must)"):
        Request(**wrong)


def test_tokens_that_were_decoded_beyond_an_end_of_text_are_counted():
    target = load("demo")
    prompt = target.tokenizer("def mean(values):\n")["input_ids"]

    def rounds_of(eos):
        engine = Engine(target, policy=Fixed(8, 4), max_batch_size=1)
        engine.submit(Request(prompt, max_new_tokens=64, eos=frozenset(eos)))
        return [round_ for round_ in engine.run() if round_.plan is not None]

    blocks = [round_.rows[0].tokens for round_ in rounds_of([])]
    tokens = [token for block in blocks for token in block]
    block, at = next((b, i) for b in blocks for i in range(len(b) - 1) if tokens.count(b[i]) == 1)
    rounds = rounds_of([block[at]])
    assert [round_.num_wasted for round_ in rounds] == [0] * (len(rounds) - 1) + [len(block) - at - 1]
    assert rounds[-1].rows[0].tokens == block[: at + 1]
