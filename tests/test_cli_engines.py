"""`--backend` and `--exact`: the same text by every engine and, in exact mode, from every policy in bfloat16."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from selfspec.hf import SelfSpeculative
from tests import cli_fixtures

run, model_folder = cli_fixtures.run, cli_fixtures.model_folder


def test_every_engine_writes_the_same_text_and_is_named(run, model_folder):
    start = ("generate", "--model", model_folder, "--json", "--max-tokens", 24, "--exit-layer", 1)
    documents = [json.loads(run(*start, "--backend", name, "hello there").out) for name in ("views", "compiled")]
    assert [document["engine"] for document in documents] == ["views", "compiled"]
    assert len({tuple(document["tokens"]) for document in documents}) == 1


@pytest.mark.parametrize("command", [("generate", "hello"), ("calibrate",)])
def test_engines_that_do_not_serve_the_model_are_one_sentence(run, model_folder, command):
    name, *rest = command
    model = [model_folder] if name == "calibrate" else ["--model", model_folder]
    done = run(name, *model, "--dtype", "float16", "--backend", "compiled", *rest)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(
        "selfspec: --backend 'compiled' serves Llama-shaped models in float32 or bfloat16 on CPU"
    )
    done = run(name, *model, "--backend", "turbo", *rest)
    assert done.code == 2 and "turbo" in done.err and "views" in done.err


def test_no_policy_changes_the_text(run, model_folder):
    start = ("generate", "--model", model_folder, "--dtype", "bfloat16", "--json", "--max-tokens", 24, "--exact")
    plain = run(*start, "--policy", "plain", "hello there")
    assert plain.code == 0
    for options in (["--exit-layer", 1], ["--policy", "pld"], ["--exit-layer", 3, "--num-speculative-tokens", 9]):
        done = run(*start, *options, "hello there")
        assert json.loads(done.out)["tokens"] == json.loads(plain.out)["tokens"]


def test_generate_of_transformers_can_be_exact_too(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="bfloat16")
    ids = model.dummy_inputs["input_ids"][:1]
    outputs = [
        model.generate(ids, custom_generate=SelfSpeculative(policy=policy, exact=True), max_new_tokens=16).tolist()
        for policy in ("plain", "fixed")
    ]
    assert outputs[0] == outputs[1]
