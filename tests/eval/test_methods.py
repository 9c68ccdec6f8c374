"""Every method writes the same tokens, ignores ends of text, and leaves the model as it found it."""

from __future__ import annotations

import copy

import pytest

from eval import methods
from eval.attribution import STAGES, attribute, profile
from tests.helpers import make_prompts
from tests.models import build, tiny

PROMPTS = make_prompts((9, 4, 13))


@pytest.fixture(scope="module")
def target():
    return tiny("llama")


def every_method(target):
    endless, model = methods.Endless(target), target.model
    return [
        methods.plain(endless),
        methods.fixed(endless, 2, 3),
        methods.generate(model),
        methods.early_exit(model, 2, 0),
        methods.early_exit(model, 2, 3),
        methods.prompt_lookup(model, 3),
    ]


def test_all_methods_write_the_same_tokens_alone_and_together(target):
    first, *others = every_method(target)
    wanted = [answer.tokens for answer in methods.OneByOne(first, "one by one")(PROMPTS, 24)]
    assert [len(tokens) for tokens in wanted] == [24] * 3
    for method in others:
        assert [a.tokens for a in methods.OneByOne(method, "one by one")(PROMPTS, 24)] == wanted, method.name
    for method in (first, others[0], others[1]):
        assert [a.tokens for a in method(PROMPTS, 24)] == wanted, method.name


def test_an_end_of_text_ends_nothing(target):
    token = methods.plain(methods.Endless(target))(PROMPTS[:1], 8)[0].tokens[3]
    model = build("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = token
    ending = type(target)(model)
    assert len(ending.generate(PROMPTS[:1], policy="plain", max_new_tokens=8)[0].tokens) < 8
    for method in every_method(ending):
        assert len(method(PROMPTS[:1], 8)[0].tokens) == 8, method.name


def test_the_model_gets_its_own_settings_back_even_after_an_error(target):
    model = target.model
    own, layers = model.generation_config, model.config.num_hidden_layers
    before = copy.deepcopy(own.to_dict())
    for method in every_method(target):
        method(PROMPTS[:1], 4)
    with pytest.raises(ValueError, match="batch_size"):
        methods.early_exit(model, 2, 0)(PROMPTS, 4)
    with pytest.raises(RuntimeError), methods.greedy_without_end(model):
        model.config.num_hidden_layers = 1
        raise RuntimeError
    assert model.generation_config is own
    assert own.to_dict() == before
    assert model.config.num_hidden_layers == layers


def test_stages_add_up_and_the_stack_is_left_alone(target):
    method = methods.fixed(methods.Endless(target), 2, 3)
    before = dict(vars(target.stack))
    taken = profile(method, [PROMPTS[:1], PROMPTS], 12)
    assert vars(target.stack) == before
    assert 0 < taken.inside < taken.wall
    assert 0 < taken.total + taken.seconds["prefill"] <= taken.wall
    record = attribute([(method, [PROMPTS])], 12, repeats=2)[0]
    assert sum(record["shares"][stage]["median"] for stage in STAGES) == pytest.approx(1, abs=0.2)
    assert 0 < record["outside_forward_share_of_call"]["median"] < 1


def test_figures_do_not_change_with_a_models_generation_config(target):
    model = build("llama")
    model.generation_config.update(repetition_penalty=1.8, do_sample=True, max_length=20)
    told = type(target)(model)
    wanted = [methods.OneByOne(method, "one by one")(PROMPTS, 8) for method in every_method(target)]
    assert told.generate(PROMPTS[:1], policy="plain", max_new_tokens=8)[0].tokens != wanted[0][0].tokens
    for method, answers in zip(every_method(told), wanted, strict=True):
        assert [a.tokens for a in methods.OneByOne(method, "one by one")(PROMPTS, 8)] == [a.tokens for a in answers], (
            method.name
        )
