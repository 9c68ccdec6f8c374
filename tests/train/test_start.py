"""Runs that go on from an existing model, whole or by adapters, on texts of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.slow import slow
from tests.target import load
from train.__main__ import main
from train.backbone import find_parts
from train.config import parse_config
from train.export import best_exit
from train.models import build_model, load_base, start_model
from train.run import train
from train.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def base(small_settings, tmp_path) -> Path:
    """A folder with a tiny untrained model and its tokenizer."""
    folder = tmp_path / "base"
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, 320, 64)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    model = build_model(parse_config(small_settings), tokenizer.eos_token_id)
    model.generation_config.repetition_penalty = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(small_settings, base, tmp_path):
    """A run of four steps that goes on from `base` on a file of texts."""
    path = tmp_path / "texts.jsonl"
    records = [{"text": f"def g{number}(x):\n    return x + {number}\n" * 2} for number in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    del small_settings["corpus"]
    small_settings["model"] = {"base": str(base)}
    small_settings["data"] = {"path": str(path), "held_out_percent": 20.0}
    small_settings["optim"] = {"kind": "adamw", "adamw_lr": 0.003, "warmup_steps": 1}
    small_settings["run"]["export"] = str(tmp_path / "model")
    return small_settings


def run(settings, tmp_path, *options: str) -> int:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return main([str(path), *options])


def test_a_model_is_continued_on_texts(settings, base, tmp_path, capsys):
    assert run(settings, tmp_path) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["agreement"]) == 4
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, tmp_path / "model"))
    assert not torch.equal(before.model.layers[0].mlp.up_proj.weight, after.model.layers[0].mlp.up_proj.weight)
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert 1 <= saved["exit_layer"] <= 3 and 1 <= saved["num_speculative_tokens"] <= 8
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert f"continued from `{base.name}`" in card and f"base_model: {base.name}" in card and "| 4 | " in card
    assert "| exit layer | loss | agreement | loss before | agreement before |" in card
    assert (tmp_path / "model" / "training.csv").read_text().startswith("step,learning_rate,loss_exit_1,")


def test_the_base_is_measured_once_and_may_then_be_gone(settings, base, tmp_path, capsys):
    own = tmp_path / "own"
    shutil.copytree(base, own)
    settings["model"] = {"base": str(own)}
    assert run(settings, tmp_path) == 0
    shutil.rmtree(own)
    card = tmp_path / "model" / "README.md"
    before = card.read_text("utf-8").partition("## Quality")[2]
    assert "| exit layer | loss | agreement | loss before | agreement before |" in before
    assert run(settings, tmp_path, "--export-only") == 0
    assert card.read_text("utf-8").partition("## Quality")[2].startswith(before.partition("## Licence")[0])
    settings["eval"]["num_windows"] = 3
    assert run(settings, tmp_path, "--export-only") == 0
    assert "| exit layer | loss | agreement |\n" in card.read_text("utf-8")
    assert "the card has no figures of model.base" in capsys.readouterr().out


def test_the_stored_exit_is_what_selfspec_starts_from(settings, tmp_path):
    settings["run"] |= {"exit_layer": 2, "num_speculative_tokens": 3}
    assert run(settings, tmp_path) == 0
    target = load(str(tmp_path / "model"))
    assert (target.default_exit_layer, target.default_num_speculative_tokens) == (2, 3)


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_end_merged_or_as_a_folder_of_their_own(settings, base, tmp_path, merge):
    settings["lora"] = {"rank": 2, "merge": merge}
    assert run(settings, tmp_path) == 0
    folder = tmp_path / "model"
    assert (folder / "adapter_config.json").exists() != merge
    model = AutoModelForCausalLM.from_pretrained(folder if merge else base, dtype=torch.float32)
    if not merge:
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    changed = [
        (after.mlp.up_proj.weight - before.mlp.up_proj.weight.to(torch.bfloat16 if merge else torch.float32)).any()
        for before, after in zip(plain.model.layers, model.model.layers, strict=True)
    ]
    assert changed == [True] * 4
    assert torch.equal(plain.lm_head.weight.bfloat16(), model.lm_head.weight.bfloat16())
    assert "LoRA of rank 2" in " ".join((folder / "README.md").read_text("utf-8").split())


@pytest.mark.parametrize("kind", [slow("adapters"), slow("whole")])
def test_resuming_a_continued_run_reaches_the_same_weights(settings, tmp_path, kind):
    if kind == "adapters":
        settings["lora"] = {"rank": 2, "dropout": 0.2}
    whole = train(parse_config(settings)).model.state_dict()
    settings["run"]["output"] = str(tmp_path / "stopped")
    config = parse_config(settings)
    train(config)
    (tmp_path / "stopped" / "checkpoint-4").rename(tmp_path / "put-away")
    resumed = train(config, resume=True).model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_conversations_train_on_what_the_assistant_said(settings, tmp_path):
    records = [
        {"chat": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}, sir."}]}
        for n in range(80)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings["data"] = {"path": str(path), "messages_field": "chat", "held_out_percent": 20.0}
    assert run(settings, tmp_path) == 0
    assert "loss on the assistant's tokens alone" in (tmp_path / "model" / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_checkpointed_gradients_are_the_same(settings):
    weights = []
    for checkpointing in (False, True):
        settings["run"]["gradient_checkpointing"] = checkpointing
        settings["run"]["output"] += "x"
        weights.append(train(parse_config(settings)).model.state_dict())
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def test_texts_can_train_a_new_model_with_a_tokenizer_of_their_own(settings, tmp_path):
    settings["model"] = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    settings["model"] |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    assert run(settings, tmp_path) == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) <= 300
    assert "trained from scratch" in (tmp_path / "model" / "README.md").read_text("utf-8")


def test_models_that_do_not_fit_are_refused(settings, base, tmp_path, capsys):
    gpt2 = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=64)).save_pretrained(gpt2)
    AutoTokenizer.from_pretrained(base).save_pretrained(gpt2)
    for name, message in {
        str(gpt2): "model.base must be a decoder like Llama",
        str(tmp_path / "none"): "has no tokenizer that can be loaded",
    }.items():
        settings["model"]["base"] = name
        assert run(settings, tmp_path) == 2
        assert message in capsys.readouterr().err
    settings["model"]["base"] = str(base)
    settings["exits"]["period"] = 5
    assert run(settings, tmp_path) == 2
    assert "exits.period must be at most the layers of model.base = 4, got 5" in capsys.readouterr().err
    settings["exits"]["period"] = 2
    settings["lora"] = {"rank": 2, "target_modules": ["nothing"]}
    assert run(settings, tmp_path) == 2
    assert "lora.target_modules must be names of linear modules" in capsys.readouterr().err


def test_a_head_with_something_behind_it_is_refused(settings, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        found = plain(self, *args, **kwargs)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match="by norm and head alone, which LlamaForCausalLM does not"):
        load_base(parse_config(settings))


def test_the_best_exit_weighs_agreement_against_size(settings):
    model = start_model(parse_config(settings), 0)
    assert len(find_parts(model).layers) == 4
    assert best_exit(model, (0.9, 0.9, 0.9, 1.0))[0] == 1  # the earliest of equals
    assert best_exit(model, (0.0, 0.0, 0.95, 1.0))[0] == 3
    short, long = (best_exit(model, (agreement, 0.0, 0.0, 1.0))[1] for agreement in (0.3, 0.95))
    assert short < long
