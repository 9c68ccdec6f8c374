"""Finished responses: what is found in them, in Python and in compiled code, and what is forgotten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.plan import CORPUS, OWN_TEXT, RESPONSES
from selfspec.drafting.lookup import RowLookup
from selfspec.drafting.ngram_index import MOST_MATCHED, CompiledIndex, Index
from selfspec.drafting.responses import Responses
from selfspec.kernels import compiled_call

token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=25)
texts = st.lists(st.tuples(token_lists, st.lists(st.integers(0, 3), max_size=25)), max_size=8)  # prompts and responses
BOTH = pytest.mark.parametrize("is_compiled", [False, True], ids=["python", "compiled"])


@pytest.fixture(autouse=True)
def _library():
    compiled_call.functions()


def naive(pairs, context, most, num_tokens):
    """(match length, continuation) by trying every suffix at every place that a response continues, last one first."""
    for length in range(min(most, len(context)), 0, -1):
        for prompt, response in reversed(pairs):
            text = [*prompt, *response]
            for end in range(len(text) - 1, len(prompt) - 1, -1):
                if end >= length and text[end - length : end] == context[-length:]:
                    return length, text[end : end + num_tokens]
    return 0, []


@example(pairs=[([1, 2], [3, 1, 2]), ([1, 2], [3, 3])], contexts=[[1, 2], [2, 3], [3, 1, 2]], most=5, num_tokens=4)
@given(texts, st.lists(token_lists, min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9))
def test_both_indices_find_the_latest_longest_match_and_draft_to_the_end_of_its_text(pairs, contexts, most, num_tokens):
    plain, compiled = Index(most), CompiledIndex(most)
    contexts += [prompt + response for prompt, response in pairs] + [prompt for prompt, _ in pairs]
    for prompt, response in pairs:
        for index in (plain, compiled):
            index.add_text([*prompt, *response], len(prompt) - 1)
    for context in contexts:
        expected, tokens = naive(pairs, context, most, num_tokens)
        for index in (plain, compiled):
            found = index.find(context)
            assert found.match == expected
            assert not expected or index.draft(found.place, num_tokens) == tokens
    assert len(plain) == len(compiled)


@BOTH
def test_the_prompt_is_context_and_only_the_response_is_drafted(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(compiled_call, "loaded", lambda: None)
    responses = Responses()
    responses.add([1, 2, 3, 4], [5, 6, 7])
    found = responses.find([9, 3, 4])
    assert found.length == 2 and responses.continuation(found, 9) == [5, 6, 7]
    assert responses.find([2, 3]) is None  # followed by prompt
    assert responses.find([6, 7]) is None  # followed by nothing
    responses.add([5], [6, 8])
    assert responses.continuation(responses.find([5, 6]), 2) == [8]  # the latest among equals
    assert (responses.compiled() is not None) == is_compiled
    assert not responses.find([7, 5]).length > 1  # no match across two texts


@BOTH
@settings(max_examples=40)
@given(pairs=texts, most_tokens=st.integers(2, 90))
def test_the_bound_is_kept_and_what_was_added_last_is_found(is_compiled, pairs, most_tokens):
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(compiled_call, "loaded", lambda: None)
        responses = Responses(most_tokens)
        for i, (rest, response) in enumerate(pairs):
            prompt = [100 + i, *rest]
            responses.add(prompt, response)
            assert len(responses) <= most_tokens
            if response and len(prompt) + len(response) < most_tokens // 2:
                assert responses.continuation(responses.find(prompt), 50) == response


def is_known(responses, prompt):
    return responses.find(prompt) is not None


def test_what_has_not_been_used_for_longest_is_forgotten_first():
    responses = Responses(60)  # three texts of ten tokens with their separators are half of it, less one
    pairs = [([100 * i], list(range(100 * i + 1, 100 * i + 9))) for i in range(12)]
    for pair in pairs[:6]:
        responses.add(*pair)
    assert [is_known(responses, prompt) for prompt, _ in pairs[:6]] == [True] * 6
    responses.add(*pairs[0])  # it is asked for again, and its response is finished again
    for pair in pairs[6:8]:
        responses.add(*pair)
    assert [is_known(responses, prompt) for prompt, _ in pairs[:8]] == [True] + [False] * 2 + [True] * 5
    held = len(responses)
    for _ in range(5):
        responses.add(*pairs[7])  # nothing is forgotten for what is there already
    assert len(responses) == held
    responses.clear()
    assert len(responses) == 0 and not is_known(responses, [100])


def test_a_response_longer_than_half_of_the_bound_is_not_kept():
    responses = Responses(20)
    responses.add([1], list(range(2, 12)))
    assert len(responses) == 0
    with pytest.raises(ValueError, match="most_tokens must be a whole number"):
        Responses(1)


class Corpus:
    """Texts of another source that always match so many tokens."""

    source = CORPUS

    def __init__(self, length):
        self.length = length

    def find(self, context):
        return self

    def continuation(self, match, num_tokens):
        return [77] * num_tokens

    def compiled(self):
        return None


def test_the_longest_match_drafts_and_the_own_text_leads_by_three_tokens():
    responses = Responses()
    responses.add([1, 2, 3, 4, 5, 6], [7, 8])
    for content, corpus, source in (
        ([4, 5, 6], 2, RESPONSES),
        ([4, 5, 6], 3, RESPONSES),  # the first among equals
        ([4, 5, 6], 4, CORPUS),
        ([6, 9, 4, 5, 6], 2, OWN_TEXT),  # 1 in its own text, 3 in the response
        ([6, 9, 2, 3, 4, 5, 6], 2, RESPONSES),  # 1 and 5
        ([6, 9, 2, 3, 4, 5, 6], 9, CORPUS),
    ):
        lookup = RowLookup(content, [responses, Corpus(corpus)])
        guess = lookup.draft(2)
        assert (lookup.source, guess.source, guess.match_length) == (source, source, lookup.match)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_an_index_that_is_incomplete_is_not_used_again(monkeypatch, problem):
    monkeypatch.setattr(compiled_call, "loaded", lambda: None)
    responses, calls, put = Responses(), [], Index._add

    def stop(*given):
        calls.append(given)
        if len(calls) == 4:
            raise problem
        put(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_add", stop)
        with pytest.raises(problem):
            responses.add([1], [2, 3, 1, 2, 4, 1, 2, 3, 4])
    assert not is_known(responses, [1])
    responses.add([1], [2, 3])
    assert responses.continuation(responses.find([1]), 9) == [2, 3]


def test_several_threads_add_and_find():
    responses = Responses(4000)

    def work(thread):
        for i in range(150):
            prompt = [1000 * thread + i, 1, 2, 3]
            responses.add(prompt, [*range(thread, thread + 12), i])
            found = responses.find(prompt)
            tokens = [] if found is None else responses.continuation(found, 13)  # others may have replaced it
            assert found is None or (found.length < MOST_MATCHED and 0 < len(tokens) <= 13)
        return len(responses)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) <= 4000
