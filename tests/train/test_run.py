"""A few steps of training from a configuration to a folder anyone can load."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.__main__ import main
from train.agreement import evaluating, exit_agreement, held_out_scores
from train.config import parse_config
from train.models import build_model
from train.optim import MuonWithAdamW, warmup_stable_decay
from train.sections import OptimConfig


def test_a_small_run_ends_with_an_ordinary_model_folder(small_settings, tmp_path, capsys):
    folder = tmp_path / "model"
    small_settings["run"]["export"] = str(folder)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_settings))
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    quality = json.loads(printed.splitlines()[-1])
    assert len(quality["loss"]) == len(quality["agreement"]) == 4 and quality["agreement"][-1] == 1.0
    assert "held-out loss by exit" in printed
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.decode(tokenizer("x = 'é'\n")["input_ids"]) == "x = 'é'\n"
    files = {each.name for each in folder.iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == wanted | {"README.md", "training.csv"}
    assert "| 4 | " in (folder / "README.md").read_text("utf-8")
    assert (folder / "training.csv").read_text().startswith("step,learning_rate,loss_exit_1,")


def test_exporting_without_a_checkpoint_says_so(small_settings, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_settings))
    assert main([str(path), "--export-only"]) == 2
    assert "run.export must name a folder" in capsys.readouterr().err
    assert main([str(path), "--export-only", "--export", str(tmp_path / "model")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("step", "expected"), [(0, 1 / 5), (3, 4 / 5), (4, 1.0), (59, 1.0), (80, 0.5), (100, 0.0)])
def test_learning_rate_warms_up_stays_and_decays(step, expected):
    factor = warmup_stable_decay(step, progress=step / 100, warmup_steps=4, decay_fraction=0.4)
    assert factor == pytest.approx(expected)


def test_the_optimizer_gives_every_weight_to_one_part_and_survives_saving(small_settings):
    model = build_model(parse_config(small_settings), end_of_text=0)
    optimizer = MuonWithAdamW(model, OptimConfig())
    held = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(held) == sorted(id(each) for each in model.parameters())
    assert all(each.ndim == 2 for each in optimizer.param_groups[0]["params"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = MuonWithAdamW(model, OptimConfig())
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["lr"] = 0.125  # a scheduler writes here, and the part must see it
    assert other.parts[0].param_groups[0]["lr"] == 0.125
    assert len(other.state_dict()["parts"][1]["state"]) == len(optimizer.state_dict()["parts"][1]["state"])


def test_measuring_exits_leaves_the_model_as_it_was(small_settings):
    model = build_model(parse_config(small_settings), end_of_text=0).train()
    layer = model.model.layers[0]
    layer.forward = layer.forward  # what a compiled layer looks like
    with evaluating(model):
        assert not model.training and "forward" not in vars(layer)
    assert model.training and "forward" in vars(layer)
    tokens = torch.randint(1, 320, (3, 20), generator=torch.Generator().manual_seed(0))
    losses, _, _ = held_out_scores(model, tokens, rows=2)
    assert losses[-1] == pytest.approx(model(tokens, labels=tokens).loss.item(), abs=1e-5)
    agreement, counted = exit_agreement(model, tokens.tolist(), new_tokens=5, rows=2)
    assert agreement[-1] == 1.0 and counted <= 15
