"""`selfspec generate --exact`: the same text from every policy, in bfloat16 too."""

import json

import pytest
from transformers import AutoModelForCausalLM

from selfspec.errors import UnsupportedModelError
from selfspec.hf import SelfSpeculative
from tests import cli_fixtures

run, model_folder = cli_fixtures.run, cli_fixtures.model_folder


def test_no_policy_changes_the_text(run, model_folder):
    start = ("generate", "--model", model_folder, "--dtype", "bfloat16", "--json", "--max-tokens", 24, "--exact")
    plain = run(*start, "--policy", "plain", "hello there")
    assert plain.code == 0
    for options in (["--exit-layer", 1], ["--policy", "pld"], ["--exit-layer", 3, "--num-speculative-tokens", 9]):
        done = run(*start, *options, "hello there")
        assert json.loads(done.out)["tokens"] == json.loads(plain.out)["tokens"]
    refused = run(*start, "--backend", "views", "hello there")
    assert refused.code and "exact mode needs compiled layers on CPU or fused layers on CUDA" in refused.err


def test_generate_of_transformers_can_be_exact_too(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="bfloat16")
    ids = model.dummy_inputs["input_ids"][:1]
    outputs = [
        model.generate(ids, custom_generate=SelfSpeculative(policy=policy, exact=True), max_new_tokens=16)
        for policy in ("plain", "fixed")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    with pytest.raises(UnsupportedModelError, match="here its own modules run"):
        model.half().generate(ids, custom_generate=SelfSpeculative(exact=True), max_new_tokens=16)
