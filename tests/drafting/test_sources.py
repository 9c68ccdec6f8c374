"""Free guesses of a row are what a naive reading of its text, of a corpus and of earlier looks comes to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build
from selfspec.drafting.lookup import MOST_MATCHED
from selfspec.drafting.recycle import Recycled
from selfspec.drafting.sources import OWN_LEAD, Guesser, Look
from tests.drafting.test_lookup import naive, naive_alternatives
from tests.drafting.test_recycle import Dictionary

VOCAB, K = 5, 3
ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, min_size=1, max_size=40)
blocks = st.lists(st.lists(ids, min_size=1, max_size=6), max_size=6)  # of the rounds, one after another
candidates = st.lists(st.lists(ids, min_size=K, max_size=K), min_size=6, max_size=6)  # what a look finds, by place


class Naive:
    """The same guesses without an index; of pairs and tokens it remembers what a dictionary does."""

    def __init__(self, content, store):
        self.content, self.store, self.memory = content, store, Dictionary(K)

    def guess(self, num_tokens):
        """(tokens, match, whether they come from the corpus)."""
        tokens, match = naive(self.content, MOST_MATCHED, num_tokens)
        found = None if self.store is None else self.store.find(self.content)
        if found is not None and found.length > (match + OWN_LEAD if match else 0):
            return self.store.draft(self.content, num_tokens).tokens, found.length, True
        return tokens, match, False

    def candidates(self, token, previous):
        return int((previous, token) in self.memory.after), self.memory.candidates(token, previous)

    def first_candidates(self):
        before = [-1, *self.content]
        kind, likely = self.candidates(before[-1], before[-2])
        others = naive_alternatives(self.content, MOST_MATCHED)
        return (2, [*others, *(token for token in likely if token not in others)]) if others else (kind, likely)

    def look(self, block):
        chain, match, is_stored = self.guess(len(block))
        agrees = [a == b for a, b in zip(chain, block, strict=False)]
        right = agrees.index(False) if False in agrees else len(agrees)
        ranks = []
        for at in range(right, len(block)):
            before = [-1, *self.content, *block[:at]]
            kind, found = self.candidates(before[-1], before[-2]) if at else self.first_candidates()
            offered = chain[at] if at == right < len(chain) else None
            found = [token for token in found if token != offered]
            if found:
                place = [*found, block[at]].index(block[at])
                ranks.append((kind, offered is not None, place))
        return Look(match, is_stored, right, tuple(ranks))

    def learn(self, block, likely):
        before = [-1, *self.content, *block]
        at = len(self.content)
        self.memory.learn(before[at:-1], likely, before[at - 1 : -2] if at > 1 else [-1, *before[1:-2]])


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
@example([0, 1, 2, 0, 1, 3, 0, 1], [[2, 2], [3]], [[0, 1, 2]] * 6, CORPORA[1])
@example([3, 0, 0, 4, 1, 3, 2, 0, 4, 1], [[3, 2], [3]], [[0, 1, 2]] * 6, CORPORA[3])
@given(texts, blocks, candidates, st.sampled_from(CORPORA))
def test_guesses_and_what_they_would_have_come_to_are_those_of_a_naive_reading(stores, text, rounds, likely, corpus):
    store = None if corpus is None else stores(corpus)
    content = list(text)
    guesser, expected = Guesser(content, Recycled(VOCAB, K), store), Naive(content, store)
    for block in rounds:
        for num_tokens in (0, 1, 7):
            tokens, match, is_stored = expected.guess(num_tokens)
            assert guesser.chain(num_tokens) == tokens
            assert (guesser.match, guesser.is_stored) == (match, is_stored)
        assert guesser.last == ((content[-2] if len(content) > 1 else -1), content[-1])
        assert guesser.first_candidates() == expected.first_candidates()
        for token in range(VOCAB):
            for previous in range(-1, VOCAB):
                assert guesser.candidates(token, previous) == expected.candidates(token, previous)
        assert guesser.look(block) == expected.look(block)
        assert guesser.look(block, with_ranks=False) == expected.look(block)._replace(ranks=())
        guesser.learn(block, np.array(likely[: len(block)]))
        expected.learn(block, likely[: len(block)])
        content += block


def test_the_text_itself_has_the_word_unless_the_corpus_knows_a_far_longer_match(stores):
    store = stores(((4, 3, 0, 1, 2, 4),))
    assert OWN_LEAD == 3
    for content, chain, match, is_stored in (
        ([3, 2, 1, 3, 2], [1, 3, 2], 2, False),  # the corpus knows only the last token
        ([0, 0, 1, 2], [4], 3, True),  # and all of what the text itself has not had
        ([2, 1, 0, 3, 0, 1, 2], [1, 0, 3], 1, False),  # a match of 4 beside one of 1
        ([2, 1, 4, 3, 0, 1, 2], [4], 5, True),
    ):
        guesser = Guesser(content, None, store)
        assert (guesser.chain(3), guesser.match, guesser.is_stored) == (chain, match, is_stored)


def test_a_corpus_is_asked_once_for_every_content(stores, monkeypatch):
    asked, store = [], stores(((0, 1, 2, 3),))
    find = store.find
    monkeypatch.setattr(store, "find", lambda content: asked.append(list(content)) or find(content))
    content = [4, 0]
    guesser = Guesser(content, None, store)
    assert [guesser.match, guesser.is_stored, guesser.match] == [1, True, 1] and asked == [[4, 0]]
    content += [1]
    assert (guesser.match, guesser.chain(2)) == (2, [2, 3]) and asked == [[4, 0], [4, 0, 1], [4, 0, 1]]


def test_nothing_is_known_of_a_row_of_one_token():
    guesser = Guesser([3])
    assert (guesser.match, guesser.last, guesser.chain(4)) == (0, (-1, 3), [])
    assert guesser.first_candidates() == (0, []) and guesser.look([1, 2]) == Look(0, False, 0)


def test_rows_share_what_the_model_thought_likely():
    shared = Recycled(VOCAB, K)
    one, other = Guesser([0, 1], shared), Guesser([2, 1], shared)
    one.learn([3, 4], np.array([[3, 2, 0], [4, 1, 0]]))
    assert one.candidates(1, 0) == (1, [3, 2, 0]) and one.candidates(3, 1) == (1, [4, 1, 0])
    assert other.first_candidates() == (0, [3, 2, 0])  # after the token, in another pair
