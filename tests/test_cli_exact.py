"""`selfspec generate --exact`: the same text from every policy, in bfloat16 too."""

import json

import pytest
from transformers import AutoModelForCausalLM

from selfspec.hf import SelfSpeculative
from selfspec.model.exact import ExactStack
from tests import cli_fixtures

run, model_folder = cli_fixtures.run, cli_fixtures.model_folder


@pytest.fixture
def used(monkeypatch):
    """How often an exact stack was run."""
    calls, before = [], ExactStack.run
    monkeypatch.setattr(ExactStack, "run", lambda self, *given, **more: calls.append(1) or before(self, *given, **more))
    return calls


@pytest.mark.parametrize("engine", ["views", "compiled"])
def test_no_policy_changes_the_text(run, model_folder, used, engine):
    start = ("generate", "--model", model_folder, "--dtype", "bfloat16", "--json", "--max-tokens", 24, "--exact")
    start += ("--backend", engine)
    plain = run(*start, "--policy", "plain", "hello there")
    assert plain.code == 0 and bool(used) == (engine == "views")  # the compiled engine is exact as it is
    for options in (["--exit-layer", 1], ["--policy", "pld"], ["--exit-layer", 3, "--num-speculative-tokens", 9]):
        done = run(*start, *options, "hello there")
        assert json.loads(done.out)["tokens"] == json.loads(plain.out)["tokens"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_generate_of_transformers_can_be_exact_too(model_folder, used, dtype):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    ids = model.dummy_inputs["input_ids"][:1]
    outputs = [
        model.generate(ids, custom_generate=SelfSpeculative(policy=policy, exact=True), max_new_tokens=16)
        for policy in ("plain", "fixed")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    assert bool(used) == (dtype == "float16")  # in bfloat16 the layers are compiled, and exact as they are
