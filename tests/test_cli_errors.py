"""Bad input: one sentence on stderr, nothing on stdout, 2 for wrong usage and 1 for a run that cannot be."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec.cli.failure import Failure
from selfspec.cli.prompts import parse_lines
from selfspec.model.exit_heads import OLD_FORMATS, ExitHeads
from tests.cli_fixtures import assert_refused, save_model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "nan"], ["--temperature must be", "at least 0", "nan"]),
        (["--temperature", "warm"], ["--temperature", "number", "--help"]),
        (["--seed", str(1 << 70)], ["--seed", "64-bit"]),
        (["--stop-token-ids", "1,x"], ["--stop-token-ids", "whole numbers", "'x'"]),
        (["--policy", "magic"], ["--policy", "adaptive", "plain", "fixed", "gammatune+", "magic", "--help"]),
        (["--dtype", "int8"], ["--dtype", "float32", "bfloat16", "int8"]),
        (["--backend", "turbo"], ["--backend", "turbo", "views"]),
        (["--threads", "0"], ["--threads", "equal to 1"]),
        (["--policy", "plain", "--compare"], ["--compare", "plain"]),
        (["--drafters", "trees"], ["--drafters", "exit, lookup, copies", "trees"]),
        (["--drafters", "lookup", "--policy", "pld"], ["--drafters", "adaptive"]),
        (["--corpus", "no.store"], ["--corpus", "no.store", "does not exist"]),
        (["--n", "2", "--show-drafts"], ["--n goes without --show-drafts"]),
        (["--logprobs", "2"], ["--logprobs", "--json"]),
        (["--show-plan", "--quiet"], ["--show-plan", "--quiet"]),
        (["--no-chat", "--system", "be kind"], ["--system", "--no-chat"]),
        (["--prompts", "some.jsonl"], ["--prompts", "PROMPT"]),
        (["--svg", "no/such/folder/x.svg"], ["--svg", "existing folder"]),
        (["--warmth", "1"], ["--warmth", "--help"]),
        (["too", "many"], ["too", "--help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_are_refused_before_a_model_is_looked_for(run, arguments, words):
    assert_refused(run("generate", "abc", "--model", "/no/such/folder", *arguments), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exit-layer", "4"], ["--exit-layer", "1..3", "4"]),
        (["--drafters", "copies"], ["--drafters", "exit or lookup"]),
        (["--device", "toaster"], ["--device", "cpu", "cuda", "toaster"]),
        (["--device", "cuda:31"], ["--device", "not available", "cuda:31"]),
        (["--chat"], ["--chat", "template"]),
        (["--n", "2"], ["--n must be 1 with greedy decoding"]),
        (
            ["--dtype", "float16", "--backend", "compiled"],
            ["--backend 'compiled' serves Llama-shaped"],
        ),
        (["--system", "be kind"], ["--system", "template"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_does_not_fit_the_model_is_wrong_usage(run, model_folder, arguments, words):
    assert_refused(run("generate", "abc", "--model", model_folder, *arguments), 2, *words)


def test_a_command_is_needed(run):
    assert_refused(run(), 2, "generate", "chat", "inspect", "corpus", "--help")
    assert_refused(run("dance"), 2, "dance")


# ------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(("arguments", "stdin"), [([""], None), (["-"], b""), ([], b"\n")])
def test_an_empty_prompt_is_refused(run, arguments, stdin):
    assert_refused(run("generate", *arguments, stdin=stdin), 2, "prompt is empty", "at least one character")


def test_without_a_prompt_a_terminal_gets_an_example(run):
    assert_refused(run("generate"), 2, "prompt is missing", "selfspec generate '")


def test_stdin_must_be_utf_8(run):
    assert_refused(run("generate", "-", stdin=b"caf\xe9"), 2, "stdin", "not valid UTF-8", "byte 4")


def test_an_argument_must_be_utf_8(run):
    assert_refused(run("generate", "caf\udce9"), 2, "prompt", "not valid UTF-8")


def test_a_prompt_beyond_the_context_is_refused(run, model_folder):
    done = run("generate", "x" * 256, "--model", model_folder)
    assert_refused(done, 2, "256 tokens", "context holds 256", "shorten it by at least 1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json}", ["not valid JSON"]),
        (b'["a", "list"]', ["object", "list"]),
        (b"{}", ["prompt must be a text", "null"]),
        (b'{"prompt": 3}', ["prompt must be a text", "3"]),
        (b'{"prompt": ""}', ["prompt is empty"]),
        (b'{"prompt": "a", "temperature": 1}', ["unknown key 'temperature'", "max_tokens"]),
        (b'{"prompt": "a", "max_tokens": 0}', ["max_tokens", "at least 1", "0"]),
        (b'{"prompt": "a", "max_tokens": true}', ["max_tokens", "true"]),
        (b'{"prompt": "a", "seed": 1.5}', ["seed", "integer", "1.5"]),
        (b'{"prompt": "a", "seed": 99999999999999999999}', ["seed", "64 bits"]),
        (b'{"prompt": "a", "id": [1]}', ["id must be", "[1]"]),
        (b'{"prompt": "\xff"}', ["not valid UTF-8"]),
        (b'{"prompt": "\\ud800"}', ["not valid UTF-8"]),
        (json.dumps({"prompt": "x" * 256}).encode(), ["256 tokens", "context holds 256"]),
    ],
    ids=range(14),
)
def test_a_bad_line_is_named_and_nothing_is_run(run, model_folder, tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b'\n{"prompt": "fine too"}\n')
    assert_refused(run("generate", "--model", model_folder, "--prompts", path), 2, "prompts.jsonl, line 3", *words)


def test_a_file_without_prompts_is_refused(run, tmp_path):
    assert_refused(run("generate", "--prompts", tmp_path / "none.jsonl"), 2, "--prompts", "No such file")
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    assert_refused(run("generate", "--prompts", tmp_path / "empty.jsonl"), 2, "holds no prompt")


def test_a_byte_order_mark_and_windows_line_ends_are_read_over():
    made = parse_lines("prompts.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in made] == ["a", "b"]


def test_json_nested_without_end_is_refused_with_its_line():
    deep = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(Failure, match=r"^prompts\.jsonl, line 2: not valid JSON"):
        parse_lines("prompts.jsonl", b'{"prompt": "a"}\n' + deep)


# -------------------------------------------------------------------------------------------------------- models


@pytest.fixture
def refuse(run):
    """`generate` and `inspect` say the same about a model that cannot be loaded."""

    def call(folder, *words, commands=("generate", "inspect")):
        for command in commands:
            arguments = ["abc", "--model", folder] if command == "generate" else [folder]
            assert_refused(run(command, *arguments), 1, *words)

    return call


def test_a_missing_folder_is_named(refuse, tmp_path):
    refuse(tmp_path / "nowhere", "nowhere", "'demo'", "hub id")


def test_a_file_is_no_folder(refuse, model_folder):
    refuse(model_folder / "model.safetensors", "folder that holds it")


def test_a_folder_without_a_config_is_refused(refuse, tmp_path):
    refuse(tmp_path, "config.json", "save_pretrained")


def test_a_broken_config_is_refused(refuse, copy_of):
    (copy_of / "config.json").write_text("{", encoding="utf-8")
    refuse(copy_of, "config.json", "JSON")


def test_a_folder_without_a_tokenizer_cannot_read_text(refuse, tmp_path):
    refuse(save_model(tmp_path, tokenizer=False), "no tokenizer", commands=["generate"])


def test_a_damaged_tokenizer_is_refused(refuse, copy_of):
    (copy_of / "tokenizer.json").write_text('{"version"', encoding="utf-8")
    refuse(copy_of, "tokenizer cannot be read")


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_truncated_weights_are_refused(refuse, copy_of, kept):
    weights = copy_of / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * kept)])
    refuse(copy_of, "safetensors", "truncated or damaged", "again")


def test_missing_weights_are_refused(refuse, copy_of):
    weights = load_file(copy_of / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, copy_of / "model.safetensors", {"format": "pt"})
    refuse(copy_of, "2 weights", "model.layers.2.mlp.up_proj.weight")
    (copy_of / "model.safetensors").unlink()
    refuse(copy_of, "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "words"), [("telepath", ["telepath", "update transformers"]), ("vit", ["vit", "no causal language model"])]
)
def test_an_unknown_architecture_is_refused(refuse, copy_of, kind, words):
    config = json.loads((copy_of / "config.json").read_text(encoding="utf-8"))
    (copy_of / "config.json").write_text(json.dumps(config | {"model_type": kind}), encoding="utf-8")
    refuse(copy_of, *words)


def test_exit_heads_that_are_missing_broken_or_of_another_model_are_named(run, model_folder, tmp_path):
    def call(folder):
        return run("generate", "abc", "--model", model_folder, "--exit-heads", folder)

    assert_refused(call(tmp_path / "none"), 1, "exit heads", "no exit_heads.safetensors")
    ExitHeads([2], 48, 4).save(tmp_path)
    assert_refused(call(tmp_path), 2, "--exit-heads", "width 48", "width 32")
    (tmp_path / "exit_heads.safetensors").write_bytes(b"{}")
    assert_refused(call(tmp_path), 1, "exit heads", "truncated or damaged")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "calibrate", "tune"])
def test_heads_of_an_earlier_format_in_the_models_folder_are_named(run, copy_of, tmp_path, command):
    save_file({"a": torch.ones(2)}, copy_of / "exit_heads.safetensors", {"format": OLD_FORMATS[-1]})
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    )
    arguments = {"generate": ["abc", "--model", copy_of], "chat": ["--model", copy_of], "serve": [copy_of, "--port", 0]}
    arguments |= {"batch": [copy_of, "--input", lines, "--output", tmp_path / "out"]}
    arguments |= {"calibrate": [copy_of], "tune": [copy_of, "--prompts", lines, "--output", tmp_path]}
    done = run(command, *arguments[command], stdin=b"abc")
    assert_refused(done, 1, "heads of an earlier version", "--exit-heads none", "train them again")


def test_a_missing_adapter_is_named(run, model_folder, tmp_path):
    done = run("generate", "abc", "--model", model_folder, "--adapter", tmp_path / "none")
    assert_refused(done, 1, "adapter", "no such folder")


def test_offline_a_hub_id_is_one_sentence(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(
        run("generate", "abc", "--model", "selfspec-tests/absent"), 1, "selfspec-tests/absent", "hub", "'demo'"
    )
