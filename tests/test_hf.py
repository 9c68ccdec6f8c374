"""`generate(custom_generate=SelfSpeculative(...))` is `generate`: same tokens, same shapes, same padding."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    TextIteratorStreamer,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from selfspec.control.plan import Plan, Policy
from selfspec.hf import SelfSpeculative
from selfspec.loading import target
from tests.model.test_families import check_untouched, photograph
from tests.models import EOS, build
from tests.tokenizers import word_tokenizer

FAMILIES = ["llama", "qwen3", "mistral"]  # many key heads, two, and a sliding window shorter than the prompts
PAD = 0
NEW = 14


@pytest.fixture(scope="module")
def models():
    """One tiny model each, that `generate` may not change either; pads differ from the end of the text."""
    made = {kind: build(kind, **({"num_key_value_heads": 4} if kind == "llama" else {})) for kind in FAMILIES}
    for model in made.values():
        model.generation_config.update(pad_token_id=PAD, eos_token_id=EOS, do_sample=False)
    return made


@pytest.fixture
def model(models):
    return models["mistral"]


@pytest.fixture
def llama(models):
    return models["llama"]


def batch(lengths=(9, 4, 12, 1), seed=0, pad=PAD):
    """Left-padded rows, their mask, as generate() takes them."""
    rng, width = torch.Generator().manual_seed(seed), max(lengths)
    ids, mask = torch.full((len(lengths), width), pad), torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = torch.randint(3, 96, (n,), generator=rng)
        mask[row, width - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def check(model, inputs, spec=None, **options):
    """Plain generate and ours, on the same arguments (criteria and processors made anew by functions)."""
    options = {"max_new_tokens": NEW, **options}

    def run(**more):
        made = {k: v() if k in ("logits_processor", "stopping_criteria") else v for k, v in options.items()}
        return model.generate(**inputs, **made, **more)

    wanted, spec = run(), spec or SelfSpeculative(1, 3)
    got = run(custom_generate=spec)
    assert got.dtype == wanted.dtype and got.device == wanted.device
    assert got.tolist() == wanted.tolist()
    return got, spec


def first_new(model, inputs, at, row=0, **options):
    """The token that plain decoding emits at a step: something to stop at."""
    out = model.generate(**inputs, max_new_tokens=NEW, eos_token_id=None, **options)
    return int(out[row, inputs["input_ids"].shape[1] + at])


# ------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize(
    ("family", "exit_layer", "num_tokens"),
    [("llama", 1, 3), ("qwen3", 2, 5), ("mistral", 3, 1), ("mistral", None, None)],
)
def test_greedy_output_equals_generate(models, family, exit_layer, num_tokens):
    model, spec = models[family], SelfSpeculative(exit_layer, num_tokens)
    check(model, batch(), spec)
    check(model, batch(), spec, eos_token_id=None)
    check(model, {"input_ids": batch((10,))["input_ids"]}, spec)
    check(model, batch((6, 6)), spec)
    assert len(spec.completions) == 2
    if exit_layer is not None:  # without one the default policy decides by measured time, and may well stay plain
        assert spec.stats.num_draft_tokens > 0
    assert spec.stats.num_generated_tokens == sum(len(c.token_ids) for c in spec.completions)


def test_padding_is_told_from_content(model):
    plain = {"input_ids": batch()["input_ids"]}
    check(model, plain)  # no mask: generate() takes it from the padding
    ends = batch(pad=EOS)
    check(model, ends, pad_token_id=EOS)  # padding by the end of the text
    ends["input_ids"][2, 5:7] = EOS  # and as content
    check(model, ends, pad_token_id=EOS)
    content = batch((8, 8))
    content["input_ids"][:, 2:4] = PAD
    check(model, content)


def test_rows_end_at_different_steps_and_are_padded(model):
    inputs = batch((5, 9, 7))
    eos = [first_new(model, inputs, at, row) for at, row in ((1, 0), (6, 1))]
    check(model, inputs, SelfSpeculative(3, 5), eos_token_id=eos[1])
    got, spec = check(model, inputs, SelfSpeculative(3, 5), eos_token_id=eos)
    lengths = {len(c.token_ids) for c in spec.completions}
    assert len(lengths) > 1 and (got[:, -1] == PAD).any()
    assert {c.finish_reason for c in spec.completions} >= {"stop"}
    check(model, inputs, SelfSpeculative(3, 5), eos_token_id=eos, pad_token_id=None)  # the first of them then pads


def test_length_limits_are_generates(model):
    inputs = batch()
    for spec in (SelfSpeculative(2, 4), SelfSpeculative(2, 4, policy="plain")):
        check(model, inputs, spec, max_new_tokens=None, max_length=20)
        check(model, inputs, spec, max_new_tokens=1)
    check(model, inputs, max_new_tokens=3, stopping_criteria=lambda: [MaxLengthCriteria(14)])
    eos = first_new(model, inputs, 1)
    check(model, inputs, eos_token_id=eos, min_new_tokens=6)
    check(model, inputs, eos_token_id=eos, max_new_tokens=None, min_length=18, max_length=24)


# --------------------------------------------------------------------------------------------------------- processors


ONE_WAY = {"do_sample": True, "top_k": 1}  # sampling, with nothing left to chance


class Shy(LogitsProcessor):
    """Dislikes a token that depends on the prefix, and on the row it sits in."""

    def __call__(self, input_ids, scores):
        for row in range(len(input_ids)):
            scores[row, (input_ids[row].sum() + 7 * row) % 96 :] -= 3.0
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2, "pad_token_id": 40},
        {"bad_words_ids": [[i] for i in range(3, 50)] + [[60, 61]]},
        {"suppress_tokens": list(range(40, 90)), "begin_suppress_tokens": list(range(3, 40))},
        {"forced_eos_token_id": EOS, "renormalize_logits": True},
        {"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 1},
        {"exponential_decay_length_penalty": (2, 3.0), "sequence_bias": [[[9], 4.0]]},
        {"logits_processor": lambda: [Shy()]},
        {"logits_processor": lambda: [Shy()], "encoder_repetition_penalty": 2.0, "num_return_sequences": 2, **ONE_WAY},
    ],
    ids="-".join,
)
def test_processors_see_what_generate_shows_them(models, options):
    model = models["mistral"]
    check(model, batch(), **options)
    check(model, batch((8,)), SelfSpeculative(3, 4), **options)


def test_prefix_function_is_asked_about_its_own_rows(llama):
    inputs, asked = batch(), Counter()
    prompts = inputs["input_ids"].tolist()

    def allowed(batch_id, ids):
        assert ids[: len(prompts[0])].tolist() == prompts[batch_id]
        asked[batch_id] += 1
        return [3 + (int(ids[-1]) * (5 + batch_id) + i) % 90 for i in range(4)]

    check(llama, inputs, prefix_allowed_tokens_fn=allowed)
    assert set(asked) == set(range(4))


def test_stateful_processors_are_refused(llama):
    grammar = type("GrammarProcessor", (LogitsProcessor,), {"__module__": "xgrammar.contrib.hf"})
    with pytest.raises(
        ValueError, match=r"pure functions of the prefix, got xgrammar.contrib.hf.GrammarProcessor; leave it out"
    ):
        llama.generate(**batch(), custom_generate=SelfSpeculative(), logits_processor=[grammar()], max_new_tokens=2)
    with pytest.raises(
        ValueError, match=r"got .*FreeGuidanceLogitsProcessor; leave it out, or decode without custom_generate"
    ):
        llama.generate(**batch(), custom_generate=SelfSpeculative(), guidance_scale=2.0, max_new_tokens=2)


# ----------------------------------------------------------------------------------------------------------- sampling


def sample(model, inputs, seed, spec, **options):
    if seed is not None:
        set_seed(seed)
    return model.generate(**inputs, do_sample=True, custom_generate=spec, **{"max_new_tokens": NEW, **options}).tolist()


@pytest.mark.parametrize(
    "options", [{"top_k": 5, "temperature": 0.7, "top_p": 0.8}, {"typical_p": 0.5, "top_k": 0}], ids="-".join
)
def test_same_seed_same_tokens_whatever_the_plan(model, options):
    inputs = batch()
    wanted = sample(model, inputs, 3, SelfSpeculative(policy="plain"), **options)
    for spec in (SelfSpeculative(1, 3), SelfSpeculative(3, 5), SelfSpeculative(2, 1)):
        assert sample(model, inputs, 3, spec, **options) == wanted
    assert sample(model, inputs, 4, spec, **options) != wanted
    assert sample(model, inputs, None, spec, **options) != sample(model, inputs, None, spec, **options)


def test_greedy_draws_nothing_and_copies_differ(llama):
    set_seed(0)
    state = torch.get_rng_state()
    check(llama, batch())
    assert torch.equal(state, torch.get_rng_state())
    rows = sample(llama, batch((6,)), 0, SelfSpeculative(2, 3), num_return_sequences=6)
    assert len({tuple(row) for row in rows}) == 6


def test_samples_follow_generates_distribution():
    """Two tokens of a vocabulary of twelve, against the probabilities that plain generate's own scores give."""
    tiny, rows = build("llama", vocab_size=12), 1500
    options = {"top_k": 7, "top_p": 0.8, "temperature": 0.8, "eos_token_id": None, "pad_token_id": PAD}
    prompt = torch.tensor([[5, 3, 7]])

    def log_probs(ids):
        out = tiny.generate(
            ids, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **options
        )
        return out.scores[0].log_softmax(-1)

    first = log_probs(prompt)[0]
    second = log_probs(torch.tensor([[5, 3, 7, t] for t in range(12)]))
    spec, options = SelfSpeculative(2, 2), {**options, "num_return_sequences": rows, "max_new_tokens": 2}
    got = Counter(tuple(row[3:]) for row in sample(tiny, {"input_ids": prompt}, 0, spec, **options))
    expected = {(a, b): rows * math.exp(first[a] + second[a, b]) for a, b in product(range(12), repeat=2)}
    assert all(expected[pair] > 0 for pair in got)
    common = [pair for pair, n in expected.items() if n >= 5]
    rare = rows - sum(got[pair] for pair in common), rows - sum(expected[pair] for pair in common)
    pairs = [(got[pair], expected[pair]) for pair in common] + ([rare] if rare[1] > 1 else [])
    scale = sum(g for g, _ in pairs) / sum(e for _, e in pairs)
    assert chisquare([g for g, _ in pairs], [e * scale for _, e in pairs]).pvalue > 1e-3
    assert 0 < spec.stats.num_accepted_draft_tokens < spec.stats.num_draft_tokens


# ----------------------------------------------------------------------------------------------------------- criteria


class Forbidden(StoppingCriteria):
    """Ends a row at a token; answers for every row it is shown."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((len(input_ids), input_ids.shape[1]))
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


@pytest.mark.parametrize("eos", [EOS, None])
def test_custom_criteria_end_rows_inside_a_block(models, eos):
    """Without an end-of-text token generate() pads nothing: ended rows run on until the last one ends."""
    model, inputs = models["mistral"], batch()
    stops = [first_new(model, inputs, at, row) for row, at in enumerate((2, 7, 4, 9))]
    for tokens in (stops, stops[:1]):
        for spec in (SelfSpeculative(3, 5), SelfSpeculative(policy=Uneven())):
            check(model, inputs, spec, eos_token_id=eos, stopping_criteria=lambda ids=tokens: [Forbidden(ids)])
    criterion = Forbidden([])
    options = {"max_new_tokens": 5, "eos_token_id": None}
    model.generate(**inputs, **options, custom_generate=SelfSpeculative(3, 4), stopping_criteria=[criterion])
    assert Counter(criterion.seen) == {(1, 12 + n): 4 for n in range(1, 6)}


class Uneven(Policy):
    """Drafts far in some rows and not at all in others, so that rows are at very different steps."""

    def plan(self, rows):
        return Plan(3, tuple(min(row.num_remaining - 1, (0, 6, 1, 3)[row.seq_id]) for row in rows))


def test_time_limit_ends_every_row(llama):
    """A row ends with the first token after it, one of which each row has in any case."""
    for eos in (EOS, None):
        options = {"max_new_tokens": 60, "eos_token_id": eos, "stopping_criteria": [MaxTimeCriteria(0.0, 0.0)]}
        out = llama.generate(**batch(), custom_generate=SelfSpeculative(2, 3), **options)
        assert out.shape[1] - 12 == 1


# ---------------------------------------------------------------------------------------------------------- streamers


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


def test_streamer_gets_the_prompt_the_blocks_and_the_end(llama):
    inputs, recorder = batch((7,)), Recorder()
    got, _ = check(llama, inputs, SelfSpeculative(3, 4, streamer=recorder), eos_token_id=None)
    prompt, *blocks = recorder.puts
    assert prompt == inputs["input_ids"].tolist() and recorder.ends == 1
    assert prompt[0] + [token for block in blocks for token in block] == got[0].tolist()
    assert max(map(len, blocks)) > 1
    llama.generate(
        **inputs, max_new_tokens=3, prefill_chunk_size=2, custom_generate=SelfSpeculative(3, 4, streamer=recorder)
    )
    assert all(recorder.puts)  # nothing is put while only the prompt is read


@pytest.mark.parametrize("eos", [EOS, None])
def test_streamer_of_a_batch_gets_what_generate_gives_it(llama, eos):
    inputs = batch()
    stops = [first_new(llama, inputs, at, row) for row, at in enumerate((2, 7, 4, 9))]
    options = {"max_new_tokens": NEW, "eos_token_id": eos}
    wanted, got = Recorder(), Recorder()
    llama.generate(**inputs, **options, streamer=wanted, stopping_criteria=[Forbidden(stops)])
    spec = SelfSpeculative(policy=Uneven(), streamer=got)
    llama.generate(**inputs, **options, custom_generate=spec, stopping_criteria=[Forbidden(stops)])
    assert (got.puts, got.ends) == (wanted.puts, wanted.ends)


def test_streamers_end_after_errors(llama):
    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise KeyError("broken")

    recorder = Recorder()
    spec = SelfSpeculative(2, 3, streamer=recorder)
    with pytest.raises(KeyError, match="broken"):
        llama.generate(**batch(), custom_generate=spec, logits_processor=[Broken()], max_new_tokens=4)
    with pytest.raises(ValueError, match="num_beams"):
        llama.generate(**batch(), custom_generate=spec, num_beams=2, max_new_tokens=4)
    assert recorder.ends == 2 and spec.completions == [] and spec.stats.num_generated_tokens == 0
    iterator = TextIteratorStreamer(word_tokenizer(), timeout=600)
    with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
        llama.generate(**batch(), custom_generate=SelfSpeculative(streamer=iterator), max_new_tokens=4)
    assert "".join(iterator) == ""  # it has ended: no wait


# ------------------------------------------------------------------------------------------------------------ outputs


def test_dictionary_outputs_equal_generates(model):
    inputs = batch()
    options = {
        "max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "repetition_penalty": 1.3, "eos_token_id": first_new(model, inputs, 4, 1, repetition_penalty=1.3),
    }  # fmt: skip
    wanted = model.generate(**inputs, **options)
    spec = SelfSpeculative(3, 4)
    got = model.generate(**inputs, **options, custom_generate=spec)
    assert type(got) is type(wanted) and got.sequences.tolist() == wanted.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert isinstance(ours, tuple) and [t.shape for t in ours] == [t.shape for t in theirs]
        for row, completion in enumerate(spec.completions):
            n = len(completion.token_ids)
            torch.testing.assert_close(torch.stack(ours)[:n, row], torch.stack(theirs)[:n, row], rtol=1e-4, atol=1e-4)
            assert not torch.stack(ours)[n:, row].any()
    assert not ours[0].is_inference()
    bare = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True, custom_generate=spec)
    assert bare.scores is None and bare.logits is None and bare.past_key_values is None


def test_sampled_scores_are_those_sampled_from(llama):
    options = {"top_k": 3, "return_dict_in_generate": True, "output_scores": True}
    set_seed(1)
    got = llama.generate(**batch(), do_sample=True, max_new_tokens=4, custom_generate=SelfSpeculative(2, 3), **options)
    assert all((step.isfinite().sum(-1) == 3).all() for step in got.scores)


# ------------------------------------------------------------------------------------------------------------ options


def drafted(spec):
    return {d for c in spec.completions for d in c.stats.acceptance_histogram_by_draft_length}


def test_a_call_wins_over_the_object_and_the_object_over_the_stored(llama):
    inputs = batch((6,))
    stored = GenerationConfig(exit_layer=7, num_speculative_tokens=2, max_new_tokens=13, pad_token_id=PAD)
    spec = SelfSpeculative(2)
    llama.generate(**inputs, generation_config=stored, custom_generate=spec)
    assert max(drafted(spec)) == 2
    llama.generate(**inputs, custom_generate=spec, num_speculative_tokens=5, max_new_tokens=13, eos_token_id=None)
    assert max(drafted(spec)) == 5
    llama.generate(**inputs, custom_generate=spec, max_new_tokens=13, eos_token_id=None)
    assert max(drafted(spec)) == 4
    llama.generate(**inputs, custom_generate=spec, max_new_tokens=3, num_speculative_tokens=0)
    assert drafted(spec) == set()
    with pytest.raises(ValueError, match=r"exit_layer must lie in 1..3 for this model, got 7"):
        llama.generate(**inputs, generation_config=stored, custom_generate=SelfSpeculative(policy="fixed"))
    with pytest.raises(ValueError, match=r"exit_layer must lie in 1..3 for this model, got 9"):
        llama.generate(**inputs, custom_generate=spec, exit_layer=9, max_new_tokens=3)
    llama.generate(**inputs, custom_generate=spec, max_new_tokens=3, policy="plain")
    assert drafted(spec) == set()


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"past_key_values": None}],
    ids=str,
)
def test_cache_options_change_nothing(options):
    model = build("mistral")
    check(model, batch((9,)), **options)
    if "prefill_chunk_size" not in options:
        check(model, batch(), **options)


def test_an_empty_cache_is_ignored_and_a_full_one_refused(llama):
    inputs = batch((9,))
    wanted = llama.generate(**inputs, max_new_tokens=6)
    cache = DynamicCache(config=llama.config)
    got = llama.generate(**inputs, max_new_tokens=6, custom_generate=SelfSpeculative(), past_key_values=cache)
    assert got.tolist() == wanted.tolist() and cache.get_seq_length() == 0
    llama.generate(**inputs, max_new_tokens=6, past_key_values=cache)
    longer = {"input_ids": wanted, "past_key_values": cache, "max_new_tokens": 3}
    with pytest.raises(
        ValueError, match=r"past_key_values must be empty, got 14 tokens; leave it out, pass the whole text"
    ):
        llama.generate(**longer, custom_generate=SelfSpeculative())


def test_early_exit_and_lookup_of_transformers_give_way(llama):
    wanted = llama.generate(**batch(), max_new_tokens=6)
    for other in ({"assistant_early_exit": 2}, {"prompt_lookup_num_tokens": 3}):
        got = llama.generate(**batch(), max_new_tokens=6, custom_generate=SelfSpeculative(2), **other)
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beams": 3}, "decoding must be greedy or sampling, got beam_search; set num_beams=1, or decode without"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive_search"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "got output_attentions too; leave that out"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "got output_hidden_states too; leave that out",
        ),
        ({"max_new_tokens": 400}, "must fit the model's context of 128 tokens, got 409; lower max_new_tokens by 281"),
        (
            {"input_ids": None, "inputs_embeds": torch.zeros(1, 9, 32)},
            "token ids and their mask alone, got inputs_embeds",
        ),
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids must count each row's tokens from 0"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "attention_mask must be zeros, then ones"),
        ({"attention_mask": torch.tensor([[0, 1, 0] + [1] * 6])}, "attention_mask must be zeros, then ones"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_served_is_refused_in_one_sentence(llama, options, sentence):
    given = {**batch((9,)), "max_new_tokens": 4, "custom_generate": SelfSpeculative(), **options}
    with pytest.raises(ValueError) as error:
        llama.generate(**given)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_encoder_decoders_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match=r"decoder-only, got an encoder-decoder; pass another"):
        T5ForConditionalGeneration(config).generate(
            torch.tensor([[4, 5]]), custom_generate=SelfSpeculative(), max_new_tokens=3
        )


# ---------------------------------------------------------------------------------------------------------- the model


def test_the_model_is_left_as_it_was():
    model = build("qwen3")
    model.train()
    before = photograph(model)
    spec = SelfSpeculative(2, 3)
    model.generate(**batch(), custom_generate=spec, max_new_tokens=8)
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch(), custom_generate=spec, max_new_tokens=8, prefix_allowed_tokens_fn=lambda i, ids: 1 / 0)
    check_untouched(before, model)


def test_a_model_is_opened_once_and_not_kept_alive(monkeypatch):
    checked = []

    def counted(split, engine, honest=target.choose):
        checked.append(split.num_layers)
        return honest(split, engine)

    monkeypatch.setattr(target, "choose", counted)
    model, spec = build("llama"), SelfSpeculative(2, 3)
    for _ in range(3):
        model.generate(**batch(), custom_generate=spec, max_new_tokens=3)
    assert checked == [4]
    model.double()
    check(model, batch(), spec)
    assert checked == [4, 4]
    alive = weakref.ref(model)
    del model
    checked.clear()
    gc.collect()
    assert alive() is None


def test_edits_between_calls_are_seen():
    model, spec = build("llama"), SelfSpeculative(2, 3)
    outputs = [check(model, batch(), spec)[0].tolist()]
    with torch.no_grad():
        for parameter in model.parameters():  # as a step of training
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    outputs.append(check(model, batch(), spec)[0].tolist())
    model.lm_head.weight.data.mul_(-1)  # which torch does not count
    outputs.append(check(model, batch(), spec)[0].tolist())
    assert outputs[0] != outputs[1] != outputs[2]
