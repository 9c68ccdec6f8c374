"""The user's model is only ever read: bit for bit the same, and set up as it was, whatever is done with it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.errors import UnsupportedModelError
from selfspec.model.split_model import SplitModel
from tests.helpers import Schedule, decode, generate, make_prompts, tokens_of
from tests.model.test_families import check_untouched, photograph
from tests.models import build
from tests.target import Target

RAGGED = (12, 7, 1, 20)


def test_the_model_is_untouched_when_it_is_refused(monkeypatch):
    model = build("gemma2")
    before = photograph(model)
    run = SplitModel.run
    monkeypatch.setattr(
        SplitModel, "run", lambda self, rows, start, stop, given: run(self, rows, start, stop, given) * 2
    )
    with pytest.raises(UnsupportedModelError):
        Target(model)
    check_untouched(before, model)


def test_a_model_in_training_mode_with_dropout_decodes_as_in_evaluation_and_stays_in_training():
    dropout = {"attention_dropout": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    for family in ("llama", "gpt2"):
        options = {k: v for k, v in dropout.items() if (k == "attention_dropout") != (family == "gpt2")}
        model, prompts = build(family, **options), make_prompts(RAGGED)
        expected = [generate(model, prompt, 10) for prompt in prompts]
        model.train()
        before = photograph(model)
        target = Target(model)
        assert tokens_of(decode(target, prompts, Schedule(1, 4), SamplingParams(max_tokens=10))) == expected
        check_untouched(before, model)
        assert all(module.training for module in model.modules())


def test_weights_are_shared_and_a_change_to_the_model_is_honoured():
    model, prompts = build("llama"), make_prompts(RAGGED)
    target = Target(model, backend="views")  # those of the compiled engine: test_compiled
    first = decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=10))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    second = decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=10))
    assert tokens_of(second) == [generate(model, prompt, 10) for prompt in prompts]
    assert tokens_of(second) != tokens_of(first)


def test_two_targets_of_one_model_do_not_disturb_each_other():
    model, prompts = build("gemma2"), make_prompts(RAGGED)
    llms = [LLM(model, speculative=SpeculativeConfig(policy=Schedule(i, 4))) for i in range(2)]
    engines, done = [llm.engine(max_num_cached_tokens=512) for llm in llms], [{}, {}]
    for engine in engines:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=10))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, into in zip(engines, done, strict=True):
            for output in engine.step():
                into.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert done[0] == done[1] == {str(i): generate(model, prompt, 10) for i, prompt in enumerate(prompts)}


# ---------------------------------------------------------------------------------------------------------- adapters


def with_lora(init, family="llama"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=init)
        return get_peft_model(build(family), config).eval()


@torch.inference_mode()
def adapted(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "init"), [("llama", False), ("gemma2", True)], ids=["with an effect", "fresh, without effect yet"]
)
def test_a_lora_adapter_and_later_changes_to_it_are_honoured_and_the_base_is_untouched(family, init):
    model = with_lora(init, family)
    prompts = make_prompts(RAGGED)
    before = photograph(model)
    target = Target(model)
    first = tokens_of(decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=12)))
    check_untouched(before, model)
    assert target.model is model
    assert first == [adapted(model, prompt, 12) for prompt in prompts]
    weights = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as a step of training would
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.3)
    second = tokens_of(decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=12)))
    assert second == [adapted(model, prompt, 12) for prompt in prompts] != first
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters() if name in weights)


def test_a_target_follows_the_models_adapters_switches_and_dtype():
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    target, prompt = Target(model), [[5, 6, 7, 8]]
    with_adapter = generate(model, prompt[0], 12)
    assert target.generate(prompt, max_tokens=12)[0].token_ids == with_adapter
    with model.disable_adapter():
        without = generate(model, prompt[0], 12)
        assert target.generate(prompt, max_tokens=12)[0].token_ids == without != with_adapter
    assert target.generate(prompt, max_tokens=12)[0].token_ids == with_adapter
    model.merge_adapter()
    assert target.generate(prompt, max_tokens=12)[0].token_ids == with_adapter
    model.to(torch.float64)
    assert target.generate(prompt, max_tokens=12)[0].token_ids == with_adapter
