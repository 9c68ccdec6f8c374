"""What a model's generation config asks for: tokens are those of `model.generate`, or it is refused by name."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

from selfspec.decoding.engine import Engine
from selfspec.hf import SelfSpeculative
from tests.helpers import Schedule, generate, make_prompts
from tests.models import EOS, build
from tests.target import Target
from tests.tokenizers import byte_tokenizer

ENDS = [EOS, *range(20, 60)]  # so many that texts end early
PROCESSED = {  # by setting: its values, and what else is set for it to matter
    "repetition_penalty": ({"repetition_penalty": 1.5}, {}),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 2.5}, {}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {}),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, {}),
    "suppress_tokens": ({"suppress_tokens": list(range(3, 60))}, {}),
    "begin_suppress_tokens": ({"begin_suppress_tokens": list(range(3, 90))}, {}),
    "bad_words_ids": ({"bad_words_ids": [[n] for n in range(3, 50)] + [[70, 71]]}, {}),
    "sequence_bias": ({"sequence_bias": [[[n], 2.5] for n in range(3, 30)] + [[[60, 61], -9.0]]}, {}),
    "min_length": ({"min_length": 21}, {"eos_token_id": ENDS}),
    "min_new_tokens": ({"min_new_tokens": 14}, {"eos_token_id": ENDS}),
    "min_new_tokens over min_length": ({"min_length": 21, "min_new_tokens": 6}, {"eos_token_id": ENDS}),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (4, 1.9)}, {"eos_token_id": EOS}),
    "forced_bos_token_id": ({"forced_bos_token_id": 17}, {}),
    "forced_eos_token_id": ({"forced_eos_token_id": EOS}, {"eos_token_id": EOS}),
    "several": ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9}, {"eos_token_id": ENDS}),
}
NEUTRAL = {"renormalize_logits": True, "remove_invalid_values": True, "num_beams": 1, "prompt_lookup_num_tokens": 3}


@pytest.fixture
def model():
    """Of a family that likes to repeat itself; a test may set its generation config."""
    return build("phi")


def set_all(model, values):
    model.generation_config.update(**{"eos_token_id": EOS, "pad_token_id": 0, **values})


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "selfspec"]


@torch.inference_mode()
def generated(model, prompt, **options):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", PROCESSED)
def test_settings_that_process_logits_are_applied_as_generate_applies_them(model, name):
    values, beside = PROCESSED[name]
    prompts = make_prompts((12, 1), seed=1)
    set_all(model, beside)
    without = [generated(model, prompt, max_new_tokens=20) for prompt in prompts]
    set_all(model, {**beside, **values})
    expected = [generated(model, prompt, max_new_tokens=20) for prompt in prompts]
    assert expected != without
    target = Target(model)
    assert [c.tokens for c in target.generate(prompts, max_new_tokens=20)] == expected
    ignored = target.generate(prompts, max_new_tokens=20, generation_config=False)
    assert [c.tokens for c in ignored] == without
    engine = Engine(target, policy=Schedule(1, 4), max_cached_tokens=1024)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=20)
    done = {}
    for round_ in engine.run():
        done |= {row.request_id: row.completion.tokens for row in round_.rows if row.completion is not None}
    assert [done[i] for i in range(len(prompts))] == expected


def test_settings_that_change_no_token_are_neither_applied_nor_refused(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {**NEUTRAL, "repetition_penalty": 1.0, "top_k": 3, "temperature": 0.2, "min_length": 0})
    expected = generated(model, prompt, max_new_tokens=16, prompt_lookup_num_tokens=None)
    assert Target(model).generate([prompt], max_new_tokens=16)[0].tokens == expected


@pytest.mark.parametrize("values", [{"max_new_tokens": 7}, {"max_length": 25}, {"max_new_tokens": 9, "max_length": 25}])
def test_lengths_are_the_configs_unless_a_call_names_one(model, values):
    prompts = make_prompts((12, 7), seed=1)
    set_all(model, values)
    target = Target(model)
    assert [c.tokens for c in target.generate(prompts)] == [generated(model, prompt) for prompt in prompts]
    done = target.generate(prompts, max_new_tokens=[3, None])
    assert [len(c.tokens) for c in done] == [3, len(generated(model, prompts[1]))]
    [ignored] = target.generate(prompts[:1], generation_config=False)
    assert ignored.tokens == target.generate(prompts[:1], max_new_tokens=128)[0].tokens


def test_a_prompt_beyond_max_length_is_refused(model):
    set_all(model, {"max_length": 12})
    with pytest.raises(ValueError, match=r"max_length=12, which a prompt of 12 tokens leaves no room in; give max_new"):
        Target(model).generate(make_prompts((12,)))


def test_stop_strings_are_stops_unless_a_call_names_others(model):
    model = build("phi", vocab_size=257)
    tokenizer = byte_tokenizer()
    target = Target(model, tokenizer)
    characters = {"suppress_tokens": list(range(94, 257))}  # others are parts of one
    set_all(model, characters)
    [whole] = target.generate(["abc"], max_new_tokens=24)
    piece = tokenizer.decode(whole.tokens[8:10])
    set_all(model, {**characters, "stop_strings": [piece]})
    [done] = target.generate(["abc"], max_new_tokens=24)
    ids = tokenizer("abc")["input_ids"]
    assert done.tokens == generated(model, ids, max_new_tokens=24, tokenizer=tokenizer) != whole.tokens
    assert done.finish_reason == "stop" and piece not in done.text
    assert target.generate(["abc"], max_new_tokens=24, stop=[])[0].tokens == whole.tokens
    with pytest.raises(ValueError, match=r"stop_strings=.* need a tokenizer"):
        Target(model).generate([ids], max_new_tokens=24)


SAMPLED = {
    "temperature and transformers' own top-k": ({"temperature": 1.7}, {"temperature": 1.7, "top_k": 50}),
    "all filters": (
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ),
    "no top-k": ({"top_k": 0}, {"temperature": 1.0}),
    "typical_p": (
        {"typical_p": 0.4, "temperature": 1.5},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(50), TypicalLogitsWarper(0.4)],
    ),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.05, "top_k": 0}, [EpsilonLogitsWarper(0.05)]),
    "eta_cutoff": ({"eta_cutoff": 0.3, "top_k": 0}, [EtaLogitsWarper(0.3)]),
    "renormalize_logits": ({"renormalize_logits": True, "top_k": 5}, [TopKLogitsWarper(5), LogitNormalization()]),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_do_sample_samples_with_the_configs_filters_in_generates_order(model, name):
    values, same = SAMPLED[name]
    prompts, seeds = make_prompts((12, 7), seed=1), [3, 4]
    set_all(model, {"do_sample": True, **values})
    target = Target(model)
    asked = {"max_new_tokens": 20, "seed": seeds}
    named = same if isinstance(same, dict) else {"temperature": 1.0, "logits_processor": same}
    expected = [c.tokens for c in target.generate(prompts, generation_config=False, **named, **asked)]
    assert [c.tokens for c in target.generate(prompts, **asked)] == expected
    greedy = [generated(model, prompt, max_new_tokens=20, do_sample=False) for prompt in prompts]
    assert expected != greedy == [c.tokens for c in target.generate(prompts, temperature=0, **asked)]


def test_sampling_is_generates_in_law(model):
    [prompt], count = make_prompts((6,), seed=2), 1500
    set_all(model, {"do_sample": True, "temperature": 2.0, "top_k": 6, "repetition_penalty": 1.3})
    done = Target(model).generate([prompt] * count, max_new_tokens=1, seed=list(range(count)), max_batch_size=256)
    ours = torch.tensor([c.tokens[0] for c in done]).bincount(minlength=96)
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
    law = count * out.scores[0][0].softmax(-1)
    assert set(ours.nonzero()[:, 0].tolist()) == set(law.nonzero()[:, 0].tolist())
    kept = law > 0
    assert float(((ours - law)[kept] ** 2 / law[kept]).sum()) < 25  # chi-square of 5 degrees: one in 7,000 is above


def test_a_calls_own_temperature_samples_with_the_filters_that_are_stored(model):
    prompts = make_prompts((12, 7), seed=1)
    set_all(model, {"top_p": 0.7})
    target, asked = Target(model), {"max_new_tokens": 20, "seed": 5, "temperature": 1.5}
    stored = [c.tokens for c in target.generate(prompts, **asked)]
    assert stored == [c.tokens for c in target.generate(prompts, top_p=0.7, generation_config=False, **asked)]
    whole = [c.tokens for c in target.generate(prompts, top_p=1, **asked)]
    assert stored != whole == [c.tokens for c in target.generate(prompts, generation_config=False, **asked)]
    greedy = [generated(model, prompt, max_new_tokens=20) for prompt in prompts]
    assert [c.tokens for c in target.generate(prompts, max_new_tokens=20)] == greedy


def test_a_given_config_wins_value_by_value_and_a_named_option_over_both(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.5, "max_new_tokens": 16})
    given = GenerationConfig(repetition_penalty=1.0, eos_token_id=list(range(3, 30)))
    target = Target(model)
    expected = generated(model, prompt, generation_config=given)
    assert target.generate([prompt], generation_config=given)[0].tokens == expected
    longer = GenerationConfig(max_new_tokens=5)
    assert target.generate([prompt], generation_config=longer)[0].tokens == generated(model, prompt)[:5]
    [done] = target.generate([prompt], generation_config=longer, max_new_tokens=6)
    assert done.tokens == generated(model, prompt)[:6]
    with pytest.raises(ValueError, match=r"generation_config must be a GenerationConfig, .* or False, .* got dict"):
        target.generate([prompt], generation_config={"repetition_penalty": 1.0})


def test_the_callers_processors_come_where_generate_puts_them(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.6})

    def size(input_ids, scores):
        return scores.abs()

    expected = generated(model, prompt, max_new_tokens=20, logits_processor=[size])
    [done] = Target(model).generate([prompt], max_new_tokens=20, logits_processor=size)
    assert done.tokens == expected != generated(model, prompt, max_new_tokens=20)


REFUSED = {
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    "token_healing": True,
    "num_return_sequences": 2,
    "max_time": 3.0,
    "cache_implementation": "quantized",
    "dola_layers": "low",
    "force_words_ids": [[5]],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(model, name):
    [prompt] = make_prompts((12,), seed=1)
    wanted = generate(model, prompt, 4)
    setattr(model.generation_config, name, REFUSED[name])
    target = Target(model)
    with pytest.raises(ValueError, match=rf"sets {name}=.*generation_config=False \(--ignore-generation-config\)"):
        target.generate([prompt], max_new_tokens=4)
    engine = Engine(target)
    with pytest.raises(ValueError, match=f"sets {name}="):
        engine.submit(prompt)
    assert not engine.has_work
    assert target.generate([prompt], max_new_tokens=4, generation_config=False)[0].tokens == wanted


def test_values_out_of_range_are_refused(model):
    [prompt] = make_prompts((12,), seed=1)
    target = Target(model)
    for values in ({"repetition_penalty": -1.0}, {"do_sample": True, "top_p": 3.0}):
        for name, value in values.items():
            setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match="the generation config is of no use"):
            target.generate([prompt], max_new_tokens=4)
        model.generation_config = GenerationConfig()


def test_what_is_taken_is_said_once_per_target(model, caplog):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.3, "top_k": 7, "max_new_tokens": 3})
    target = Target(model)
    with caplog.at_level(logging.WARNING, "selfspec"):
        target.generate([prompt], generation_config=False)
        assert said(caplog) == []
        for _ in range(2):
            target.generate([prompt], max_new_tokens=4)
        [line] = said(caplog)
        assert "applied: repetition_penalty=1.3; options win over it, generation_config=False" in line
        Target(model).generate([prompt], temperature=0.5)
        assert "applied: top_k=7, repetition_penalty=1.3, max_new_tokens=3;" in said(caplog)[1]
        set_all(model, {"repetition_penalty": 1.0, "max_new_tokens": None})
        Target(model).generate([prompt], max_new_tokens=3)
        assert len(said(caplog)) == 2


def test_generates_own_loop_applies_nothing_twice(model, caplog):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.5, "begin_suppress_tokens": list(range(3, 50)), "max_new_tokens": 20})
    expected = generated(model, prompt)
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert generated(model, prompt, custom_generate=SelfSpeculative()) == expected
    assert said(caplog) == []


def test_plain_texts_for_a_tokenizer_with_a_chat_template_are_mentioned_once(caplog):
    tokenizer = byte_tokenizer()
    target, few = Target(build("phi", vocab_size=257), tokenizer), {"policy": "plain", "max_new_tokens": 2}
    target.generate(["abc"], **few)
    tokenizer.chat_template = "{% for m in messages %}<|end|>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "abc"}]
    target.generate([tokenizer.apply_chat_template(messages, return_dict=False)], **few)
    target.generate([tokenizer.apply_chat_template(messages, tokenize=False)], **few)
    assert said(caplog) == []
    for _ in range(2):
        target.generate("abc", **few)
        Engine(target, policy="plain").submit("abc")
    [line] = said(caplog)
    assert line.startswith("texts are continued as they are") and "apply_chat_template" in line
    Engine(Target(target.model, tokenizer), policy="plain").submit("abc")
    assert len(said(caplog)) == 2
