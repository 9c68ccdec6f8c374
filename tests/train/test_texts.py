"""Texts and conversations: what is read, what is held out, how they are packed, and which tokens count."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import pack
from train.sections import DataConfig
from train.texts import content_of, encode, encode_chat, rank_of, read_records, split_held_out
from train.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FORGETFUL = "{{ messages | length }}: {{ messages[-1]['content'] }}"
CHAT = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me, see."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Since."},
]


@pytest.fixture
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, vocab_size=280, model_max_length=64)


def test_records_come_from_lines_of_json_and_from_paragraphs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "n": 2}\n')
    assert list(read_records(DataConfig(path=str(tmp_path / "a.jsonl")))) == [{"text": "one"}, {"text": "two", "n": 2}]
    (tmp_path / "b.txt").write_text("\none\nline\n\n\ntwo")
    assert list(read_records(DataConfig(path=str(tmp_path / "b.txt")))) == [{"text": "one\nline\n"}, {"text": "two"}]


def test_records_come_from_parquet_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(path)
    assert [each["text"] for each in read_records(DataConfig(path=path))] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"data\.path must be a file or the id of a data set, got .*which does not exist"),
        ("bad.jsonl", b'{"text": 1}\n{oops\n', r"line 2 of .* must be JSON, got '\{oops'"),
        ("list.jsonl", b"[1]\n", r"line 1 of .* must be a JSON mapping, got '\[1\]'"),
        ("latin.txt", b"caf\xe9", r"data\.path must be a file in UTF-8"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records(DataConfig(path=str(tmp_path / name))))


def test_a_missing_package_and_an_unknown_data_set_are_named(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"cannot be read .*check data\.path, data\.name and data\.split"):
        list(read_records(DataConfig(path=str(tmp_path / "nowhere"))))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="'some/set' needs the package datasets; pip install datasets"):
        list(read_records(DataConfig(path="some/set")))


def test_a_missing_field_is_named_with_the_closest():
    with pytest.raises(ValueError, match=r"data\.text_field .* got 'text'; did you mean 'texts'\? fields: texts, n"):
        content_of({"texts": "a", "n": 1}, DataConfig(path="x"))
    with pytest.raises(ValueError, match="must be a field that holds a text, got '5' in field 'text'"):
        content_of({"text": 5}, DataConfig(path="x"))
    with pytest.raises(ValueError, match="holds a list of messages, got 'hi'"):
        content_of({"chat": "hi"}, DataConfig(path="x", messages_field="chat"))


@given(st.lists(st.text(min_size=1), min_size=2, unique=True), st.floats(0.1, 40))
def test_some_texts_are_held_out_whatever_their_order(texts, percent):
    train, held_out = split_held_out(texts, percent)
    assert sorted(train + held_out) == sorted(texts) and train and held_out
    assert sorted(split_held_out(texts[::-1], percent)[1]) == sorted(held_out)


@pytest.mark.parametrize("texts", [[], ["one"], ["same", "same"]])
def test_too_few_texts_are_refused(texts):
    with pytest.raises(ValueError, match=f"at least two different texts, .* got {len(texts)}"):
        split_held_out(texts, 2.0)


def test_packed_texts_are_separated_and_do_not_predict_each_other(tokenizer):
    texts = ["def f(x)", "return x", "x + 1"]
    stream = pack([encode(tokenizer, text) for text in texts], seed=0)
    tokens, labels = stream
    (ends,) = np.nonzero(tokens == tokenizer.eos_token_id)
    assert len(ends) == 4 and ends[0] == 0 and ends[-1] == len(tokens) - 1
    assert sorted(tokenizer.decode(tokens[a + 1 : b]) for a, b in pairwise(ends)) == sorted(texts)
    assert all(labels[end + 1] == -100 for end in ends[:-1])  # an end of text does not predict the next text
    counted = labels != -100
    assert np.array_equal(labels[counted], tokens[counted]) and counted[1:].sum() == len(tokens) - 4
    assert counted[ends[1:]].all()  # that a text ends is trained_positions


def test_a_text_that_is_cut_does_not_learn_to_end(tokenizer):
    tokens, labels = encode(tokenizer, "return x + 1 " * 4, max_length=6)
    assert len(tokens) == 6 and tokens[-1] == tokenizer.eos_token_id
    assert labels[-1] == -100 and (labels[1:-1] == tokens[1:-1]).all()


def test_only_what_the_assistant_said_counts(tokenizer):
    tokenizer.chat_template = CHATML
    tokens, labels = encode(tokenizer, CHAT)
    assert tokens[-1] == tokenizer.eos_token_id
    said = tokenizer.decode(labels[labels != -100])
    assert said == "Me, see.<|endoftext|>\nSince.<|endoftext|>\n"
    assert np.array_equal(labels[labels != -100], tokens[labels != -100])


def test_templates_that_cannot_be_used_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"data\.messages_field needs a tokenizer with a chat template"):
        encode_chat(tokenizer, CHAT)
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ValueError, match=r"cannot render the messages .*: it changes earlier turns"):
        encode_chat(tokenizer, CHAT)


def test_the_rank_of_a_content_depends_on_nothing_else():
    assert rank_of("a") == rank_of("a") != rank_of("b")
    assert rank_of([{"role": "user", "content": "a"}]) == rank_of(json.loads('[{"content": "a", "role": "user"}]'))
