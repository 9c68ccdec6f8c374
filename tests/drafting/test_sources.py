"""Free guesses of a row are what a naive reading of its text, and of a corpus comes to."""

from __future__ import annotations

import ctypes
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.control.plan import CORPUS, MATCH_EDGES, OWN_TEXT, SOURCES, lookup_bin
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build
from selfspec.drafting.lookup import OWN_LEAD, RowLookup
from selfspec.drafting.ngram_index import MOST_MATCHED
from selfspec.drafting.responses import Responses
from selfspec.kernels import compiler
from selfspec.kernels.compiled_call import functions
from tests.drafting.test_lookup import naive, naive_tally

VOCAB = 5
ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, min_size=1, max_size=40)
blocks = st.lists(st.lists(ids, min_size=1, max_size=6), max_size=6)  # of the rounds, one after another


class Naive:
    """The same guesses without an index."""

    def __init__(self, content, store):
        self.content, self.store = content, store

    def guess(self, num_tokens):
        """(tokens, match, source)."""
        tokens, match = naive(self.content, MOST_MATCHED, num_tokens)
        found = None if self.store is None else self.store.find(self.content)
        if found is not None and found.length > (match + OWN_LEAD if match else 0):
            return self.store.continuation(found, num_tokens), found.length, CORPUS
        return tokens, match, OWN_TEXT


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A corpus to draft from, by its documents."""
    made, folder = {}, tmp_path_factory.mktemp("stores")

    def store_of(documents):
        if documents not in made:
            path = folder / f"{len(made)}.store"
            build(path, [list(document) for document in documents], "", VOCAB)
            made[documents] = Datastore.open(path)
        return made[documents]

    return store_of


CORPORA = [None, ((0, 1, 2, 3, 0, 1), (3, 3, 3, 2, 2)), ((1, 0, 1, 4, 4, 0),), ((2, 0, 4, 1, 3) * 4,)]


@settings(max_examples=100)
@example([0, 1, 2, 0, 1, 3, 0, 1], [[2, 2], [3]], CORPORA[1])
@example([3, 0, 0, 4, 1, 3, 2, 0, 4, 1], [[3, 2], [3]], CORPORA[3])
@given(texts, blocks, st.sampled_from(CORPORA))
def test_guesses_and_how_often_they_would_have_been_right_are_those_of_a_naive_reading(stores, text, rounds, corpus):
    store = None if corpus is None else stores(corpus)
    content = list(text)
    guesser, expected = RowLookup(content, [] if store is None else [store]), Naive(content, store)
    for block in rounds:
        for num_tokens in (0, 1, 7):
            tokens, match, source = expected.guess(num_tokens)
            guess = guesser.draft(num_tokens)
            assert guess == (tokens, match, source) if num_tokens else guess.token_ids == []
            assert guesser.match == match
        start = len(content)
        guesser.take_tally()
        content += block
        assert guesser.take_tally() == naive_tally(content, MOST_MATCHED, start)


def test_compiled_code_has_the_sources_and_the_bins_of_plans():
    header = (compiler.SOURCES / "lookup.h").read_text()
    edges, sources = re.search(r"EDGES\[\] = \{(.*?)\}.*NUM_SOURCES = (\d+);", header).groups()
    assert [int(edge) for edge in edges.split(",")] == list(MATCH_EDGES)
    assert int(sources) == len(SOURCES)


class Choice(ctypes.Structure):
    """`Choice` of `kernels/cpu/lookup.h`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("match", "place", "source", "bin")] + [("texts", ctypes.c_void_p)]


def chosen(texts, num_tokens):
    """The draft that a compiled round makes: (tokens, match, source), and its bin."""
    lib, count, choice = functions(), len(texts.others), Choice()
    addresses = (ctypes.c_void_p * count)(*[one.address for _, one in texts.others])
    sources = (ctypes.c_int64 * count)(*[source for source, _ in texts.others])
    own = ctypes.c_void_p(texts.own.address)
    lib.selfspec_lookup(own, addresses, sources, ctypes.c_int64(count), ctypes.byref(choice))
    if not choice.match:
        return ([], 0, OWN_TEXT), None
    tokens = (ctypes.c_int64 * num_tokens)()
    drafted = lib.selfspec_texts_draft(choice.texts, ctypes.byref(choice), num_tokens, tokens)
    return (tokens[:drafted], choice.match, choice.source), choice.bin


@settings(max_examples=150)
@example([3, 2, 0, 4, 1, 3, 0, 4, 1], [([2, 0], [4, 1, 3, 2])], [[3, 2]], CORPORA[3])
@example([3, 4, 0, 0, 1, 3], [([4, 0, 0], [1, 3, 2])], [], None)  # 1 in its own text, 5 in the response
@example([3, 4, 0, 0, 2, 3], [([4, 0, 0], [2, 1]), ([0, 0], [2, 3, 3])], [], None)  # 1 and 4
@given(texts, st.lists(st.tuples(texts, texts), max_size=5), blocks, st.sampled_from(CORPORA))
def test_compiled_rounds_draft_what_python_does(stores, text, finished, rounds, corpus):
    functions()
    responses = Responses(100)
    for prompt, response in finished:
        responses.add(prompt, response)
    content, others = list(text), [responses, *([] if corpus is None else [stores(corpus)])]
    lookup = RowLookup(content, others)
    for block in [[], *rounds]:
        content += block
        drafted, at = chosen(lookup.compiled(), 6)
        assert drafted == lookup.draft(6)
        assert at is None or at == lookup_bin(lookup.match, lookup.source)


def test_the_text_itself_has_the_word_unless_the_corpus_knows_a_far_longer_match(stores):
    store = stores(((4, 3, 0, 1, 2, 4),))
    assert OWN_LEAD == 3
    for content, chain, match, source in (
        ([3, 2, 1, 3, 2], [1, 3, 2], 2, OWN_TEXT),  # the corpus knows only the last token
        ([0, 0, 1, 2], [4], 3, CORPUS),  # and all of what the text itself has not had
        ([2, 1, 0, 3, 0, 1, 2], [1, 0, 3], 1, OWN_TEXT),  # a match of 4 beside one of 1
        ([2, 1, 4, 3, 0, 1, 2], [4], 5, CORPUS),
    ):
        guesser = RowLookup(content, [] if store is None else [store])
        assert guesser.draft(3) == (chain, match, source) and guesser.match == match


def test_a_corpus_is_asked_once_for_every_content(stores, monkeypatch):
    asked, store = [], stores(((0, 1, 2, 3),))
    find = store.find
    monkeypatch.setattr(store, "find", lambda content: asked.append(list(content)) or find(content))
    content = [4, 0]
    guesser = RowLookup(content, [] if store is None else [store])
    assert [guesser.match, guesser.match] == [1, 1] and asked == [[4, 0]]
    content += [1]
    assert guesser.match == 2 and asked == [[4, 0], [4, 0, 1]]
    assert guesser.draft(2) == ([2, 3], 2, CORPUS)


def test_nothing_is_known_of_a_row_of_one_token():
    guesser = RowLookup([3])
    assert (guesser.match, guesser.draft(4).token_ids) == (0, [])
