"""Synthetic targets: named shapes, random weights, acceptance and varied outputs."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from eval.models import decode, with_policy
from eval.shapes import config_of
from eval.synthetic import (
    agreement,
    random_model,
    random_prompts,
    synthetic_target,
    text_tokens,
)
from tests.slow import slow

NUM_PARAMETERS = {  # as their model cards have it, in millions
    "smollm2-135m": 135,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "llama-2-7b": 6738,
    "llama-3-8b": 8030,
    "qwen3-0.6b": 596,
    "qwen3-4b": 4022,
    "gemma-3-4b": 3880,
}


@pytest.mark.parametrize("shape", NUM_PARAMETERS)
def test_a_shape_has_as_many_parameters_as_its_model(shape):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == NUM_PARAMETERS[shape]


def plain(target):
    return with_policy(target.llm, policy="plain", max_num_seqs=4)


def accepted(target, exit_layer, tokens=64):
    """Acceptance while decoding: accepted tokens over judged drafted tokens."""
    prompts = random_prompts(target.split.vocab_size, 4, 20)
    settings = {"policy": "fixed", "exit_layer": exit_layer, "num_speculative_tokens": 4}
    llm = with_policy(target.llm, max_num_seqs=4, **settings)
    done = decode(llm, prompts, tokens, temperature=target.made.temperature, seeds=range(4))
    counts = [item for one in done for item in one.stats.acceptance_histogram_by_draft_length.items()]
    judged = sum(min(right + 1, drafted) * n for drafted, by in counts for right, n in by.items())
    return sum(right * n for _, by in counts for right, n in by.items()) / judged


@settings(max_examples=5)
@given(st.sampled_from([0.95, 0.8, 0.5, 0.2]), st.integers(1, 4), st.sampled_from(["float32", "bfloat16"]))
def test_acceptance_is_the_requested_one(wanted, exit_layer, dtype):
    target = synthetic_target("tiny", dtype=getattr(torch, dtype), exit_layer=exit_layer, acceptance=wanted)
    assert target.made.acceptance == pytest.approx(wanted, abs=0.03)
    assert accepted(target, exit_layer) == pytest.approx(wanted, abs=0.12)


@pytest.mark.parametrize("temperature", [0.5, slow(1.0)])
@pytest.mark.parametrize("wanted", [0.8, slow(0.5), slow(0.3)])
def test_acceptance_is_that_of_samples_where_a_temperature_is_given(wanted, temperature):
    target = synthetic_target("tiny", exit_layer=2, acceptance=wanted, temperature=temperature)
    assert accepted(target, 2, 256) == pytest.approx(wanted, abs=0.06)


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_agreement_is_the_share_of_equal_samples_with_the_same_noise(seed):
    generator = torch.Generator().manual_seed(seed)
    first, second = 2 * torch.randn(2, 3, 40, generator=generator)
    second = second + first
    noise = -torch.rand(20000, 1, 40, generator=generator).log().neg().log()
    equal = (first + noise).argmax(-1) == (second + noise).argmax(-1)
    torch.testing.assert_close(agreement(first, second), equal.float().mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(agreement(first, first), torch.ones(3))


@pytest.mark.parametrize(("tied", "temperature"), [(False, 0.0), slow(True, 0.5)])
def test_texts_use_the_tokens_of_the_default_draft_vocabulary(tied, temperature):
    vocab = {"vocab_size": 36000, "tie_word_embeddings": tied}
    target = synthetic_target("tiny", temperature=temperature, **vocab)
    assert text_tokens(36000) == target.split.default_draft_vocab == 4500
    prompts = random_prompts(36000, 4, 20)
    done = decode(plain(target), prompts, 100, temperature=temperature, seeds=range(4))
    tokens = [token for one in done for token in one.token_ids]
    assert max(map(max, prompts)) < 4500 and sum(token < 4500 for token in tokens) > 0.95 * len(tokens)


def test_acceptance_1_is_exact():
    target = synthetic_target("tiny", exit_layer=2, acceptance=1.0)
    assert target.made.acceptance == accepted(target, 2) == 1


def test_later_exits_are_right_at_least_as_often_and_earlier_ones_rarely():
    target = synthetic_target("tiny", exit_layer=2, acceptance=0.6)
    rates = [accepted(target, exit_layer, 96) for exit_layer in (1, 2, 7)]
    assert rates[0] < 0.4 < rates[1] < rates[2]


@settings(max_examples=3)
@given(st.integers(0, 1000))
def test_outputs_do_not_repeat(seed):
    target = synthetic_target("tiny", seed=seed, exit_layer=1)
    prompts = random_prompts(target.split.vocab_size, 2, 24, seed)
    for done in decode(plain(target), prompts, 80):
        threes = list(zip(done.token_ids, done.token_ids[1:], done.token_ids[2:], strict=False))
        assert len(set(threes)) > 0.95 * len(threes)
        assert len(set(done.token_ids)) > 0.6 * len(done.token_ids)


def test_the_same_seed_makes_the_same_target_and_another_seed_another():
    one, two, other = (synthetic_target("tiny", seed=seed) for seed in (3, 3, 4))
    pairs = zip(one.split.model.parameters(), two.split.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert one.made == two.made
    assert not torch.equal(one.split.model.lm_head.weight, other.split.model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_and_buffer_is_real_and_ties_hold(tied):
    config = config_of("tiny", tie_word_embeddings=tied)
    model = random_model(config, torch.bfloat16, torch.device("cpu"))
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    twin = type(model)(config)  # the ordinary way: its buffers are computed from the configuration
    for (name, made), (_, usual) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(made, usual), name


def test_a_configuration_file_is_a_shape_too(tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for shape in (tmp_path, tmp_path / "config.json", config):
        target = synthetic_target(shape, acceptance=None)
        assert target.split.num_layers == 3
        assert (target.made.scale, target.made.exit_layer) == (1.0, 1)
        assert target.about()["synthetic"] is True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shape": "llama-9"}, "shape must be one of tiny, smollm2-135m"),
        ({"exit_layer": 8}, r"exit_layer must lie in 1\.\.7 for this shape, got 8"),
        ({"acceptance": 1.2}, r"acceptance must lie in 0\.05\.\.1, or be None to leave it as it is, got 1\.2"),
    ],
)
def test_invalid_arguments_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        synthetic_target(**{"shape": "tiny", **options})


def test_a_family_without_the_projections_is_refused():
    from transformers import GPT2Config

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="Llama-shaped"):
        synthetic_target(config)
