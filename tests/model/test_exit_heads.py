"""Exit heads change what early layers guess, and nothing of what the model says."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from selfspec.executors.cpu.packed import in_bytes
from selfspec.model import exit_heads as module
from selfspec.model.exit_heads import FILE, ExitHead, ExitHeads
from selfspec.model.quantized import dense
from tests.helpers import make_prompts, tokens_of
from tests.models import build, some_heads
from tests.target import Target, load

PROMPTS = make_prompts([9, 4, 12], seed=3)


def test_a_new_head_changes_nothing():
    hidden = torch.randn(4, 32)
    assert torch.equal(ExitHead(32, 8)(hidden), hidden)
    heads = some_heads()
    assert not torch.equal(heads(hidden, 1), hidden)
    assert heads(hidden, 2) is hidden, "a layer without a head"
    many = torch.randn(3, 4, 32)
    assert torch.equal(heads.of_layers(many, (1, 2, 3)), torch.stack([heads(many[0], 1), many[1], heads(many[2], 3)]))
    last = torch.randn(4, 32)
    assert not torch.allclose(heads(hidden, 1, last), heads(hidden, 1), atol=1e-3)
    assert torch.equal(heads(hidden, 1, torch.zeros(4, 32)), heads(hidden, 1)), "what is not known counts as zeros"
    assert torch.equal(heads.of_layers(many, (1, 2, 3), last)[0], heads(many[0], 1, last))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.inference_mode()
def test_the_last_layer_never_sees_them(family):
    target = Target(build(family))
    plain = target.generate(PROMPTS, policy="plain", max_tokens=20, temperature=0.7)
    hidden = torch.randn(5, 32)
    early, late = target.split.logits(hidden, 3), target.split.logits(hidden)
    target.exit_heads = some_heads()
    assert torch.equal(target.split.logits(hidden), late) and torch.equal(target.split.logits(hidden, 4), late)
    assert not torch.allclose(target.split.logits(hidden, 3), early)
    for policy in (
        {"exit_layer": 1},
        {"exit_layer": 3, "num_speculative_tokens": 5},
        {"policy": "del"},
        {"policy": "adaptive"},
    ):
        drafted = target.generate(PROMPTS, max_tokens=20, temperature=0.7, **policy)
        assert tokens_of(drafted) == tokens_of(plain)
    target.exit_heads = None
    assert torch.equal(target.split.logits(hidden, 3), early)


def test_saved_and_loaded_they_are_the_same(tmp_path):
    heads = some_heads()
    heads.weights = "0123456789abcdef"
    assert heads.save(tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / FILE
    for path in (tmp_path / "new" / "folder", tmp_path / "new" / "folder" / FILE):
        again = ExitHeads.load(path)
        assert (again.layers, again.hidden_size, again.inner_size, again.weights) == ((1, 3), 32, 5, "0123456789abcdef")
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), heads.parameters(), strict=True))
        assert not any(parameter.requires_grad for parameter in again.parameters())


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    some_heads(seed=1).save(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        some_heads(seed=2).save(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before and os.listdir(tmp_path) == [FILE]


def test_what_is_no_file_of_exit_heads_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no exit_heads\.safetensors there"):
        ExitHeads.load(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(b"rubbish")
    with pytest.raises(OSError, match="truncated or damaged"):
        ExitHeads.load(tmp_path)
    save_file({"a": torch.ones(2)}, file)
    with pytest.raises(OSError, match="no file of exit heads"):
        ExitHeads.load(tmp_path)
    save_file({"a": torch.ones(2)}, file, {"format": "selfspec exit heads 2"})
    with pytest.raises(OSError, match="of an earlier version, which do not read the model's final states; train them"):
        ExitHeads.load(tmp_path)
    some_heads().save(tmp_path)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(OSError, match="truncated or damaged"):
        ExitHeads.load(tmp_path)


def in_8_bits(heads):
    """The heads in float32, with weights as compiled rounds read them."""
    made = copy.deepcopy(heads).float()
    for head in made.heads.values():
        for weight in (head.gate, head.up, head.down):
            weight.copy_(dense(in_bytes(weight).weight))
    return made


@pytest.mark.parametrize("inner", [1, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_compiled_heads_are_the_blocks_of_torch(inner, dtype):
    heads = some_heads(inner=inner)
    target = Target(build("llama").to(dtype), exit_heads=heads, backend="compiled")
    split, hidden = target.split, torch.randn(3, 7, 32)
    before = hidden.clone()
    for _ in range(2):
        for count, last in ((0, None), (1, None), (7, None), (1, torch.randn(1, 32)), (7, torch.randn(7, 64)[:, ::2])):
            given = hidden[:, :count]
            wanted = in_8_bits(target.exit_heads).of_layers(given, (1, 2, 3), last)
            found = split.through_heads(given, (1, 2, 3), last)
            tolerance = 1e-2 if dtype == torch.float32 else 0.1  # activations have two bytes
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        for head in target.exit_heads.heads.values():  # as online learning does
            head.down.mul_(-1)
            head.norm.mul_(2)
    assert torch.equal(hidden, before)


def test_heads_of_another_model_are_refused_and_of_other_weights_noticed(caplog):
    target = Target(build("llama"))
    for wrong in (some_heads(width=64), some_heads(layers=(2, 4))):
        with pytest.raises(ValueError, match="exit_heads are of a model of width"):
            target.exit_heads = wrong
        assert target.exit_heads is None
    other = some_heads()
    other.weights = "of other weights"
    target.exit_heads = other
    assert "trained for other weights" in caplog.text
    with pytest.raises(ValueError, match="exit heads need layers"):
        ExitHeads((), 32, 4)


def test_heads_beside_the_weights_are_found_and_can_be_left_out(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model").exit_heads is None
    some_heads().save(tmp_path / "model")
    some_heads(layers=(2,)).save(tmp_path / "apart")
    assert load(tmp_path / "model").exit_heads.layers == (1, 3)
    assert load(tmp_path / "model", exit_heads="none").exit_heads is None
    assert load(tmp_path / "model", exit_heads=tmp_path / "apart").exit_heads.layers == (2,)
    assert load(build("llama"), exit_heads=some_heads()).exit_heads.layers == (1, 3)
    with pytest.raises(FileNotFoundError, match="exit heads"):
        load(tmp_path / "model", exit_heads=tmp_path / "nowhere")


def test_they_follow_the_model_to_its_number_format_and_stay_when_it_is_opened_again():
    model = build("llama").to(torch.bfloat16)
    target = Target(model, exit_heads=some_heads())
    assert target.exit_heads.heads["1"].down.dtype == torch.bfloat16
    model.to(torch.float64)
    plain = target.generate(PROMPTS[:1], policy="plain", max_tokens=6)
    assert target.generate(PROMPTS[:1], exit_layer=1, max_tokens=6)[0].token_ids == plain[0].token_ids
    assert target.exit_heads.heads["1"].down.dtype == torch.float64


@pytest.mark.parametrize(
    "about",
    [
        {"layers": [1, 3], "hidden_size": 10**9, "inner_size": 10**9},
        {"layers": [True, 3], "hidden_size": 32, "inner_size": 5},
        {"layers": [-1, 3], "hidden_size": 32, "inner_size": 5},
        {"layers": list(range(1, 20_000)), "hidden_size": 32, "inner_size": 5},
        {"layers": [1], "hidden_size": 32, "inner_size": 5},
        {"layers": None, "hidden_size": 32, "inner_size": 5},
        [],
    ],
    ids=["huge", "a truth value", "negative", "many", "fewer", "none", "a list"],
)
def test_a_file_whose_words_do_not_fit_its_tensors_is_refused_before_anything_is_made_of_it(tmp_path, about):
    state, generator = some_heads().state_dict(), torch.get_rng_state()
    metadata = {"format": module.FORMAT, "about": json.dumps(about), "weights": ""}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / FILE, metadata)
    with pytest.raises(OSError, match="truncated or damaged"):
        ExitHeads.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), generator)
