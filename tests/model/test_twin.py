"""The user's model is only ever read: bit for bit the same, and set up as it was, whatever is done with it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from selfspec.decoding.engine import Engine
from selfspec.errors import UnsupportedModelError
from selfspec.model.stack import Stack
from tests.helpers import Always, Schedule, decode, generate, make_prompts
from tests.models import FAMILIES, build
from tests.slow import of_each_kind
from tests.target import Target

RAGGED = (12, 7, 1, 20)


def photograph(model):
    """All there is to a model: weights, buffers, configs, modes, attributes, hooks."""
    modules = {
        name: (id(module), type(module), module.training, sorted(vars(module)), _plain_values(module))
        for name, module in model.named_modules()
    }
    tensors = {name: (id(t), t._version, t.requires_grad, t.clone()) for name, t in _tensors(model)}
    config = model.config
    return modules, tensors, copy.deepcopy(config.to_dict()), config._attn_implementation, torch.get_rng_state()


def _tensors(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _plain_values(module):
    kinds = (int, float, str, bool, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


def check_untouched(before, model):
    modules, tensors, config, attn, rng = photograph(model)
    assert modules == before[0]
    assert tensors.keys() == before[1].keys()
    for name, (number, version, grad, values) in tensors.items():
        old = before[1][name]
        assert (number, version, grad) == old[:3], name
        assert torch.equal(values, old[3]), name
    assert (config, attn) == before[2:4]
    assert torch.equal(rng, before[4])


def everything(model):
    """Load, decode in several ways, and fail in several ways."""
    target = Target(model)
    prompts = make_prompts(RAGGED)
    decode(target, prompts, Schedule(0, 4), max_new_tokens=8)
    decode(target, prompts, "plain", max_new_tokens=4, temperature=1.0, seed=3)
    target.generate(prompts, exit_layer=1, max_new_tokens=4)
    with pytest.raises(ValueError, match="empty"):
        target.generate([[]])

    def fails(input_ids, scores):
        raise RuntimeError("in the middle of a round")

    with pytest.raises(RuntimeError, match="in the middle"):
        decode(target, prompts, Always(2, 3), max_new_tokens=4, logits_processor=fails)
    return target


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_the_model_is_untouched_by_loading_decoding_and_failing(family):
    model = build(family)
    before = photograph(model)
    everything(model)
    check_untouched(before, model)


def test_the_model_is_untouched_when_it_is_refused(monkeypatch):
    model = build("gemma2")
    before = photograph(model)
    run = Stack.run
    monkeypatch.setattr(Stack, "run", lambda self, rows, start, stop, given: run(self, rows, start, stop, given) * 2)
    with pytest.raises(UnsupportedModelError):
        Target(model)
    check_untouched(before, model)


def test_a_model_in_training_mode_with_dropout_decodes_as_in_evaluation_and_stays_in_training():
    dropout = {"attention_dropout": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    for family in ("llama", "gpt2", "qwen3_moe"):
        options = {k: v for k, v in dropout.items() if (k == "attention_dropout") != (family == "gpt2")}
        model, prompts = build(family, **options), make_prompts(RAGGED)
        expected = [generate(model, prompt, 10) for prompt in prompts]
        model.train()
        before = photograph(model)
        target = everything(model)
        assert [c.tokens for c in decode(target, prompts, Schedule(1, 4), max_new_tokens=10)] == expected
        check_untouched(before, model)
        assert all(module.training for module in model.modules())


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_weights_are_shared_and_a_change_to_the_model_is_honoured(engine):
    model, prompts = build("llama"), make_prompts(RAGGED)
    target = Target(model, engine=engine)
    first = decode(target, prompts, Schedule(0, 4), max_new_tokens=10)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    second = decode(target, prompts, Schedule(0, 4), max_new_tokens=10)
    assert [c.tokens for c in second] == [generate(model, prompt, 10) for prompt in prompts]
    assert [c.tokens for c in second] != [c.tokens for c in first]


def test_two_targets_of_one_model_do_not_disturb_each_other():
    model, prompts = build("gemma2"), make_prompts(RAGGED)
    one, other = Target(model), Target(model)
    engines = [Engine(target, policy=Schedule(i, 4), max_cached_tokens=512) for i, target in enumerate((one, other))]
    for engine in engines:
        for prompt in prompts:
            engine.submit(prompt, max_new_tokens=10)
    done = [{}, {}]
    while any(engine.has_work for engine in engines):
        for engine, into in zip(engines, done, strict=True):
            rows = [row for round_ in engine.step() for row in round_.rows if row.completion]
            into.update({row.request_id: row.completion.tokens for row in rows})
    assert done[0] == done[1] == {i: generate(model, prompt, 10) for i, prompt in enumerate(prompts)}


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


@pytest.mark.parametrize("init", [False, True], ids=["with an effect", "fresh, without effect yet"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_lora_adapter_and_later_changes_to_it_are_honoured_and_the_base_is_untouched(family, init):
    model = with_lora(init, family)
    prompts = make_prompts(RAGGED)
    before = photograph(model)
    target = everything(model)
    check_untouched(before, model)
    assert target.model is model
    first = [c.tokens for c in decode(target, prompts, Schedule(0, 4), max_new_tokens=12)]
    assert first == [adapted(model, prompt, 12) for prompt in prompts]
    weights = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as a step of training would
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.3)
    second = [c.tokens for c in decode(target, prompts, Schedule(0, 4), max_new_tokens=12)]
    assert second == [adapted(model, prompt, 12) for prompt in prompts] != first
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters() if name in weights)


def test_a_merged_adapter_is_a_plain_model_again():
    model = with_lora(False)
    merged = model.merge_and_unload()
    target, [prompt] = Target(merged), make_prompts([9])
    assert target.stack.llama is not None
    assert target.generate([prompt], max_new_tokens=12)[0].tokens == generate(merged, prompt, 12)


def test_an_adapter_of_virtual_tokens_is_refused_and_not_left_out():
    model = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match=r"virtual tokens .*; decode it with the PEFT model's own generate"):
        Target(model)


def test_a_target_follows_the_models_adapters_switches_and_dtype():
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    target, prompt = Target(model), [[5, 6, 7, 8]]
    with_adapter = generate(model, prompt[0], 12)
    assert target.generate(prompt, max_new_tokens=12)[0].tokens == with_adapter
    with model.disable_adapter():
        without = generate(model, prompt[0], 12)
        assert target.generate(prompt, max_new_tokens=12)[0].tokens == without != with_adapter
    assert target.generate(prompt, max_new_tokens=12)[0].tokens == with_adapter
    model.merge_adapter()
    assert target.generate(prompt, max_new_tokens=12)[0].tokens == with_adapter
    model.to(torch.float64)
    assert target.generate(prompt, max_new_tokens=12)[0].tokens == with_adapter
