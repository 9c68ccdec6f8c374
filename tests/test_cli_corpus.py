"""`selfspec corpus`: a corpus becomes a file that can be drafted from, and what is wrong is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfspec.drafting import documents as corpus
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build
from selfspec.loading import hub
from selfspec.model.fingerprint import vocabulary_of
from tests.cli_fixtures import Terminal, assert_refused, save_model

CODE = Path(corpus.__file__)


@pytest.fixture(scope="module")
def tokenizer():
    return hub.open_tokenizer("demo")


def test_a_corpus_of_code_is_built_told_about_and_drafted_from(run, tmp_path, tokenizer):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "def main():\\n    return 0\\n", "id": 1}\n\n{"text": ""}\n{"text": "äö"}\n', "utf-8")
    file = tmp_path / "code.store"
    done = run("corpus", "build", "demo", CODE, lines, "-o", file)
    assert (done.code, done.err) == (0, "")
    whole = tokenizer(CODE.read_text("utf-8"))["input_ids"]
    sizes = [len(tokenizer(text)["input_ids"]) for text in ("def main():\n    return 0\n", "äö")]
    assert "documents    3" in done.out and f"tokens       {len(whole) + sum(sizes):,}\n" in done.out
    assert run("corpus", "info", file).out == done.out
    told = json.loads(run("corpus", "info", file, "--verify", "--json").out)
    assert told["verified"] and told["tokenizer"] == vocabulary_of(tokenizer) and told["num_documents"] == 3
    assert told["num_bytes"] == file.stat().st_size
    assert Datastore.open(file, tokenizer).find(whole[:200]).length == 16
    assert set(tmp_path.iterdir()) == {lines, file}


def test_the_file_holds_a_long_text_as_its_tokenizer_reads_it(tmp_path, tokenizer, monkeypatch):
    text = CODE.read_text("utf-8") + "\n\n\n   end" + "\r\n" + "x" * 500
    long = tmp_path / "long.txt"
    long.write_bytes(text.encode())
    whole = tokenizer(text)["input_ids"]
    for piece in (200, 1000):
        monkeypatch.setattr(corpus, "PIECE", piece)
        assert [ids.tolist() for ids in corpus.documents([long], tokenizer, "text")] == [whole]
        assert len([*corpus.pieces(long, "text")]) > 2


def test_another_field_can_be_the_text_and_batches_keep_the_order(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "TOGETHER", 20)
    lines, texts = tmp_path / "lines.ndjson", [f"answer number {i}" for i in range(9)]
    lines.write_text("".join(json.dumps({"answer": text}) + "\n" for text in texts), "utf-8")
    found = [tokenizer.decode(ids) for ids in corpus.documents([lines], tokenizer, "answer")]
    assert found == texts


def test_a_line_without_an_end_is_cut_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 10)
    (tmp_path / "a.txt").write_text("x" * 1000)
    parts = [*corpus.pieces(tmp_path / "a.txt", "text")]
    assert "".join(text for text, _ in parts) == "x" * 1000 and max(len(text) for text, _ in parts) < 200
    assert [ends for _, ends in parts] == [False] * (len(parts) - 1) + [True]


def test_how_far_it_is_is_shown_on_a_terminal(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    assert run("corpus", "build", "demo", CODE, "-o", tmp_path / "a.store").code == 0
    assert all(words in screen.getvalue() for words in ("building a.store", "sorting", "writing"))


def test_quiet_and_json_are_for_programs(run, tmp_path):
    done = run("corpus", "build", "demo", CODE, "-o", tmp_path / "a.store", "--quiet", "--json")
    assert done.err == "" and json.loads(done.out)["num_documents"] == 1


# ------------------------------------------------------------------------------------------------------------ errors


def test_wrong_usage_is_refused_before_a_model_is_looked_for(run, tmp_path):
    def build(*arguments):
        return run("corpus", "build", "/no/such/model", *arguments)

    (tmp_path / "notes").write_text("mine")
    assert_refused(run("corpus"), 2, "build or info", "--help")
    assert_refused(build("-o", "a"), 2, "CORPUS", "--help")
    assert_refused(build(CODE), 2, "--output", "--help")
    assert_refused(build(tmp_path, "-o", tmp_path / "a"), 2, "CORPUS", "is a directory")
    assert_refused(build(tmp_path / "none", "-o", tmp_path / "a"), 2, "CORPUS", "none", "does not exist")
    assert_refused(build(CODE, "-o", tmp_path), 2, "--output", "is a directory")
    assert_refused(build(CODE, "-o", tmp_path / "no" / "a"), 2, "there is no folder")
    assert_refused(build(CODE, "-o", tmp_path / "notes"), 2, "is there already and no indexed corpus")
    assert (tmp_path / "notes").read_text() == "mine"


def test_what_cannot_be_built_is_said_in_a_sentence_and_leaves_nothing(run, tmp_path):
    files = {
        "bad.jsonl": (b'{"text": "a b c"}\n{"text": 3}\n', ["line 2", "'text'", "--field"]),
        "list.jsonl": (b"[1]\n", ["line 1", "no text", "--field"]),
        "broken.jsonl": (b'{"text": "a"\n', ["line 1", "not valid JSON"]),
        "latin.txt": (b"caf\xe9", ["not valid UTF-8"]),
        "latin.jsonl": (b'{"text": "caf\xe9"}', ["not valid UTF-8"]),
        "empty.txt": (b"", ["at least two tokens"]),
    }
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        done = run("corpus", "build", "demo", tmp_path / name, "-o", tmp_path / "a.store", "-q")
        assert_refused(done, 1, *words)
    assert {file.name for file in tmp_path.iterdir()} == set(files)


def test_half_a_surrogate_pair_is_no_reason_to_stop(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one \\ud800 two"}\n')
    assert run("corpus", "build", "demo", tmp_path / "a.jsonl", "-o", tmp_path / "a.store").code == 0


def test_a_model_that_is_not_there_or_cannot_read_is_refused(run, tmp_path):
    save_model(tmp_path / "mute", tokenizer=False)
    refused = run("corpus", "build", tmp_path / "mute", CODE, "-o", tmp_path / "a.store")
    assert_refused(refused, 1, "has no tokenizer")
    refused = run("corpus", "build", "/no/such/model", CODE, "-o", tmp_path / "a.store")
    assert_refused(refused, 1, "/no/such/model", "hub id")


def test_a_damaged_datastore_is_refused(run, tmp_path):
    file = tmp_path / "a.store"
    assert_refused(run("corpus", "info", file), 1, "there is no datastore", "selfspec corpus build")
    assert_refused(run("corpus", "info", tmp_path), 1, "is a folder")
    assert run("corpus", "build", "demo", CODE, "-o", file, "-q").code == 0
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run("corpus", "info", file).code == 0
    assert_refused(run("corpus", "info", file, "--verify"), 1, "body", "damaged", "build it again")
    file.write_bytes(content[:-1])
    assert_refused(run("corpus", "info", file), 1, "bytes, got")


def test_drafts_are_not_looked_up_in_what_does_not_fit_the_model(run, tmp_path, tokenizer):
    file, call = tmp_path / "a.store", ("generate", "def", "--model", "demo", "--corpus")
    assert_refused(run(*call, CODE), 1, "is no datastore", "selfspec corpus build")
    build(file, [[1, 2, 3]], "another", 5)
    assert_refused(run(*call, file), 1, "another tokenizer", "build it again")
    build(file, [[1, 2, 70000]], vocabulary_of(tokenizer), 70001)
    assert_refused(run(*call, file), 1, "70001 tokens", "build it again")
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(run(*call, file), 1, "bytes, got", "build it again")
