"""`Target`: prompts and options as callers give them, in good order and in bad."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import selfspec
from selfspec.control.published.prompt_lookup import PromptLookup
from selfspec.decoding.engine import Engine
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build as build_datastore
from selfspec.errors import DatastoreError
from selfspec.model.fingerprint import vocabulary_of
from tests.helpers import Schedule, generate, make_prompts
from tests.models import EOS, build, tiny
from tests.target import Target
from tests.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def speaker():
    """A random model of bytes, with a tokenizer."""
    return Target(build("llama", vocab_size=257, eos_token_id=256, pad_token_id=256), byte_tokenizer())


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, selfspec; heavy = [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]; "
        "assert not heavy, heavy; assert selfspec.__version__; "
        "selfspec.UnsupportedModelError; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", selfspec.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(selfspec, name).__doc__


def test_drafts_are_looked_up_in_a_datastore_and_tokens_stay_the_same(speaker, tmp_path):
    file, ids = tmp_path / "own.store", speaker.tokenizer("abc")["input_ids"]
    [plain] = speaker.generate("abc", max_new_tokens=60, policy="plain")
    build_datastore(file, [ids + plain.tokens], vocabulary_of(speaker.tokenizer), 257)
    for given in (file, str(file), Datastore.open(file)):
        [done] = speaker.generate("abc", max_new_tokens=40, policy=PromptLookup(7), datastore=given)
        assert done.tokens == plain.tokens[:40]
        assert done.stats.mean_acceptance_length == 8
    [done] = speaker.generate("abc", max_new_tokens=40, datastore=file, temperature=0.8)
    assert done.tokens == speaker.generate("abc", max_new_tokens=40, policy="plain", temperature=0.8)[0].tokens


def test_a_datastore_that_is_not_there_or_of_another_model_is_refused(speaker, tmp_path):
    file = tmp_path / "other.store"
    with pytest.raises(FileNotFoundError, match="there is no datastore"):
        speaker.stream("abc", datastore=file)
    build_datastore(file, [[1, 2, 3]], "another", 257)
    with pytest.raises(DatastoreError, match="built with another tokenizer"):
        speaker.stream("abc", datastore=file)
    build_datastore(file, [[1, 2, 300]], vocabulary_of(speaker.tokenizer), 301)
    with pytest.raises(DatastoreError, match="a vocabulary of 301 tokens and the model one of 257; build it again"):
        speaker.stream("abc", datastore=file)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'selfspec' has no attribute 'lead'"):
        selfspec.lead  # noqa: B018


def test_prompts_may_be_a_text_several_texts_or_lists_of_ids(speaker):
    [one] = speaker.generate("hello", max_new_tokens=6)
    several = speaker.generate(["hello", "you"], max_new_tokens=6)
    tokens = speaker.generate([speaker.tokenizer(text)["input_ids"] for text in ("hello", "you")], max_new_tokens=6)
    assert [c.tokens for c in several] == [c.tokens for c in tokens]
    assert several[0].tokens == one.tokens
    assert [c.request_id for c in several] == [0, 1]
    assert speaker.generate([]) == []


def test_completions_come_in_the_order_of_the_prompts_however_they_end():
    target, prompts = tiny("llama"), make_prompts([9, 1, 4, 12, 3])
    limits = [12, 1, 7, 2, 9]
    done = target.generate(prompts, max_batch_size=2, exit_layer=2, max_new_tokens=limits)
    assert [c.request_id for c in done] == [0, 1, 2, 3, 4]
    assert [c.tokens for c in done] == [generate(target.model, p, n) for p, n in zip(prompts, limits, strict=True)]


def test_one_seed_per_prompt_and_one_for_all():
    target, [prompt] = tiny("llama"), make_prompts([5])
    options = {"max_new_tokens": 10, "temperature": 1.0}
    apart = target.generate([prompt] * 3, seed=[4, 5, 4], **options)
    assert apart[0].tokens == apart[2].tokens != apart[1].tokens
    assert [c.seed for c in apart] == [4, 5, 4]
    assert {tuple(c.tokens) for c in target.generate([prompt] * 2, seed=4, **options)} == {tuple(apart[0].tokens)}


@pytest.mark.parametrize("settings", [{"policy": "plain"}, {"exit_layer": 3}, {"num_draft_tokens": 0}])
def test_no_setting_changes_a_token(settings):
    target, prompts = tiny("qwen3"), make_prompts([9, 1, 4])
    done = target.generate(prompts, max_new_tokens=12, **settings)
    assert [c.tokens for c in done] == [generate(target.model, prompt, 12) for prompt in prompts]


def test_a_stream_is_the_rounds_of_generate(speaker):
    rounds = list(speaker.stream(["hello", "you"], policy=Schedule(0, 4), max_new_tokens=12))
    done = speaker.generate(["hello", "you"], max_new_tokens=12)
    for i, completion in enumerate(done):
        rows = [row for round_ in rounds for row in round_.rows if row.request_id == i]
        assert [token for row in rows for token in row.tokens] == completion.tokens
        assert "".join(row.text for row in rows) == completion.text
        assert rows[-1].completion.tokens == completion.tokens


def test_defaults_stored_with_the_model_are_used():
    model = build("llama")
    assert (Target(model).default_exit_layer, Target(model).default_num_draft_tokens) == (None, None)
    model.generation_config.exit_layer, model.generation_config.num_draft_tokens = 3, 2
    target = Target(model)
    assert (target.default_exit_layer, target.default_num_draft_tokens) == (3, 2)
    round_ = next(target.stream(make_prompts([5]), max_new_tokens=9, policy="fixed"))
    assert (round_.plan.exit_layer, round_.plan.draft_lengths) == (3, (2,))
    round_ = next(target.stream(make_prompts([5]), max_new_tokens=9, exit_layer=1))
    assert (round_.plan.exit_layer, round_.plan.draft_lengths) == (1, (2,))


def test_ends_of_text_are_the_generation_configs_else_the_configs_else_the_tokenizers():
    model = build("llama")
    assert Target(model).eos_token_ids == {EOS}
    model.generation_config.eos_token_id = [5, 7]
    assert Target(model).eos_token_ids == {5, 7}
    model.generation_config.eos_token_id = None
    assert Target(model).eos_token_ids == {EOS}
    model.config.eos_token_id = None
    assert Target(model).eos_token_ids == frozenset()
    assert Target(model, byte_tokenizer()).eos_token_ids == {256}


# ---------------------------------------------------------------------------------------------------------- bad input

BAD = [
    ([[]], {}, "prompt is empty; give at least one token to continue"),
    ([[5], None], {}, "prompts must be a text, .*, got a list that holds a NoneType"),
    ([1, 2, 3], {}, "prompts must be a text, a list of texts or a list of token-id lists, got one list of ids"),
    (["hello"], {}, "prompt is text but the target has no tokenizer; pass token ids, or load with tokenizer="),
    ([[5] * 128], {}, "prompt has 128 tokens and the model's context holds 128; shorten it by at least 1"),
    ([[5] * 140], {}, "prompt has 140 tokens and the model's context holds 128; shorten it by at least 13"),
    ([[5]], {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
    ([[5]], {"max_new_tokens": [3, 4]}, r"max_new_tokens must be one number or one per prompt \(1\), got 2"),
    ([[5], [6]], {"seed": [1, 2, 3]}, r"seed must be one number or one per prompt \(2\), got 3"),
    ([[5]], {"seed": 1 << 63}, "seed must be a 64-bit integer, got 9223372036854775808"),
    ([[5]], {"temperature": math.nan}, r"temperature must be a number of at least 0 \(0 is greedy\), got nan"),
    ([[5]], {"temperature": -1.0}, r"temperature must be a number of at least 0 \(0 is greedy\), got -1.0"),
    ([[5]], {"top_p": 0.0}, r"top_p must lie in \(0, 1\] \(1 keeps all tokens\), got 0.0"),
    ([[5]], {"top_p": 1.5}, r"top_p must lie in \(0, 1\] \(1 keeps all tokens\), got 1.5"),
    ([[5]], {"top_k": -2}, r"top_k must be at least 0 \(0 keeps all tokens\), got -2"),
    ([[5]], {"min_p": 1.5}, r"min_p must lie in \[0, 1\] \(0 keeps all tokens\), got 1.5"),
    ([[5]], {"stop": "x"}, "stop needs a tokenizer to turn tokens into text; load with tokenizer="),
    ([[5]], {"stop": ["x", ""]}, "stop must hold non-empty texts, got ''"),
    ([[5]], {"max_new_tokens": None}, "max_new_tokens must be a whole .*, got None; leave it out for the default"),
    ([[5]], {"temperature": None}, r"temperature must be a number of at least 0 .*, got None; leave it out"),
    ([[5]], {"temperature": "1"}, r"temperature must be a number of at least 0 \(0 is greedy\), got '1'"),
    ([[5]], {"top_k": None}, "top_k must be a whole number, got None; leave it out for the default"),
    ([[5]], {"top_p": None}, r"top_p must lie in \(0, 1\] .*, got None; leave it out for the default"),
    ([[5]], {"min_p": "a"}, r"min_p must lie in \[0, 1\] .*, got 'a'"),
    ([[5]], {"seed": None}, "seed must be a whole number, got None; leave it out for the default"),
    ([[5]], {"stop": 3}, "stop must hold non-empty texts, got 3"),
    ([[5]], {"logits_processor": 3}, "logits_processor must be a function or a list of functions, got 3"),
    ([[5]], {"stopping_criteria": [3]}, "stopping_criteria must be a function or a list of functions, got 3"),
    ([[5]], {"policy": "clever"}, "policy must be one of adaptive, plain, fixed.*, got 'clever'"),
    ([[5]], {"exit_layer": 4}, r"exit_layer must lie in 1\.\.3 for this model, got 4"),
    ([[5]], {"exit_layer": 0}, r"exit_layer must lie in 1\.\.3 for this model, got 0"),
    ([[5]], {"num_draft_tokens": -1}, r"num_draft_tokens must be at least 0 \(0 is plain decoding\), got -1"),
    ([[5]], {"policy": 3}, "policy must be one of .*, or a selfspec.Policy, got 3"),
    ([[5]], {"drafts": 3}, "drafts must hold some of exit, .*, got 3"),
    ([[5]], {"datastore": 3}, "datastore must be a file or an open selfspec.Datastore, got 3"),
    ([[5]], {"exact": "no"}, "exact must be True or False, got 'no'"),
    ([[5]], {"learn": 3}, "learn must be True, False or a selfspec.learn.Learner, got 3"),
    ([[5]], {"max_batch_size": "a"}, "max_batch_size must be a whole number of at least 1, got 'a'"),
    ([[5]], {"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("prompts", "options", "sentence"), BAD)
def test_bad_input_is_refused_in_a_sentence_before_anything_is_decoded(prompts, options, sentence):
    for call in (tiny("llama").generate, tiny("llama").stream):
        with pytest.raises(ValueError, match=sentence):
            call(prompts, **options)


def test_an_option_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="there is no option 'temprature'; the options are frequency_penalty, gen"):
        Engine(tiny("llama")).submit([5], temprature=1.0)


PER_REQUEST = {"temperature", "top_p", "top_k", "min_p", "seed", "stop"}


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"), [case for case in BAD if case[1].keys() & PER_REQUEST and len(case[0]) == 1]
)
def test_an_engine_refuses_the_same_and_goes_on(prompts, options, sentence):
    engine = Engine(tiny("llama"))
    engine.submit([7], max_new_tokens=3)
    with pytest.raises(ValueError, match=sentence):
        engine.submit(prompts[0], **options)
    assert engine.num_waiting == 1
    assert [round_.rows[-1].tokens for round_ in engine.run()][-1]


def test_a_prompt_of_all_but_one_token_of_the_context_has_room_for_one():
    [done] = tiny("llama").generate(make_prompts([127]), exit_layer=2, max_new_tokens=9)
    assert (len(done.tokens), done.finish_reason) == (1, "length")


def test_a_criterion_that_raises_ends_its_own_row_and_no_other():
    target = tiny("llama")
    engine = Engine(target, max_batch_size=3)

    def fails(ids, scores):
        raise RuntimeError("no")

    bad = engine.submit([5, 6, 7], max_new_tokens=6, stopping_criteria=fails)
    good = engine.submit([8, 9], max_new_tokens=6)
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    rows = [row for round_ in engine.run() for row in round_.rows]
    ended = {row.request_id: row.completion for row in rows if row.completion is not None}
    assert ended[bad].finish_reason == "cancelled"
    assert ended[good].tokens == target.generate([[8, 9]], max_new_tokens=6, policy="plain")[0].tokens
    assert engine.cache.num_free_pages == engine.cache.num_pages


def test_a_tensor_of_token_ids_is_a_batch_of_prompts():
    target = tiny("llama")
    given = torch.tensor([[5, 6, 7], [8, 9, 10]])
    expected = target.generate(given.tolist(), max_new_tokens=5)
    assert [done.tokens for done in target.generate(given, max_new_tokens=5)] == [done.tokens for done in expected]


@pytest.mark.parametrize("prompts", [5, [5, 6], torch.tensor([5, 6])], ids=["a number", "one list", "one row tensor"])
def test_prompts_of_another_kind_are_refused_in_a_sentence(prompts):
    with pytest.raises(ValueError, match=r"^prompts must be a text, a list of texts or a list of token-id lists, got"):
        tiny("llama").generate(prompts)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=rf"token ids must lie in 0\.\.\d+, the model's vocabulary, got {token}"):
        tiny("llama").generate([[5, token]])
