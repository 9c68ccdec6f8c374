"""What is read, what is held out, how it is cut, and that text survives the tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.config import parse_config
from train.corpus import is_held_out, read_corpus
from train.data import Windows, encode_files, pack
from train.material import make_tokenizer, repeat_library
from train.sections import CorpusConfig
from train.tokenizer import END_OF_TEXT, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, vocab_size=280, model_max_length=64)


def test_corpus_takes_readable_files_in_a_stable_order(small_corpus):
    config = CorpusConfig(root=str(small_corpus), max_chars=20_000, held_out_percent=20.0)
    corpus = read_corpus(config)
    paths = [file.path for file in corpus.files]
    assert len(paths) == 40 and paths == sorted(paths)
    assert sum(file.is_test for file in corpus.files) == 10
    assert {file.path for file in corpus.held_out} == {path for path in paths if is_held_out(path, 20.0)}
    assert not {file.path for file in corpus.held_out} & {file.path for file in corpus.train}
    assert read_corpus(config) == corpus


def test_corpus_skips_named_parts_and_complains_when_nothing_is_left(small_corpus):
    config = CorpusConfig(root=str(small_corpus), skip=("test",), held_out_percent=20.0, max_chars=20_000)
    assert not any(file.is_test for file in read_corpus(config).files)
    with pytest.raises(ValueError, match="corpus needs files to train on and files held out, got 0 and 0"):
        read_corpus(CorpusConfig(root=str(small_corpus), skip=("test", "library"), max_chars=100))
    with pytest.raises(ValueError, match=r"corpus\.root must be a folder"):
        read_corpus(CorpusConfig(root=str(small_corpus / "nowhere")))


def test_held_out_does_not_depend_on_anything_but_the_path():
    assert [is_held_out(f"{number}.py", 50.0) for number in range(6)] == [True, True, True, False, False, True]
    share = sum(is_held_out(f"pkg/{number}.py", 3.0) for number in range(5000)) / 5000
    assert 0.02 < share < 0.04


def test_tokenizer_adds_nothing_and_splits_a_prompt_as_the_whole_text(tokenizer):
    text = "def f(x):\n    return x.y\n\n\tpass  # é\r\n"
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT and tokenizer.eos_token_id == 0
    assert 0 not in tokenizer(text)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    for prompt in ("def f(x):", "def f(x):\n", "def f(x):\n    ", "def f(x):\n    return x."):
        ids = tokenizer(prompt)["input_ids"]
        assert ids == whole[: len(ids)]


def test_windows_walk_through_the_whole_stream_before_repeating():
    stream = np.arange(32 * 9)
    windows = Windows(stream, lengths=[32], tokens_per_batch=64, num_batches=8, repeat=1, seed=0)
    rows = torch.cat([windows[index] for index in range(4)])  # one epoch: 8 windows, 2 in a batch
    assert rows.shape == (8, 32) and len({int(row[0]) for row in rows}) == 8
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 32)) for row in rows)
    again = Windows(stream, lengths=[32], tokens_per_batch=64, num_batches=80, repeat=1, seed=0)
    assert all(torch.equal(windows[index], again[index]) for index in (7, 0, 3))


def test_windows_mix_lengths_by_step_and_keep_the_batch_size():
    windows = Windows(np.arange(1000), lengths=[16, 16, 64], tokens_per_batch=64, num_batches=12, repeat=2, seed=1)
    assert [tuple(windows[index].shape) for index in range(7)] == [(4, 16)] * 4 + [(1, 64)] * 2 + [(4, 16)]
    with pytest.raises(ValueError, match="fewer than two windows"):
        Windows(np.arange(100), lengths=[64], tokens_per_batch=64, num_batches=1, repeat=1, seed=0)


def test_packed_files_are_separated_and_library_code_is_repeated(small_settings):
    config = parse_config(small_settings)
    corpus = read_corpus(config.corpus)
    tokenizer = make_tokenizer(config, corpus)
    files = repeat_library(corpus.train, 3)
    assert len(files) == sum(1 if file.is_test else 3 for file in corpus.train)
    stream = pack(encode_files(tokenizer, files), seed=0)
    assert stream[0] == 0 and stream[-1] == 0 and int((stream == 0).sum()) == len(files) + 1
