"""Quantised models are targets of their own: speculation changes none of their tokens."""

from __future__ import annotations

import builtins
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec.calibrate import profile
from selfspec.loading import hub
from selfspec.model.quantized import KINDS, dense, is_dense
from tests.helpers import tokens_of
from tests.slow import slow
from tests.target import load

PROMPTS = [[5, 9, 14, 5, 9], [1, 2, 3]]


@pytest.mark.parametrize("kind", [KINDS[0], *map(slow, KINDS[1:])])
@pytest.mark.parametrize("temperature", [0.0, slow(0.9)])
def test_drafts_change_no_token_of_a_quantised_model(kind, temperature):
    target = load("demo", quantize=kind, device="cpu")
    options = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    plain = target.generate(PROMPTS, policy="plain", **options)
    for policy in ("fixed", "adaptive"):
        drafted = target.generate(PROMPTS, policy=policy, **options)
        assert tokens_of(drafted) == tokens_of(plain)
    if temperature == 0:
        for prompt, row in zip(PROMPTS, plain, strict=True):
            ids = target.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
            assert row.token_ids == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_are_rounded_and_nothing_else(kind):
    before, _ = hub.open_model("demo", device="cpu")
    after, _ = hub.open_model("demo", device="cpu", quantize=kind)
    levels = {"int8": 256, "int4": 16}[kind]
    changed = 0
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        if is_dense(new):
            assert torch.equal(old, new)
            assert "proj" not in name
            continue
        changed += 1
        numbers = dense(new)
        step = old.abs().amax() * 2 / (levels - 1)
        assert 0 < (numbers - old).abs().max() <= step
        assert len(numbers[0, :32].unique()) <= levels
    assert changed == 7 * before.config.num_hidden_layers
    assert is_dense(after.lm_head.weight)


def test_a_model_that_somebody_else_quantised_whole_is_served(model_folder):
    torchao = pytest.importorskip("torchao.quantization")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    target = load(model)
    plain, drafted = (target.generate([[1, 2, 3]], policy=name, max_tokens=16) for name in ("plain", "adaptive"))
    assert plain[0].token_ids == drafted[0].token_ids


def test_its_costs_are_kept_apart(model_folder):
    keys = [
        json.dumps(profile.costs_key(load(model_folder, backend="views", quantize=kind).split), sort_keys=True)
        for kind in (None, "int8")
    ]
    assert keys[0] != keys[1]


def test_what_cannot_be_rounded_is_one_sentence(model_folder, run, monkeypatch):
    with pytest.raises(ValueError, match="quantize must be one of int8, int4, got 'int3'"):
        load(model_folder, quantize="int3")
    with pytest.raises(ValueError, match="quantize is for a model given by name"):
        load(AutoModelForCausalLM.from_pretrained(model_folder), quantize="int8")
    with pytest.raises(ValueError, match="merge it into them first"):
        load(model_folder, quantize="int8", adapter=model_folder)
    assert run("generate", "--model", model_folder, "--quantize", "int3", "hello").code == 2
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torchao"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    done = run("generate", "--model", model_folder, "--quantize", "int8", "hello")
    assert done.code == 1
    assert done.err == "selfspec: --quantize needs the package torchao; install it with: pip install torchao\n"


def test_the_command_line_rounds(run, model_folder):
    texts = [
        json.loads(run("generate", "--model", model_folder, "--json", "--max-tokens", 16, *more, "hello").out)
        for more in ((), ("--quantize", "int8"), ("--quantize", "int8", "--policy", "plain"))
    ]
    assert texts[1]["tokens"] == texts[2]["tokens"]
