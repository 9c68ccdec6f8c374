"""LayerSkip adapters from conversations that the model writes itself: one command, before and after in the card."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from selfspec.learning.workload import write
from tests.helpers import tokens_of
from tests.slow import slow
from tests.target import load
from train import chats, run
from train.__main__ import main
from train.config import parse_config
from train.generate import continue_prompts
from train.material import gather, load_tokenizer
from train.models import build_model, load_base
from train.recipe import EarlyExitLoss
from train.samples import UserTurn
from train.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}<|endoftext|>{{ message['role'] }}\n{{ message['content'] }}<|endoftext|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a tiny untrained chat model."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 3, 320, 128)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    shape = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    content = {
        "model": shape,
        "exits": {"period": 2},
        "run": {"windows": [32]},
        "eval": {"window": 32, "prompt_tokens": 8, "new_tokens": 8},
    }
    build_model(parse_config(content), tokenizer.eos_token_id).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(base, tmp_path) -> dict:
    return {
        "model": {"base": str(base)},
        "text": {"num_texts": 9, "num_held_out": 3, "prompt_tokens": 5, "max_new_tokens": 16, "batch_size": 6},
        "lora": {"rank": 2, "merge": False},
        "exits": {"period": 2, "scale": 0.3, "distill": 1.0, "teacher": "base", "dropout_max": 0.2},
        "optim": {"kind": "adamw", "adamw_lr": 0.01, "warmup_steps": 1},
        "run": {
            "output": str(tmp_path / "run"),
            "export": str(tmp_path / "adapter"),
            "max_steps": 4,
            "windows": [32],
            "tokens_per_batch": 64,
            "gradient_accumulation_steps": 1,
            "save_steps": 2,
            "log_steps": 1,
            "compile": False,
            "bf16": False,
        },
        "eval": {
            "every_steps": 4,
            "window": 32,
            "num_windows": 2,
            "num_prompts": 3,
            "prompt_tokens": 8,
            "new_tokens": 8,
            "batch_size": 2,
        },
    }


def start(settings, tmp_path, *options: str) -> int:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return main([str(path), *options])


def test_one_command_writes_chats_trains_and_compares(settings, base, tmp_path, capsys):
    assert start(settings, tmp_path, "--run.seed", "3") == 0
    card = (tmp_path / "adapter" / "README.md").read_text("utf-8")
    assert "continued from `tiny-chat`" in card and "\n  teacher: base\n" in card
    assert "| exit layer | loss | agreement | loss before | agreement before |" in card
    assert f"`python -m train {tmp_path / 'config.yaml'} --run.seed 3`" in " ".join(card.split())
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["agreement"]) == 4

    plain = load(str(base))
    adapted = load(str(base), adapter=tmp_path / "adapter")
    prompts = [[5, 6, 7], [9]]
    tokens = [
        tokens_of(target.generate(prompts, policy=policy, max_tokens=12))
        for target in (plain, adapted)
        for policy in ("plain", "adaptive")
    ]
    assert tokens[2] == tokens[3] and tokens[0] == tokens[1]
    logits = [target.split.model(torch.tensor([[5, 6, 7]])).logits for target in (plain, adapted)]
    assert not torch.equal(*logits)


def test_writing_goes_on_where_it_was_stopped(settings, tmp_path, monkeypatch):
    config = parse_config(settings)
    tokenizer = load_tokenizer(config.model.base)
    chats.write_chats(config, tokenizer)
    train, held_out = chats.read_chats(config, tokenizer)
    assert len(held_out) == 3 and not {tuple(c.prompt) for c in held_out} & {tuple(c.prompt) for c in train}
    file = tmp_path / "run" / chats.FILE
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 12  # user's turns and answers of 6 conversations, and of 6
    file.write_text("".join(lines[:16]) + "[[1, 2")  # stopped in the second batch
    with monkeypatch.context() as patch:
        patch.setattr(chats, "write", lambda *given: written.append(given[1]) or write(*given))
        written = []
        chats.write_chats(config, tokenizer)
        assert [len(prompts) for prompts in written] == [3, 6]
    assert chats.read_chats(config, tokenizer) == (train, held_out)
    file.unlink()
    chats.write_chats(config, tokenizer, seconds=1e-9)
    assert len(file.read_text().splitlines()) == 1 + 2 * 6, "one batch"
    settings["text"]["seed"] = 1
    with pytest.raises(ValueError, match=r"text gave 0 conversations to train on.*raise text\.num_texts"):
        chats.read_chats(parse_config(settings), tokenizer)


def test_only_answers_have_labels_and_prompts_are_those_of_the_template(settings, base):
    config = parse_config(settings)
    tokenizer = load_tokenizer(base)
    chats.write_chats(config, tokenizer)
    turn = UserTurn.of(tokenizer)
    for chat, document in zip(chats.read_chats(config, tokenizer)[0], gather(config).train, strict=True):
        text = tokenizer.decode(chat.prompt).removeprefix(turn.before).removesuffix(turn.after)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert chat.prompt == asked and text == text.strip() != ""
        tokens, labels = document.tolist()
        assert tokens[-1] == tokenizer.eos_token_id and set(labels[: chat.num_prompt]) == {-100}
        answer = chat.tokens[chat.num_prompt :]
        assert tokens[: len(chat.tokens)] == chat.tokens and labels[chat.num_prompt :][: len(answer)] == answer
        assert len(labels) == len(chat.tokens) + (answer[-1] != tokenizer.eos_token_id)


def test_templates_that_cannot_be_taken_apart_are_refused(settings, base):
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="the user's text in one place, got 2 places"):
        UserTurn.of(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        chats.write_chats(parse_config(settings), tokenizer)


def test_a_batch_of_any_lengths_continues_each_prompt_as_alone(base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    prompts = [[5], [7, 8, 9, 10, 11], [3, 4]]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert continue_prompts(model, prompts, 9) == alone


def test_every_exit_learns_from_the_base_without_dropped_layers(settings, base):
    from train.models import start_model
    from train.recipe import LayerDropout

    settings["exits"]["dropout_max"] = 0.9
    config = parse_config(settings)
    model = start_model(config, 0).train()
    LayerDropout(model.get_base_model().model.layers, 0.9)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.3)
    tokens = torch.randint(1, 320, (2, 12), generator=torch.Generator().manual_seed(0))
    config_ = config.exits
    plain = load_base(config).eval()(tokens).logits[:, :-1].flatten(0, 1).softmax(-1)
    torch.manual_seed(1)
    _, losses = EarlyExitLoss(config_, 4)(model, tokens, step=0)
    torch.manual_seed(1)
    log_probs = model(tokens).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    torch.testing.assert_close(losses[4], -(plain * log_probs).sum(-1).mean())


def test_training_ends_when_its_time_is_over_and_the_model_is_still_measured(settings, tmp_path, monkeypatch, capsys):
    looks = count()
    for module in ("run", "clock", "samples"):  # a clock that goes on by a hundredth of a second at every look
        monkeypatch.setattr(f"train.{module}.time", SimpleNamespace(monotonic=lambda: next(looks) / 100))
    settings["run"] |= {"max_steps": 10_000, "save_steps": 10_000, "max_minutes": 0.05}
    assert start(settings, tmp_path) == 1
    assert "run.max_minutes = 0.05 leaves no time to train" in capsys.readouterr().err
    monkeypatch.setattr(run, "EXPORT_SECONDS", 0.0)
    assert start(settings, tmp_path) == 0
    assert "the time is over, so the run ends here" in capsys.readouterr().out
    rows = (tmp_path / "adapter" / "training.csv").read_text().splitlines()[1:]
    rates = [float(row.split(",")[1]) for row in rows]
    assert 1 < len(rates) < 10_000 and rates[-1] < 0.1 * max(rates)


ABSENT = ("antlr4", "datasets", "gguf", "lm_eval", "omegaconf", "rich", "torchao", "xllamacpp")


@pytest.mark.parametrize("absent", [slow(ABSENT)], ids=["bare"])
def test_a_machine_with_torch_transformers_and_peft_is_enough(settings, tmp_path, absent):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); from train.__main__ import main; "
        f"sys.exit(main([{str(path)!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
