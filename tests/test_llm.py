"""`LLM`: prompts and parameters in vLLM's words, and outputs that are plain decoding's."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import selfspec
from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build as build_datastore
from selfspec.errors import DatastoreError
from selfspec.loading.target import Target
from selfspec.model.fingerprint import vocabulary_of
from tests.helpers import Run, Schedule, generate, make_prompts
from tests.models import EOS, build
from tests.tokenizers import byte_tokenizer

PROMPTS = make_prompts([9, 4, 12, 6])
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def speaker():
    """A random model of bytes, with a tokenizer."""
    return LLM(build("llama", vocab_size=257, eos_token_id=256, pad_token_id=256), tokenizer=byte_tokenizer())


def thrown(model, seed=0, **options):
    """An LLM whose policy throws dice."""
    return LLM(model, speculative=SpeculativeConfig(policy=Schedule(seed, model.config.num_hidden_layers)), **options)


def configured(model, **options):
    return LLM(model, speculative=SpeculativeConfig(**options))


def tokens_of(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_greedy_outputs_are_those_of_transformers_generate(model):
    outputs = thrown(model).generate(PROMPTS, SamplingParams(max_tokens=20))
    assert [one for [one] in tokens_of(outputs)] == [generate(model, prompt, 20) for prompt in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"] and all(o.finished for o in outputs)


def test_a_prompt_is_a_text_or_ids_or_a_mapping_of_them_alone_or_among_others(speaker):
    params, ids = SamplingParams(max_tokens=5), speaker.tokenizer("abc")["input_ids"]
    [wanted] = speaker.generate("abc", params)
    assert wanted.prompt == "abc" and wanted.prompt_token_ids == ids
    forms = ["abc", ids, list(np.array(ids)), {"prompt": "abc"}, {"prompt_token_ids": ids}]
    several = speaker.generate(forms, params)
    alone = [speaker.generate(form, params)[0] for form in forms]
    assert tokens_of(several) == tokens_of(alone) == tokens_of([wanted]) * 5


def test_every_prompt_may_have_parameters_of_its_own(model):
    several = [SamplingParams(max_tokens=3 + i, temperature=float(i % 2), seed=i) for i in range(4)]
    llm = thrown(model)
    together = llm.generate(PROMPTS, several)
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, several, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    assert [output.outputs[0].finish_reason for output in together] == ["length"] * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_n_outputs_are_those_of_the_seeds_that_follow(model, batch):
    llm = thrown(model, max_num_seqs=batch)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=3)
    outputs = llm.generate(PROMPTS[:2], params)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        for one in output.outputs:
            own = SamplingParams(max_tokens=12, temperature=1.0, seed=7 + one.index)
            assert tokens_of(llm.generate(prompt, own)) == [[one.token_ids]]
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) > 1


def test_what_is_streamed_adds_up_to_what_is_generated(speaker):
    params = [SamplingParams(max_tokens=30, temperature=1.0, n=2, stop=["e"]), SamplingParams(max_tokens=9)]
    wanted = speaker.generate(["abc", "xy"], params)
    texts, tokens, ends = {}, {}, {}
    for part in speaker.stream(["abc", "xy"], params):
        [one] = part.outputs
        at = (part.request_id, one.index)
        assert at not in ends
        texts[at], tokens[at] = texts.get(at, "") + one.text, tokens.get(at, []) + one.token_ids
        if one.finish_reason is not None:
            ends[at] = (one.finish_reason, one.stop_reason, one.stats)
            assert part.finished == (sum(key[0] == part.request_id for key in ends) == len(wanted[int(at[0])].outputs))
    for output in wanted:
        for one in output.outputs:
            at = (output.request_id, one.index)
            assert (texts[at], tokens[at]) == (one.text, one.token_ids)
            assert ends[at][:2] == (one.finish_reason, one.stop_reason)
            assert ends[at][2].num_generated_tokens == one.stats.num_generated_tokens


def test_a_conversation_is_what_the_chat_template_makes_of_it(speaker):
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=8)
    with pytest.raises(ValueError, match="chat template"):
        speaker.chat(messages, params)
    speaker.tokenizer.chat_template = TEMPLATE
    try:
        [one] = speaker.chat(messages, params)
        assert tokens_of([one]) == tokens_of(speaker.generate("user: hi\na: ", params))
        assert len(speaker.chat([messages, messages], params)) == 2
        more = {"add_generation_prompt": False, "tokenize": False}
        [one] = speaker.chat(messages, params, chat_template_kwargs=more)
        assert one.prompt_token_ids == speaker.tokenizer("user: hi\n")["input_ids"]
        with pytest.raises(ValueError, match=r"the chat template refuses this conversation \(.*role"):
            speaker.chat([{"content": "hi"}], params, chat_template="{{ messages[0].role + 'x' }}")
    finally:
        speaker.tokenizer.chat_template = None


def test_half_a_character_is_refused_by_the_name_of_its_field(speaker):
    with pytest.raises(ValueError, match="prompt holds half a character"):
        speaker.generate("a\ud800b")
    with pytest.raises(ValueError, match="prediction holds half a character"):
        speaker.generate("ab", SamplingParams(prediction="a\ud800"))


def test_a_request_that_opts_out_is_never_drafted_and_writes_the_same(model):
    policy = Schedule(3, 4)
    llm = LLM(model, speculative=SpeculativeConfig(policy=policy))
    wanted = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    mixed = [SamplingParams(max_tokens=24, speculative=i % 2 == 0) for i in range(4)]
    outputs = llm.generate(PROMPTS, mixed)
    assert tokens_of(outputs) == tokens_of(wanted)
    drafted = [output.outputs[0].stats.num_draft_tokens for output in outputs]
    assert all(drafted[::2]) and not any(drafted[1::2])
    seen = len(policy.seen)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, speculative=False))
    assert tokens_of(outputs) == tokens_of(wanted) and len(policy.seen) == seen


@pytest.mark.parametrize("policy", ["adaptive", "del", "gammatune", "synergy", "pld"])
def test_every_kind_of_policy_lets_requests_opt_out(model, policy):
    llm = LLM(model, speculative=SpeculativeConfig(policy=policy))
    mixed = [SamplingParams(max_tokens=40, speculative=i != 1) for i in range(4)]
    outputs = llm.generate(PROMPTS, mixed)
    assert [one for [one] in tokens_of(outputs)] == [generate(model, prompt, 40) for prompt in PROMPTS]
    assert outputs[1].outputs[0].stats.num_draft_tokens == 0


def test_drafts_may_be_made_otherwise_by_the_same_opened_model(model):
    llm = LLM(model)
    plain = llm.with_speculative(SpeculativeConfig(policy="plain"))
    fixed = llm.with_speculative(SpeculativeConfig(exit_layer=2, num_speculative_tokens=3))
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
    outputs = [one.generate(PROMPTS, params) for one in (llm, plain, fixed)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(outputs[2])
    stats = [output[0].outputs[0].stats for output in outputs[1:]]
    assert stats[0].num_draft_tokens == 0 and set(stats[1].acceptance_histogram_by_draft_length) <= {1, 2, 3}
    assert plain.target.split is llm.target.split


def num_rounds(llm, prompt, params):
    """The rounds of a request, and its tokens."""
    rounds = []
    [output] = llm.generate(prompt, params, on_round=rounds.append)
    return len([round_ for round_ in rounds if round_.plan is not None]), output.outputs[0].token_ids


PLD = {"policy": "pld", "num_speculative_tokens": 8}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_later_call_or_engine_drafts_from_finished_responses(model, temperature):
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
    llm, plain = (LLM(model, speculative=SpeculativeConfig(**how)) for how in (PLD, {"policy": "plain"}))
    wanted = plain.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    first, again = num_rounds(llm, PROMPTS[0], params), num_rounds(llm, PROMPTS[0], params)
    assert first[1] == again[1] == wanted
    assert again[0] == 4 < first[0] / 2  # 9 tokens each
    engine, tokens, seen = llm.engine(), [], []
    engine.add_request("a", PROMPTS[0], params)
    while engine.has_unfinished_requests():
        for output in engine.step(seen.append):
            tokens += output.outputs[0].token_ids
    assert tokens == wanted and len([round_ for round_ in seen if round_.plan is not None]) == 4
    engine.add_request("b", PROMPTS[1], params)
    while engine.has_unfinished_requests():
        engine.step()
    assert num_rounds(llm, PROMPTS[1], params)[0] == 4  # an engine's responses are the LLM's


def test_requests_do_not_learn_of_each_other_where_that_is_turned_off(model):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    llm = LLM(model, speculative=SpeculativeConfig(**PLD, reuse_responses=False))
    first, again = num_rounds(llm, PROMPTS[0], params), num_rounds(llm, PROMPTS[0], params)
    assert first == again and len(llm.target.responses) == 0
    engine = llm.engine()
    engine.add_request("a", PROMPTS[0], params)
    while engine.has_unfinished_requests():
        engine.step()
    assert len(llm.target.responses) == 0
    other = LLM(model, speculative=SpeculativeConfig(**PLD))
    num_rounds(other, PROMPTS[0], params)
    assert num_rounds(other.with_speculative(SpeculativeConfig(**PLD)), PROMPTS[0], params)[0] == first[0]
    with pytest.raises(ValueError, match="reuse_responses"):
        SpeculativeConfig(reuse_responses="no")


def asked(engine, prompt, params):
    """The output of an engine's request, and the tokens of its prompt that were in the cache."""
    run = Run(engine)
    name = run.add(prompt, params)
    done = run.finish().output(name)
    return (done.token_ids, done.logprobs), done.num_cached_tokens


@pytest.mark.parametrize("way", ["compiled", "views", "off", "edited", "inference"])
def test_an_engine_reads_the_document_of_two_questions_once_where_no_bit_can_change(way):
    with torch.inference_mode(way == "inference"):
        model = build("llama")
    assert model.lm_head.weight.is_inference() == (way == "inference")
    how = {"backend": "views" if way == "views" else "compiled"}
    llm = LLM(model, **how, speculative=SpeculativeConfig(**PLD), prefix_cache=False if way == "off" else None)
    document, params = make_prompts([40])[0], SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    engine = llm.engine(max_num_seqs=2, max_num_cached_tokens=128)
    first, found = asked(engine, [*document, 5, 6], params)
    assert found == 0
    if way in ("edited", "inference"):
        with torch.inference_mode(way == "inference"), torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    second, found = asked(engine, [*document, 7, 8, 9], params)
    assert found == (40 if way == "compiled" else 0)
    plain = LLM(model, **how, speculative=SpeculativeConfig(policy="plain"))
    wanted, _ = asked(plain.engine(), [*document, 7, 8, 9], params)
    assert (second == wanted or (way == "views" and second[0] == wanted[0])) and second != first
    several = [document, *PROMPTS, [*document, *PROMPTS[0]]]  # more than its places, so that what is kept must go
    for i, prompt in enumerate(several):
        engine.add_request(str(i), prompt, params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(int(output.request_id), []).extend(output.outputs[0].token_ids)
    assert [[tokens[i]] for i in range(len(several))] == tokens_of(plain.generate(several, params))


@pytest.mark.parametrize("backend", ["views", "compiled"])
def test_a_model_with_fewer_tokens_drafts_none_of_those_it_lost(backend):
    model, params = build("llama"), SamplingParams(max_tokens=8, ignore_eos=True)
    llm = LLM(model, backend=backend, speculative=SpeculativeConfig(**PLD))
    llm.target.responses.add([5, 6], [90, 91, 92])
    model.resize_token_embeddings(60)
    wanted = LLM(model, backend=backend, speculative=SpeculativeConfig(policy="plain")).generate([5, 6], params)
    assert tokens_of(llm.generate([5, 6], params)) == tokens_of(wanted)


def test_several_threads_share_responses(model):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm = LLM(model, speculative=SpeculativeConfig(**PLD))
    wanted = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    llm.target.responses.clear()
    with ThreadPoolExecutor(3) as pool:
        for outputs in pool.map(lambda _: llm.generate(PROMPTS, params), range(9)):
            assert [output.outputs[0].token_ids for output in outputs] == wanted


def test_a_step_that_raises_loses_no_output(model):
    def refuse(round_):
        raise RuntimeError("not now")

    llm, params = thrown(model), SamplingParams(max_tokens=9)
    engine, found = llm.engine(), []
    engine.add_request("a", PROMPTS[0], params)
    while engine.has_unfinished_requests():
        with pytest.raises(RuntimeError, match="not now"):
            engine.step(on_round=refuse)
        found += engine.step()
    assert [token for part in found for token in part.outputs[0].token_ids] == tokens_of(
        llm.generate(PROMPTS[0], params)
    )[0][0]
    assert [part.finished for part in found] == [False] * (len(found) - 1) + [True]
    engine.add_request("a", PROMPTS[0], params)  # the name is free again


@pytest.mark.slow  # a process imports torch
def test_a_stream_may_be_left_open_when_the_program_ends():
    code = (
        "import selfspec; s = selfspec.LLM('demo', backend='views').stream('def f(', sampling); print(next(s).finished)"
    )
    setup = "sampling = __import__('selfspec').SamplingParams(max_tokens=60); "
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=True)
    assert (done.stdout, "Exception" in done.stderr) == ("False\n", False), done.stderr


def test_an_llm_with_other_drafts_learns_on_after_the_model_was_changed():
    model = build("llama")
    first = LLM(model, speculative=SpeculativeConfig(learn=True))
    params = SamplingParams(max_tokens=8)
    first.generate(PROMPTS, params)
    other = first.with_speculative(SpeculativeConfig(learn=True))
    model.double()
    wanted = [generate(model, prompt, 8) for prompt in PROMPTS]
    for llm in (other, first, other):
        assert [one for [one] in tokens_of(llm.generate(PROMPTS, params))] == wanted


def test_an_end_of_text_is_a_stop_without_a_reason(model):
    llm = thrown(model)
    prompts = make_prompts([5] * 12, seed=8)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=1.5))
    ended = [one.outputs[0] for one in outputs if one.outputs[0].finish_reason == "stop"]
    assert ended and all(one.token_ids[-1] == EOS and one.stop_reason is None for one in ended)
    ignored = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=1.5, ignore_eos=True))
    assert all(len(one.outputs[0].token_ids) == 64 for one in ignored)
    assert any(EOS in one.outputs[0].token_ids[:-1] for one in ignored)


def test_logprobs_are_told_by_token_add_up_and_are_streamed(speaker):
    params = SamplingParams(max_tokens=24, temperature=1.2, logprobs=3, presence_penalty=0.5, seed=2)
    drafts = speaker.with_speculative(SpeculativeConfig(policy=Schedule(1, 4)))
    [output], parts = drafts.generate("abc", params), list(drafts.stream("abc", params))
    one = output.outputs[0]
    assert all(row[t].decoded_token == speaker.tokenizer.decode([t]) for row in one.logprobs for t in row)
    assert all(sorted(told.rank for told in row.values())[:3] == [1, 2, 3] for row in one.logprobs)
    assert one.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for token, row in zip(one.token_ids, one.logprobs, strict=True))
    )
    assert [row for part in parts for row in part.outputs[0].logprobs] == one.logprobs
    assert speaker.generate("abc", SamplingParams(max_tokens=4))[0].outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: SamplingParams(n=0), "n must be a whole number of at least 1, got 0"),
        (lambda m: SamplingParams(max_tokens=0), "max_tokens must be a whole number of at least 1, got 0"),
        (lambda m: SamplingParams(speculative=1), "speculative must be True or False, got 1"),
        (
            lambda m: LLM(m, speculative=SpeculativeConfig(policy="fast")),
            "policy must be one of adaptive, .*, got 'fast'",
        ),
        (lambda m: SpeculativeConfig(exit_layer=0), "exit_layer must be a whole number of at least 1, got 0"),
        (lambda m: SpeculativeConfig(drafters="exit"), "drafters must be some of exit, .*, got 'exit'"),
        (lambda m: LLM(m, max_num_seqs=0), "max_num_seqs must be a whole number of at least 1, got 0"),
        (lambda m: SpeculativeConfig(exit_layer=2, drafters=["exit"]), "drafters are those of the policy adaptive"),
        (lambda m: SpeculativeConfig(drafters=5), "drafters must be some of"),
        (
            lambda m: LLM(m, speculative=SpeculativeConfig(learn=5)),
            "learn must be True, False or a selfspec.learn.Learner, got 5",
        ),
        (lambda m: LLM(m, exact="yes"), "exact must be True or False, got 'yes'"),
        (lambda m: LLM(m).engine().add_request("a", [5], {"n": 1}), "params must be a SamplingParams or None, got"),
        (
            lambda m: LLM(m).engine(max_num_cached_tokens=0),
            "max_num_cached_tokens must be a whole number of at least 1",
        ),
        (lambda m: LLM(m, exit_heads=5), "exit_heads must be a folder, 'none' or an ExitHeads, got 5"),
        (lambda m: LLM(5), "model must be a name, a folder, a .gguf file or a transformers causal LM, got 5"),
        (lambda m: LLM(m).engine().add_request(7, [5]), "request_id must be a text"),
        (lambda m: LLM(m).chat("hello"), "messages must be a list of mappings, or several such lists, got 'hello'"),
        (lambda m: LLM(m).chat(["hello"]), "messages must be a list of mappings"),
        (lambda m: LLM(m, speculative="adaptive"), "speculative must be a SpeculativeConfig, got 'adaptive'"),
        (lambda m: LLM(m, backend="fast"), "fast"),
        (lambda m: LLM(m).generate([]), None),
        (lambda m: LLM(m).generate("abc"), "no tokenizer"),
        (lambda m: LLM(m).generate([[]]), "prompt is empty"),
        (lambda m: LLM(m).generate({"text": "abc"}), "must have 'prompt' or 'prompt_token_ids', got"),
        (lambda m: LLM(m).generate(3), "prompts must be texts or lists of token ids, got a int"),
        (lambda m: LLM(m).generate(b"abc"), "prompts must be texts or lists of token ids, got a bytes"),
        (lambda m: LLM(m).generate([[True, False]]), "a prompt's token id must be a whole number, got True"),
        (lambda m: SamplingParams(max_tokens=True), "max_tokens must be a whole number of at least 1, got True"),
        (lambda m: LLM(m).generate([[5]], {"n": 2}), "sampling_params must be a SamplingParams or a list of them"),
        (lambda m: LLM(m).generate([[5]], [SamplingParams()] * 2), r"one per prompt \(1\), got 2"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(n=2)), "n must be 1 with greedy decoding"),
        (lambda m: SamplingParams(top_p=2.0), r"top_p must be a number in \(0, 1\] \(1 keeps all tokens\), got 2.0"),
        (lambda m: SamplingParams(top_k=-2), "top_k must be a whole number of at least 0, got -2"),
        (lambda m: SamplingParams(min_p=1.5), r"min_p must be a number in \[0, 1\] .* got 1.5"),
        (lambda m: SamplingParams(temperature=math.nan), r"temperature must be a number of at least 0 .* got nan"),
        (lambda m: SamplingParams(temperature="1"), "temperature must be a number of at least 0 .* got '1'"),
        (lambda m: SamplingParams(seed=1 << 63), "seed must be a 64-bit integer, got 9223372036854775808"),
        (lambda m: SamplingParams(stop=["x", ""]), "stop must hold non-empty texts, got ''"),
        (lambda m: SamplingParams(stop=3), "stop must hold non-empty texts, got 3"),
        (lambda m: SamplingParams(stop_token_ids="ab"), "stop_token_ids must be a list of token ids or None, got 'ab'"),
        (lambda m: SamplingParams(ignore_eos=1), "ignore_eos must be True or False, got 1"),
        (lambda m: SamplingParams(logits_processors=3), "logits_processors must be functions, got 3"),
        (lambda m: SamplingParams(frequency_penalty=math.nan), r"frequency_penalty must be .* \[-2, 2\] .* got nan"),
        (lambda m: SamplingParams(no_repeat_ngram_size=-1), "no_repeat_ngram_size must be a whole .* got -1"),
        (lambda m: SpeculativeConfig(num_speculative_tokens=-1), "num_speculative_tokens must be a whole .* got -1"),
        (lambda m: LLM(m).generate([[5] * 128]), "prompt has 128 tokens .* holds 128; shorten it by at least 1"),
        (lambda m: LLM(m).generate([[5, -1]]), r"token ids must lie in 0\.\.95, the model's vocabulary, got -1"),
        (lambda m: LLM(m).generate([[5], None]), "prompts must be texts or lists of token ids, got a NoneType"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(stop="x")), "stop needs a tokenizer to turn tokens into text"),
        (
            lambda m: LLM(m, speculative=SpeculativeConfig(exit_layer=4)).generate([[5]]),
            r"exit_layer must lie in 1\.\.3 for this model, got 4",
        ),
        (lambda m: SamplingParams(repetition_penalty=0), "repetition_penalty must be"),
        (lambda m: SamplingParams(presence_penalty=3), r"presence_penalty must be a number in \[-2, 2\]"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(logprobs=21)), "logprobs must"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(stop_token_ids=[-1])), "stop_token_ids"),
        (lambda m: LLM(m).engine().add_request("", [5]), "request_id must be a text"),
        (lambda m: SamplingParams(top_p=0.0), "top_p must be a number in .* got 0.0"),
        (lambda m: SpeculativeConfig(drafters=[]), "drafters must be some of"),
        (lambda m: LLM(m).generate([[5, 96]]), r"token ids must lie in 0\.\.95, the model's vocabulary, got 96"),
        (lambda m: SamplingParams(temperature=-1.0), "temperature must be a number of at least 0 .* got -1.0"),
        (lambda m: SamplingParams(logit_bias={5: 101}), r"logit_bias must be numbers in \[-100, 100\]"),
        (lambda m: SamplingParams(logit_bias={-1: 1}), "a token id of logit_bias"),
        (lambda m: SamplingParams(min_tokens=-1), "min_tokens must be a whole number of at least 0"),
        (lambda m: SamplingParams(min_tokens=6, max_tokens=5), "min_tokens must be at most max_tokens, 5, got 6"),
        (lambda m: SamplingParams(prediction=5), "prediction must be a text or a list of token ids, got 5"),
        (lambda m: SamplingParams(prediction=[0.5]), "a token id of prediction"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(prediction=[96])), r"prediction must hold .* 0\.\.95"),
        (lambda m: LLM(m).generate([[5]], SamplingParams(logit_bias={96: 1})), r"logit_bias must name .* 0\.\.95"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(model, make, message):
    if message is None:
        assert make(model) == []
        return
    with pytest.raises(ValueError, match=message) as caught:
        make(model)
    assert "\n" not in str(caught.value)


def test_the_version_is_that_of_the_changelog():
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text("utf-8")
    assert selfspec.__version__ == re.findall(r"^## \[(\d[^]]*)\]", changelog, re.MULTILINE)[0]


def test_log_probabilities_of_a_prompt_come_once_for_all_of_its_outputs(speaker):
    params = SamplingParams(max_tokens=3, n=2, temperature=1.0, prompt_logprobs=1)
    [whole] = speaker.generate("abc", params)
    assert whole.prompt_logprobs[0] is None and len(whole.prompt_logprobs) == 3
    for token, told in zip(whole.prompt_token_ids[1:], whole.prompt_logprobs[1:], strict=True):
        assert told[token].rank >= 1 and {1} <= {one.rank for one in told.values()} and len(told) <= 2
    last = list(speaker.stream("abc", params))[-1]
    assert last.finished and last.prompt_logprobs == whole.prompt_logprobs
    assert speaker.generate("abc", SamplingParams(max_tokens=3))[0].prompt_logprobs is None
    with pytest.raises(ValueError, match="prompt_logprobs must be at most 20"):
        speaker.generate("abc", SamplingParams(prompt_logprobs=21))


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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'selfspec' has no attribute 'lead'"):
        selfspec.lead  # noqa: B018


def test_drafts_are_looked_up_in_a_corpus_and_tokens_stay_the_same(speaker, tmp_path):
    file, ids, params = tmp_path / "own.store", speaker.tokenizer("abc")["input_ids"], SamplingParams(max_tokens=60)
    [wanted] = speaker.with_speculative(SpeculativeConfig(policy="plain")).generate("abc", params)
    tokens = wanted.outputs[0].token_ids
    build_datastore(file, [ids + tokens], vocabulary_of(speaker.tokenizer), 257)
    for corpus in (file, str(file), Datastore.open(file)):
        pld = SpeculativeConfig(policy="pld", num_speculative_tokens=7, corpus=corpus)
        [done] = speaker.with_speculative(pld).generate("abc", SamplingParams(max_tokens=40))
        assert done.outputs[0].token_ids == tokens[:40]
        assert done.outputs[0].stats.mean_acceptance_length == 8
    adaptive = speaker.with_speculative(SpeculativeConfig(corpus=file))
    assert tokens_of(adaptive.generate("abc", params)) == [[tokens]]


def test_a_corpus_that_is_not_there_or_of_another_model_is_refused(speaker, tmp_path):
    file = tmp_path / "other.store"
    llm = speaker.with_speculative(SpeculativeConfig(corpus=file))
    with pytest.raises(FileNotFoundError, match="there is no"):
        llm.generate("abc")
    build_datastore(file, [[1, 2, 3]], "another", 257)
    with pytest.raises(DatastoreError, match="built with another tokenizer"):
        llm.generate("abc")
    build_datastore(file, [[1, 2, 300]], vocabulary_of(speaker.tokenizer), 301)
    with pytest.raises(DatastoreError, match="a vocabulary of 301 tokens and the model one of 257; build it again"):
        llm.generate("abc")


def test_defaults_stored_with_the_model_are_used():
    model = build("llama")
    assert (Target(model).default_exit_layer, Target(model).default_num_speculative_tokens) == (None, None)
    model.generation_config.exit_layer, model.generation_config.num_speculative_tokens = 3, 2
    for config, planned in (({"policy": "fixed"}, (3, (2,))), ({"exit_layer": 1}, (1, (2,)))):
        rounds, llm = [], LLM(model, speculative=SpeculativeConfig(**config))
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=9), on_round=rounds.append)
        assert (rounds[0].plan.exit_layer, rounds[0].plan.draft_lengths) == planned


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


def test_a_tensor_of_token_ids_is_a_batch_of_prompts(model):
    given, params = torch.tensor([[5, 6, 7], [8, 9, 10]]), SamplingParams(max_tokens=5)
    llm = LLM(model)
    assert tokens_of(llm.generate(given, params)) == tokens_of(llm.generate(given.tolist(), params))


def test_what_was_learned_outlives_an_engine_that_could_not_be_made(model, monkeypatch):
    llm = LLM(model)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    kept = llm.target.policies._idle
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.llm.LLMEngine.__init__", lambda *given, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    assert kept is not None and llm.target.policies._idle == kept
