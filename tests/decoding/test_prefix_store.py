"""Calls of one model find what earlier ones read, as long as it holds, and within a bound."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from selfspec import LLM, SamplingParams
from tests.helpers import make_prompts
from tests.models import build

DOCUMENT = make_prompts([90], seed=3)[0]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def asked(llm, prompts, params=PARAMS):
    """Tokens of every prompt, and how many of its tokens had been read before."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def fresh(llm, prompts):
    """The tokens of a model that keeps nothing."""
    return asked(LLM(llm.target.model, backend=llm.target.backend, prefix_cache=False), prompts)[0]


@pytest.fixture
def llm():
    return LLM(build("llama"), backend="compiled")


def test_a_second_question_about_a_document_reads_only_the_question(llm):
    first, second = [*DOCUMENT, 5, 6], [*DOCUMENT, 7, 8, 9]
    assert asked(llm, [first]) == (fresh(llm, [first]), [0])
    assert asked(llm, [second]) == (fresh(llm, [second]), [90])
    longer = [*second, *asked(llm, [second])[0][0], 11]
    assert asked(llm, [longer]) == (fresh(llm, [longer]), [len(longer) - 2])  # all but the last output token and the 11


def test_the_default_is_where_bits_are_the_same(llm):
    views = LLM(build("llama"), backend="views")
    assert llm.prefix_cache and not views.prefix_cache
    assert asked(views, [DOCUMENT])[1] == asked(views, [DOCUMENT])[1] == [0]
    shared = LLM(build("llama"), backend="views", prefix_cache=True)
    assert asked(shared, [DOCUMENT])[1] == [0]
    assert asked(shared, [DOCUMENT]) == (fresh(shared, [DOCUMENT]), [89])


@pytest.mark.parametrize(("size", "found"), [(0, 0), (64, 64), (128, 64), (192, 99)])
def test_no_more_is_kept_than_is_allowed(size, found):
    """Pages hold 64 tokens, and a running row needs two of them."""
    llm = LLM(build("llama"), backend="compiled", prefix_cache_tokens=size, max_num_seqs=2)
    texts = [make_prompts([100], seed=seed)[0] for seed in range(4)]
    assert asked(llm, texts)[0] == fresh(llm, texts)
    asked(llm, texts[-1:])
    assert asked(llm, texts[-1:])[1] == [found]
    assert sum(bool(asked(llm, [text])[1][0]) for text in texts) <= size // 64


@pytest.mark.parametrize("backend", ["compiled", "views"])
@pytest.mark.parametrize("way", ["counted", "data"])
def test_nothing_is_found_after_an_edit_of_weights(backend, way):
    llm = LLM(build("llama"), backend=backend, prefix_cache=True)
    before = asked(llm, [DOCUMENT])[0]
    weight = llm.target.model.get_input_embeddings().weight
    if way == "counted":
        with torch.no_grad():
            weight.mul_(-1.5)
    else:
        weight.data[3:20] = weight.data[3:20].flip(0).clone()
    after, found = asked(llm, [DOCUMENT])
    assert found == [0] and after == fresh(llm, [DOCUMENT]) != before
    assert asked(llm, [DOCUMENT]) == (after, [89])


def test_a_stream_that_nobody_reads_on_gives_its_pages_back(llm):
    for taken in (0, 1, 2):
        stream = llm.stream([DOCUMENT, DOCUMENT[:50]], SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(taken):
            next(stream)
        stream.close()
    assert asked(llm, [DOCUMENT]) == (fresh(llm, [DOCUMENT]), [89])


def test_an_interrupt_costs_what_was_kept_and_no_token(llm):
    wanted = asked(llm, [DOCUMENT])

    def interrupt(round_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([DOCUMENT], PARAMS, on_round=interrupt)
    assert asked(llm, [DOCUMENT])[0] == wanted[0]


def test_bad_arguments_cost_nothing_that_was_kept(llm):
    asked(llm, [DOCUMENT])
    with pytest.raises(ValueError, match="prompt"):
        llm.generate([DOCUMENT, []], PARAMS)
    with pytest.raises(ValueError, match="context"):
        llm.generate([DOCUMENT * 9], PARAMS)
    assert asked(llm, [DOCUMENT])[1] == [89]
    with pytest.raises(
        ValueError, match=r"^prefix_cache_tokens must be a whole number, at least 0|^prefix_cache_tokens"
    ):
        LLM(build("llama"), prefix_cache_tokens=-1)
    with pytest.raises(ValueError, match=r"^prefix_cache must be True or False, got 2"):
        LLM(build("llama"), prefix_cache=2)


def test_threads_that_call_at_once_get_what_is_theirs(llm):
    texts = [[*DOCUMENT[: 20 * (1 + i % 4)], i + 3] for i in range(12)]
    wanted = fresh(llm, texts)
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda text: asked(llm, [text])[0][0], texts))
    assert done == wanted
    assert sum(asked(llm, [DOCUMENT])[1]) > 0


def test_other_drafts_of_the_same_model_find_it_too(llm):
    asked(llm, [DOCUMENT])
    assert asked(llm.with_speculative(llm.speculative), [DOCUMENT])[1] == [89]


def test_an_engine_reports_what_it_found(llm):
    engine = llm.engine(max_num_seqs=2, max_num_cached_tokens=512)
    for name in ("a", "b"):
        engine.add_request(name, DOCUMENT, PARAMS)
        busy = 0
        while engine.has_unfinished_requests():
            engine.step()
            busy = max(busy, engine.num_pages_in_use)
        assert busy in (0, 2), "a page holds 64 tokens; a single plan may run it all"
    assert (engine.prefix_cache_queries, engine.prefix_cache_hits, engine.num_pages_in_use) == (180, 89, 0)
    assert engine.cache.num_pages == 512 // 64


def test_calls_without_it_read_every_prompt():
    llm = LLM(build("llama"), backend="compiled", prefix_cache=False)
    assert [asked(llm, [DOCUMENT])[1] for _ in range(2)] == [[0], [0]]
