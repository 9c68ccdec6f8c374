"""`python -m train` trains exit heads as `selfspec tune` does, from prompts of a file or the model's own."""

from __future__ import annotations

import pytest
import torch
import yaml

from selfspec.llm import LLM
from selfspec.model.exit_heads import ExitHeads
from tests.gguf_files import source_model, write_gguf
from tests.models import build
from tests.target import load
from tests.tokenizers import word_tokenizer
from train import configuration
from train.__main__ import main
from train.config import parse_config
from train.configuration import read_yaml
from train.heads import HeadsConfig, HeadsRun, own_prompts
from train.material import load_tokenizer
from train.models import load_base


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A random model of 4 layers that writes random words, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    build("llama").save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(chat_folder, tmp_path):
    """What a YAML file for a run of a second would hold."""
    return {
        "heads": {
            "model": str(chat_folder),
            "exits": [1, 2],
            "output": str(tmp_path / "out"),
            "minutes": 0.01,
            "num_prompts": 12,
            "prompt_tokens": 6,
            "max_new_tokens": 12,
        }
    }


def run(tmp_path, settings, *options):
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(settings))
    return main([str(path), *options])


def test_a_chat_model_trains_from_nothing(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    assert run(tmp_path, settings) == 0
    [layer] = ExitHeads.load(tmp_path / "out").layers
    assert layer in (1, 2) and "training" in capsys.readouterr().out
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"question": "w{n} w{n + 1}"}}\n' for n in range(4, 14)))
    settings["data"] = {"path": str(file), "text_field": "question"}
    assert run(tmp_path, settings) == 0


def test_prompts_of_a_chat_model_are_its_own_user_turns(chat_folder):
    llm = LLM(chat_folder)
    config = HeadsConfig(num_prompts=6, prompt_tokens=5)
    prompts = [llm.tokenizer.decode(prompt) for prompt in own_prompts(llm, config)]
    assert all(prompt.startswith("w1 ") and prompt.endswith(" w2 w3") for prompt in prompts)
    assert len(set(prompts)) > 4 and all(3 < len(prompt.split()) <= 8 for prompt in prompts)
    llm.tokenizer.chat_template = "w1 {{ messages[0]['content'] | length }} w2"
    with pytest.raises(ValueError, match="the user's text in one place, got 0 places"):
        own_prompts(llm, config)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("heads", {"model": "/nowhere/model"}, "there is no folder /nowhere/model"),
        ("heads", {"exits": [1, 4]}, "exits must be from 1 to 3"),
        ("heads", {"exits": [0]}, "heads.exits must be a list of layer counts from 1"),
        ("heads", {"minute": 8}, "heads: key 'minute' is unknown; did you mean 'minutes'?"),
        ("heads", {"minutes": 0}, "heads.minutes must be above 0"),
        ("heads", {"num_prompts": 2}, "prompts must be at least 8 different ones"),
        ("data", {"path": "/nowhere.txt"}, "data.path must be a file or the id of a data set"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(settings, tmp_path, capsys, section, values, message):
    settings[section] = settings.get(section, {}) | values
    assert run(tmp_path, settings) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "Traceback" not in said


def test_the_shipped_configuration_names_every_key():
    content = read_yaml("configs/train/exit_heads.yaml")
    config = configuration.build(HeadsRun, content)
    assert set(content) == {"heads"} and set(content["heads"]) == set(type(config.heads).__dataclass_fields__)


def test_a_gguf_file_is_a_model_to_train(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", source_model(), "Q8_0")
    short = {"exits": {"period": 2}, "run": {"windows": [64]}, "eval": {"window": 64, "prompt_tokens": 16}}
    base = parse_config({"model": {"base": str(file)}, **short})
    assert torch.equal(load_base(base).lm_head.weight, load(file).model.lm_head.weight)
    assert load_tokenizer(file).eos_token_id is not None
