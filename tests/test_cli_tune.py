"""`selfspec tune`: prompts of a file become exit heads in a folder, and other commands draft with them."""

from __future__ import annotations

import json

import pytest

from selfspec.cli.tune import read_workload
from selfspec.model.exit_heads import FILE, ExitHeads
from tests.cli_fixtures import assert_refused

TEXTS = [f"def f{n}(x):" for n in range(10)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(TEXTS) + "\n")
    return file


def test_heads_are_made_and_used(run, model_folder, texts, tmp_path):
    out = tmp_path / "heads"
    given = "tune", model_folder, "--prompts", texts, "--output", out, "--minutes", 0.01, "--max-tokens", 12
    done = run(*given, "--keep")
    assert done.code == 0 and "| adaptive with the heads |" in done.out, done.err
    assert f"--exit-heads {out}" in done.out and "plan: answers to" in done.err and (out / FILE).is_file()
    told = "generate", "--model", model_folder, TEXTS[0], "--max-tokens", 20
    plain = run(*told, "--policy", "plain")
    assert run(*told, "--exit-heads", out).out == plain.out
    layer = str(ExitHeads.load(out).layers[0])
    drafted = run(*told, "--exit-heads", out, "--exit-layer", layer, "--num-speculative-tokens", 2)
    assert drafted.out == plain.out
    document = json.loads(run(*given, "--json", "--keep", "--quiet").out)
    assert document["folder"] == str(out) and document["heads"]["exits"] and document["num_different"] == 0


def test_prompts_are_texts_or_bodies(tmp_path, texts):
    assert read_workload(texts) == TEXTS
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    file.write_text("\n".join(json.dumps(one) for one in ("a text", {"prompt": "b", "max_tokens": 3}, whole)))
    text, body, chat = read_workload(file)
    assert text == "a text" and (body["prompt"], body["max_tokens"]) == ("b", 3) and chat["messages"] == messages


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("holds no prompt",)),
        ('{"prompt": "a"', ("line 1", "not valid JSON")),
        ('{"text": "a"}', ("line 1", "needs a prompt or messages")),
        ('"a"\n""', ("line 2", "the text is empty")),
        ("[1, 2]", ("line 1", "must be an object")),
        ('"a"\n"b"', ("prompts must be at least 8 different ones, got 2",)),
    ],
)
def test_bad_prompts_are_one_sentence(run, model_folder, tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert_refused(run("tune", model_folder, "--prompts", file, "--output", tmp_path / "out", "--quiet"), 2, *words)


def test_other_bad_input_is_one_sentence(run, model_folder, texts, tmp_path):
    assert_refused(run("tune", model_folder, "--prompts", texts, "--output", texts), 2, "--output must be a folder")
    assert_refused(run("tune", model_folder, "--prompts", tmp_path / "none.txt"), 2, "does not exist")
    assert_refused(run("tune", tmp_path / "nowhere", "--prompts", texts, "--quiet"), 1, "nowhere")
    assert_refused(run("tune", model_folder, "--prompts", texts, "--minutes", 0), 2, "--minutes")


def test_heads_of_another_model_are_refused(run, model_folder, tmp_path):
    ExitHeads([1], 32, 4, "0123").save(tmp_path / "heads")
    told = "generate", "--model", model_folder, "def", "--exit-heads", tmp_path / "heads", "--quiet"
    assert_refused(run(*told), 2, "are of the weights 0123")
