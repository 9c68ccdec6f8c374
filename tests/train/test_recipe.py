"""The loss, the rotation and the layer dropout of LayerSkip."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from train import attention
from train.recipe import (
    EarlyExitLoss,
    LayerDropout,
    dropout_probability,
    exit_weights,
    rotating_exits,
)
from train.sections import ExitConfig


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(1))


def test_loss_with_the_last_layer_alone_is_plain_cross_entropy(model, tokens):
    loss, by_exit = EarlyExitLoss(ExitConfig(scale=0.0), num_layers=6)(model, tokens, step=0)
    expected = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected)
    assert list(by_exit) == [6]


def test_loss_is_the_weighted_sum_over_exits(model, tokens):
    config = ExitConfig(period=2, scale=0.5)
    loss, _ = EarlyExitLoss(config, num_layers=6)(model, tokens, step=0)
    states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    labels = tokens[:, 1:].flatten()

    def plain(state: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(state)[:, :-1].flatten(0, 1), labels)

    losses = [plain(model.model.norm(states[number])) for number in (1, 3, 5)] + [plain(states[6])]
    raw = [0.5, 0.5, 0.5, 1.0]
    expected = sum(weight * each for weight, each in zip(raw, losses, strict=True)) / sum(raw)
    torch.testing.assert_close(loss, expected)


def test_distilling_an_exit_from_itself_adds_its_own_entropy(model, tokens):
    plain = EarlyExitLoss(ExitConfig(period=6, distill=0.0), num_layers=6)(model, tokens, step=0)[1]
    mixed = EarlyExitLoss(ExitConfig(period=6, distill=1.0), num_layers=6)(model, tokens, step=0)[1]
    torch.testing.assert_close(plain[6], mixed[6])  # the last layer learns from the text alone
    assert not torch.allclose(plain[1], mixed[1])


@given(num_layers=st.integers(2, 40), period=st.integers(1, 40), start=st.integers(0, 1000))
def test_rotation_covers_every_layer_and_always_has_the_last(num_layers, period, start):
    period = min(period, num_layers)
    seen: set[int] = set()
    for step in range(start, start + period):
        exits = rotating_exits(step, num_layers, period)
        assert exits[-1] == num_layers and exits[0] >= 1
        assert len(exits) <= math.ceil(num_layers / period) + 1
        seen.update(exits)
    assert seen == set(range(1, num_layers + 1))


def test_weights_sum_to_one_and_early_exits_have_their_share():
    assert exit_weights([1, 4], 4, scale=0.5) == pytest.approx([1 / 3, 2 / 3])


def test_only_tokens_with_a_label_count(model, tokens):
    labels = tokens.clone()
    labels[:, :15] = -100
    loss, _ = EarlyExitLoss(ExitConfig(scale=0.0), num_layers=6)(model, tokens, 0, labels)
    torch.testing.assert_close(loss, model(input_ids=tokens, labels=labels).loss)
    same, by_exit = EarlyExitLoss(ExitConfig(distill=0.3), num_layers=6)(model, tokens, 0, tokens)
    plain, by_exit_too = EarlyExitLoss(ExitConfig(distill=0.3), num_layers=6)(model, tokens, 0)
    torch.testing.assert_close(same, plain)
    assert by_exit.keys() == by_exit_too.keys()
    none, by_exit = EarlyExitLoss(ExitConfig(), num_layers=6)(model, tokens, 0, torch.full_like(tokens, -100))
    none.backward()
    assert (
        none == 0
        and not by_exit
        and all(not p.grad.any() for p in model.model.layers.parameters() if p.grad is not None)
    )


def test_dropout_probability_grows_from_zero_to_the_maximum():
    chances = [dropout_probability(layer, num_layers=9, maximum=0.2) for layer in range(9)]
    assert chances[0] == 0.0 and chances[-1] == pytest.approx(0.2)
    assert chances[4] == pytest.approx(0.2 * (math.sqrt(2) - 1))
    assert chances == sorted(chances)


def test_dropout_skips_whole_sequences_without_rescaling(model):
    layer = model.model.layers[5]
    LayerDropout(model.model.layers, maximum=0.5)
    model.train()
    hidden = torch.randn(400, 2, 16)
    rotary = model.model.rotary_emb(hidden, torch.arange(2)[None])
    torch.manual_seed(0)
    output = layer(hidden, position_embeddings=rotary)
    skipped = (output == hidden).all(-1).all(-1)
    assert 150 < int(skipped.sum()) < 250
    torch.testing.assert_close(output[~skipped], layer.eval()(hidden, position_embeddings=rotary)[~skipped])


def test_dropout_is_off_in_evaluation_and_gone_after_removal(model, tokens):
    expected = model.eval()(tokens).logits
    dropout = LayerDropout(model.model.layers, maximum=0.9)
    assert torch.equal(model(tokens).logits, expected)
    model.train()
    assert not torch.equal(model(tokens).logits, expected)
    dropout.remove()
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("length", [1, 5, 16, 33])
def test_blocked_attention_equals_sdpa(model, length):
    tokens = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation("sdpa")
    expected = model(tokens).logits
    model.set_attn_implementation(attention.register())
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-4)
