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
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

from selfspec.hf import SelfSpeculative
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import Schedule, decode, engine_of, generate, make_prompts, tokens_of
from tests.models import EOS, build
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


def written(target, prompts, policy="plain", **params):
    return tokens_of(decode(target, prompts, policy, SamplingParams(**params)))


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
    assert written(target, prompts, Schedule(1, 4), max_tokens=20) == expected
    assert written(target, prompts, max_tokens=20, generation_config=False) == without


BOTH = {"repetition_penalty", "no_repeat_ngram_size"}
NATIVE = {  # settings and processors of the caller, and what of them `SamplingParams` has in the processors' place
    "both": (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        [],
        BOTH,
    ),
    "before others": (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5]},
        [],
        BOTH,
    ),
    "after one that comes before them": ({"repetition_penalty": 1.3, "sequence_bias": [[[9], 4.0]]}, [], set()),
    "one in between": (
        {"no_repeat_ngram_size": 2},
        [RepetitionPenaltyLogitsProcessor(1.3)],  # which generate puts after the config's
        {"no_repeat_ngram_size"},
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_penalties_are_no_processors_where_that_keeps_generates_order(model, name):
    values, own, native = NATIVE[name]
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, values)
    target = Target(model)
    params = SamplingParams(max_tokens=20, logits_processors=own)
    _, [asked] = target.defaults.requests(prompt, params)
    repetition, *_, size = asked.params.penalties
    for one, taken, off in (("repetition_penalty", repetition, 1.0), ("no_repeat_ngram_size", size, 0)):
        assert taken == (values[one] if one in native else off)
    kinds = {type(process) for process in asked.params.processors}
    assert (RepetitionPenaltyLogitsProcessor in kinds) == (
        name in ("after one that comes before them", "one in between")
    )
    expected = generated(model, prompt, max_new_tokens=20, logits_processor=LogitsProcessorList(own))
    assert tokens_of(decode(target, [prompt], "plain", params)) == [expected]


def test_a_calls_own_penalties_win_and_keep_their_place_in_generates_order(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.5, "sequence_bias": [[[n], 2.5] for n in range(3, 30)]})
    target = Target(model)
    for penalty in (1.0, 0.8, 2):
        expected = generated(model, prompt, repetition_penalty=float(penalty), max_new_tokens=20)
        assert written(target, [prompt], repetition_penalty=penalty, max_tokens=20) == [expected]
    set_all(model, {"repetition_penalty": 1.0, "sequence_bias": None, "min_new_tokens": 9, "eos_token_id": ENDS})
    expected = generated(model, prompt, no_repeat_ngram_size=2, max_new_tokens=20)
    assert written(target, [prompt], no_repeat_ngram_size=2, max_tokens=20) == [expected]
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 20}
    same = {"logits_processors": MinNewTokensLengthLogitsProcessor(12, 9, ENDS), "generation_config": False}
    done = written(target, [prompt], **strong)
    assert done == written(target, [prompt], **strong, **same) != [generated(model, prompt, max_new_tokens=20)]


def test_settings_that_change_no_token_are_neither_applied_nor_refused(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {**NEUTRAL, "repetition_penalty": 1.0, "top_k": 3, "temperature": 0.2, "min_length": 0})
    expected = generated(model, prompt, max_new_tokens=16, prompt_lookup_num_tokens=None)
    assert written(Target(model), [prompt], max_tokens=16) == [expected]


@pytest.mark.parametrize("values", [{"max_new_tokens": 7}, {"max_length": 25}, {"max_new_tokens": 9, "max_length": 25}])
def test_lengths_are_the_configs_unless_a_call_names_one(model, values):
    prompts = make_prompts((12, 7), seed=1)
    set_all(model, values)
    target = Target(model)
    assert written(target, prompts) == [generated(model, prompt) for prompt in prompts]
    done = decode(target, prompts, "plain", [SamplingParams(max_tokens=3), SamplingParams()])
    assert [len(one.token_ids) for one in done] == [3, len(generated(model, prompts[1]))]
    least = SamplingParams(min_tokens=30, ignore_eos=True)  # gives way to a length that the caller did not name
    [one] = decode(target, prompts[:1], "plain", [least])
    assert len(one.token_ids) == values.get("max_new_tokens", 13)
    assert written(target, prompts[:1], generation_config=False) == written(target, prompts[:1], max_tokens=128)


def test_a_prompt_beyond_max_length_is_refused(model):
    set_all(model, {"max_length": 12})
    with pytest.raises(ValueError, match=r"max_length=12, which a prompt of 12 tokens leaves no room in; give max_new"):
        written(Target(model), make_prompts((12,)))


def test_stop_strings_are_stops_unless_a_call_names_others(model):
    model = build("phi", vocab_size=257)
    tokenizer = byte_tokenizer()
    target = Target(model, tokenizer)
    characters = {"suppress_tokens": list(range(94, 257))}  # others are parts of one
    set_all(model, characters)
    params = SamplingParams(max_tokens=24)
    [whole] = decode(target, ["abc"], "plain", params)
    piece = tokenizer.decode(whole.token_ids[8:10])
    set_all(model, {**characters, "stop_strings": [piece]})
    [done] = decode(target, ["abc"], "plain", params)
    ids = tokenizer("abc")["input_ids"]
    assert done.token_ids == generated(model, ids, max_new_tokens=24, tokenizer=tokenizer) != whole.token_ids
    assert done.finish_reason == "stop" and piece not in done.text
    assert written(target, ["abc"], max_tokens=24, stop=[]) == [whole.token_ids]
    with pytest.raises(ValueError, match=r"stop_strings=.* need a tokenizer"):
        decode(Target(model), [ids], "plain", params)


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

    def sampled(**params):
        return tokens_of(
            decode(target, prompts, "plain", [SamplingParams(max_tokens=20, seed=s, **params) for s in seeds])
        )

    named = same if isinstance(same, dict) else {"temperature": 1.0, "logits_processors": same}
    expected = sampled(generation_config=False, **named)
    assert sampled() == expected
    greedy = [generated(model, prompt, max_new_tokens=20, do_sample=False) for prompt in prompts]
    assert expected != greedy == sampled(temperature=0)


def test_sampling_is_generates_in_law(model):
    [prompt], count = make_prompts((6,), seed=2), 1500
    set_all(model, {"do_sample": True, "temperature": 2.0, "top_k": 6, "repetition_penalty": 1.3})
    params = [SamplingParams(max_tokens=1, seed=seed) for seed in range(count)]
    sizes = {"max_num_seqs": 256, "max_num_cached_tokens": 256 * 8}
    done = decode(Target(model), [prompt] * count, "plain", params, **sizes)
    ours = torch.tensor([one.token_ids[0] for one in done]).bincount(minlength=96)
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
    law = count * out.scores[0][0].softmax(-1)
    assert set(ours.nonzero()[:, 0].tolist()) == set(law.nonzero()[:, 0].tolist())
    kept = law > 0
    assert float(((ours - law)[kept] ** 2 / law[kept]).sum()) < 25  # chi-square of 5 degrees: one in 7,000 is above


def test_a_calls_own_temperature_samples_with_the_filters_that_are_stored(model):
    prompts = make_prompts((12, 7), seed=1)
    set_all(model, {"top_p": 0.7})
    target, asked = Target(model), {"max_tokens": 20, "seed": 5, "temperature": 1.5}
    stored = written(target, prompts, **asked)
    assert stored == written(target, prompts, top_p=0.7, generation_config=False, **asked)
    whole = written(target, prompts, top_p=1, **asked)
    assert stored != whole == written(target, prompts, generation_config=False, **asked)
    greedy = [generated(model, prompt, max_new_tokens=20) for prompt in prompts]
    assert written(target, prompts, max_tokens=20) == greedy


def test_a_given_config_wins_value_by_value_and_a_named_parameter_over_both(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.5, "max_new_tokens": 16})
    given = GenerationConfig(repetition_penalty=1.0, eos_token_id=list(range(3, 30)))
    target = Target(model)
    assert written(target, [prompt], generation_config=given) == [generated(model, prompt, generation_config=given)]
    longer = GenerationConfig(max_new_tokens=5)
    assert written(target, [prompt], generation_config=longer) == [generated(model, prompt)[:5]]
    assert written(target, [prompt], generation_config=longer, max_tokens=6) == [generated(model, prompt)[:6]]
    with pytest.raises(ValueError, match=r"generation_config must be a GenerationConfig, .* or False, .* got dict"):
        written(target, [prompt], generation_config={"repetition_penalty": 1.0})


def test_the_callers_processors_come_where_generate_puts_them(model):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.6})

    def size(input_ids, scores):
        return scores.abs()

    expected = generated(model, prompt, max_new_tokens=20, logits_processor=[size])
    done = written(Target(model), [prompt], max_tokens=20, logits_processors=size)
    assert done == [expected] != [generated(model, prompt, max_new_tokens=20)]


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
    engine = engine_of(target)
    with pytest.raises(ValueError, match=rf"sets {name}=.*generation_config=False \(--ignore-generation-config\)"):
        engine.add_request("a", prompt, SamplingParams(max_tokens=4))
    assert not engine.has_unfinished_requests()
    assert written(target, [prompt], max_tokens=4, generation_config=False) == [wanted]


def test_values_out_of_range_are_refused(model):
    [prompt] = make_prompts((12,), seed=1)
    target = Target(model)
    for values in ({"repetition_penalty": -1.0}, {"do_sample": True, "top_p": 3.0}):
        for name, value in values.items():
            setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match="the generation config is of no use"):
            written(target, [prompt], max_tokens=4)
        model.generation_config = GenerationConfig()


def test_what_is_taken_is_said_once_per_target(model, caplog):
    [prompt] = make_prompts((12,), seed=1)
    set_all(model, {"repetition_penalty": 1.3, "top_k": 7, "max_new_tokens": 3})
    target = Target(model)
    with caplog.at_level(logging.WARNING, "selfspec"):
        written(target, [prompt], generation_config=False)
        assert said(caplog) == []
        for _ in range(2):
            written(target, [prompt], max_tokens=4)
        [line] = said(caplog)
        assert "applied: repetition_penalty=1.3; options win over it, generation_config=False" in line
        written(Target(model), [prompt], temperature=0.5)
        assert "applied: top_k=7, repetition_penalty=1.3, max_new_tokens=3;" in said(caplog)[1]
        set_all(model, {"repetition_penalty": 1.0, "max_new_tokens": None})
        written(Target(model), [prompt], max_tokens=3)
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
    target = Target(build("phi", vocab_size=257), tokenizer)
    written(target, ["abc"], max_tokens=2)
    tokenizer.chat_template = "{% for m in messages %}<|end|>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "abc"}]
    written(target, [tokenizer.apply_chat_template(messages, return_dict=False)], max_tokens=2)
    written(target, [tokenizer.apply_chat_template(messages, tokenize=False)], max_tokens=2)
    assert said(caplog) == []
    for _ in range(2):
        written(target, ["abc"], max_tokens=2)
    [line] = said(caplog)
    assert line.startswith("texts are continued as they are") and "apply_chat_template" in line
    written(Target(target.model, tokenizer), ["abc"], max_tokens=2)
    assert len(said(caplog)) == 2
