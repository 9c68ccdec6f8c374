"""A datastore finds what a naive search over its documents finds, on any machine that shares its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selfspec.control.plan import CORPUS
from selfspec.core import Draft
from selfspec.drafting import suffixes
from selfspec.drafting.datastore import MOST_PLACES, Datastore
from selfspec.drafting.datastore_build import build
from selfspec.drafting.datastore_file import DEPTH, FORMAT, MAGIC, PAGE, verify
from selfspec.drafting.ngram_index import draft, find
from selfspec.errors import DatastoreError
from selfspec.kernels.compiled_call import functions
from selfspec.model.fingerprint import vocabulary_of
from tests.tokenizers import byte_tokenizer, spaced_tokenizer

ROOT = Path(__file__).parents[2]
IDS = {2: [0, 1, 254, 255, 256, 65534], 4: [0, 1, 255, 65535, 65536, 69999]}  # whose bytes look alike
VOCABULARY = {2: 65535, 4: 70000}


def naive(documents, context, most):
    """(length, where each match ends as (document, end)) by trying every suffix at every place."""
    for length in range(min(most, len(context)), 0, -1):
        suffix = context[len(context) - length :]
        ends = [
            (d, end)
            for d, document in enumerate(documents)
            for end in range(length, len(document))
            if document[end - length : end] == suffix
        ]
        if ends:
            return length, ends
    return 0, []


def drafted(store, context, num_tokens):
    match = store.find(context)
    return Draft([], 0, CORPUS) if match is None else Draft(store.continuation(match, num_tokens), match.length, CORPUS)


@st.composite
def corpora(draw):
    width = draw(st.sampled_from([2, 4]))
    ids = st.sampled_from(IDS[width][: draw(st.integers(1, 6))])
    documents = draw(st.lists(st.lists(ids, max_size=40), min_size=1, max_size=6))
    documents.append(draw(st.lists(ids, min_size=2, max_size=40)))
    contexts = draw(st.lists(st.lists(st.sampled_from(IDS[width]), max_size=20), max_size=6))
    contexts += [document[:end] for document in documents for end in (3, len(document))]
    return VOCABULARY[width], documents, contexts


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("datastores") / "corpus.store"


@example((65535, [[0] * 30, [1, 0, 0]], [[0] * 20, [1, 0]]), 16)
@given(corpora(), st.integers(1, DEPTH))
def test_it_finds_what_a_naive_search_finds(file, corpus, most):
    vocab_size, documents, contexts = corpus
    build(file, documents, "", vocab_size)
    store = Datastore.open(file)
    for context in contexts:
        length, ends = naive(documents, context, most)
        match = store.find(context, most)
        if length == 0:
            assert match is None and drafted(store, context, 5) == Draft([], 0, CORPUS)
            continue
        assert (match.length, match.num_places) == (length, len(ends))


@given(corpora(), st.integers(1, 10))
def test_a_draft_takes_the_most_frequent_token_every_time(file, corpus, num_tokens):
    vocab_size, documents, contexts = corpus
    build(file, documents, "", vocab_size)
    store = Datastore.open(file)
    for context in contexts:
        length, ends = naive(documents, context, DEPTH)
        tokens, match, _ = drafted(store, context, num_tokens)
        assert match == length and len(tokens) <= num_tokens
        if len(ends) > MOST_PLACES:
            continue
        left = [documents[d][end : end + num_tokens] for d, end in ends]
        for i, token in enumerate(tokens):
            counts = Counter(one[i] for one in left if len(one) > i)
            assert counts[token] == max(counts.values())
            left = [one for one in left if one[i : i + 1] == [token]]
        assert len(tokens) == num_tokens or all(len(one) == len(tokens) for one in left)


@example((65535, [[1, 2, 3]] * 70 + [[1, 4, 5]] * 30, [[0, 1], [1, 70_000], [70_000, 1]]), 3)
@given(corpora(), st.integers(1, 10))
def test_compiled_code_reads_the_file_as_python_does(file, corpus, num_tokens):
    functions()
    vocab_size, documents, contexts = corpus
    build(file, documents, "", vocab_size)
    store = Datastore.open(file)
    [compiled] = store.compiled()
    for context in contexts:
        tokens, length, _ = drafted(store, context, num_tokens)
        found = find(compiled.address, context, DEPTH)
        assert found.match == length
        assert not length or draft(compiled.address, found, num_tokens) == tokens


def test_of_many_places_a_sample_tells_the_most_frequent(file):
    build(file, [[1, 2, 3]] * 700 + [[1, 4, 5]] * 300, "", 10)
    store = Datastore.open(file)
    match = store.find([0, 1])
    assert (match.length, match.num_places) == (1, 1000)
    assert drafted(store, [0, 1], 2) == Draft([2, 3], 1, CORPUS)


def test_neither_match_nor_draft_crosses_the_end_of_a_document(file):
    build(file, [[1, 2, 3], [4, 5, 6]], "", 10)
    store = Datastore.open(file)
    assert drafted(store, [1, 2], 5) == Draft([3], 2, CORPUS)
    assert store.find([2, 3]) is None  # nothing follows
    assert drafted(store, [3, 4], 5) == Draft([5, 6], 1, CORPUS)  # 3 is of another document


def test_tokens_beyond_the_vocabulary_match_nothing(file):
    build(file, [[1, 2, 3, 2]], "", 4)
    store = Datastore.open(file)
    assert store.find([4]) is None and store.find([]) is None and store.find([1 << 40]) is None
    assert store.find([70000, 2]).length == 1
    with pytest.raises(ValueError, match=r"most must lie in 1..16, got 17"):
        store.find([1], 17)


@example([0] * 50, 3)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(2, 9))
def test_suffixes_are_sorted_in_chunks_as_in_one_piece(values, chunk):
    cells = np.array([*values, 0], np.uint16)  # a separator at the end
    content = cells.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffixes, "CHUNK", chunk)
        found = suffixes.sort_suffixes(cells, DEPTH).tolist()
    assert sorted(found) == list(range(len(content)))

    def text(position):  # up to the separator, beyond which no order is promised
        rest = content[position : position + DEPTH]
        return rest[: rest.index(0)] if 0 in rest else rest

    assert [text(position) for position in found] == sorted(map(text, range(len(content))))


# --------------------------------------------------------------------------------------------------------- building


def test_a_builder_that_is_interrupted_leaves_what_was_there(tmp_path):
    def documents(problem):
        yield [1, 2, 3]
        raise problem

    file = tmp_path / "a.store"
    with pytest.raises(KeyboardInterrupt):
        build(file, documents(KeyboardInterrupt()), "", 10)
    assert list(tmp_path.iterdir()) == []
    build(file, [[1, 2, 3]], "", 10)
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build(file, documents(KeyboardInterrupt()), "", 10)
    for wrong in ([[1, 10]], [[-1, 2]], [], [[], [3], [4]]):
        with pytest.raises(
            ValueError, match=r"token ids must lie in 0..9, got|needs a document of at least two tokens"
        ):
            build(file, wrong, "", 10)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == before
    with pytest.raises(IsADirectoryError):
        build(tmp_path, [[1, 2]], "", 10)


def test_a_datastore_is_as_readable_as_any_file(tmp_path):
    build(tmp_path / "a.store", [[1, 2]], "", 10)
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.store").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_it_takes_six_bytes_per_token_of_a_small_vocabulary(tmp_path):
    rng = np.random.default_rng(0)
    about = build(tmp_path / "a.store", [rng.integers(0, 1000, 50_000)], "", 1000)
    assert about.num_bytes == (tmp_path / "a.store").stat().st_size < 6 * 50_000 + 2 * PAGE + 4 * 1000


# ---------------------------------------------------------------------------------------------------------- trouble


@pytest.fixture
def good(tmp_path):
    file = tmp_path / "good.store"
    build(file, [[1, 2, 3, 1, 2, 4]], "of this tokenizer", 10)
    return file


def test_a_truncated_file_is_refused(good):
    whole = good.read_bytes()
    for size in range(0, len(whole), 37):
        good.write_bytes(whole[:size])
        with pytest.raises(DatastoreError, match=r"ends within its header|must have \d+ bytes|is no datastore"):
            Datastore.open(good)
    good.write_bytes(whole + b"\0")
    with pytest.raises(DatastoreError, match="bytes, got"):
        Datastore.open(good)


def test_a_damaged_header_is_refused_at_once_and_a_damaged_body_when_asked(good):
    whole = good.read_bytes()
    assert verify(good).num_tokens == 6
    end = whole.rindex(b"}", 0, PAGE) + 1
    for at in [*range(0, end, 7), PAGE, len(whole) - 1]:
        good.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        if at < PAGE:
            with pytest.raises(DatastoreError, match=r"damaged|is no datastore|has format"):
                Datastore.open(good)
        else:
            Datastore.open(good)
        with pytest.raises(DatastoreError):
            verify(good)


def test_ids_beyond_the_vocabulary_of_a_damaged_body_are_never_drafted(good):
    assert drafted(Datastore.open(good), [3, 1, 2], 3).token_ids  # there is something to draft
    whole = bytearray(good.read_bytes())
    cells = whole.index(bytes([0, 5, 0, 3, 0, 2]), PAGE)  # 4, 2 and 1, plus 1
    whole[cells : cells + 2] = b"\xff\xff"
    good.write_bytes(whole)
    store = Datastore.open(good)
    assert all(token < 10 for num in range(4) for token in drafted(store, [3, 1, 2], num).token_ids)


def test_what_is_no_datastore_or_a_newer_one_is_refused_in_a_sentence(good, tmp_path):
    with pytest.raises(FileNotFoundError, match="selfspec corpus build"):
        Datastore.open(tmp_path / "none")
    with pytest.raises(DatastoreError, match="is a folder"):
        Datastore.open(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DatastoreError, match="text is no datastore; give a file"):
        Datastore.open(tmp_path / "text")
    newer = good.read_bytes().replace(MAGIC + bytes([FORMAT]), MAGIC + bytes([FORMAT + 1]), 1)
    good.write_bytes(newer)
    with pytest.raises(DatastoreError, match=f"format {FORMAT + 1} .* format {FORMAT}; update selfspec"):
        Datastore.open(good)


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path):
    file, ours, other = tmp_path / "a.store", byte_tokenizer(), spaced_tokenizer()
    build(file, [[1, 2]], vocabulary_of(ours), 257)
    assert Datastore.open(file, byte_tokenizer()).about.vocab_size == 257
    with pytest.raises(DatastoreError, match="another tokenizer; build it again"):
        Datastore.open(file, other)
    ours.add_tokens(["one more"])
    with pytest.raises(DatastoreError, match="another tokenizer"):
        Datastore.open(file, ours)


# ------------------------------------------------------------------------------------------------- several processes

READING = """
import json, sys
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_file import verify
store = Datastore.open(sys.argv[2])
contexts = json.loads(sys.stdin.readline())
print(json.dumps([store.continuation(store.find(context), 6) for context in contexts]), flush=True)
seen, tries = set(), 0
while len(seen) < 2 or tries < 10:
    seen.add(verify(sys.argv[1]).num_tokens)
    tries += 1
print(sorted(seen))
"""


def start(*files):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", READING, *files], stdin=pipe, stdout=pipe, env=variables, text=True)


def test_another_process_drafts_the_same_and_sees_the_old_file_or_the_new_one_whole(tmp_path):
    rng = np.random.default_rng(0)
    documents = rng.integers(0, 5, (20, 500)).tolist()
    build(tmp_path / "other.store", documents, "", 5)
    other, contexts = Datastore.open(tmp_path / "other.store"), rng.integers(0, 5, (50, 8)).tolist()
    expected = [drafted(other, context, 6).token_ids for context in contexts]
    file, old, new = tmp_path / "a.store", [[1, 2, 3]] * 600, [[1, 4, 5]] * 1000
    build(file, old, "", 10)
    store = Datastore.open(file)
    with start(file, tmp_path / "other.store") as reader:
        print(json.dumps(contexts), file=reader.stdin, flush=True)
        assert json.loads(reader.stdout.readline()) == expected
        while reader.poll() is None:
            for documents in (new, old):
                build(file, documents, "", 10)
                assert drafted(store, [1], 2) == Draft([2, 3], 1, CORPUS)  # whoever has the first one open keeps it
        assert json.loads(reader.stdout.readline()) == [1800, 3000] and reader.returncode == 0
    build(file, new, "", 10)
    assert drafted(Datastore.open(file), [1], 2) == Draft([4, 5], 1, CORPUS)
