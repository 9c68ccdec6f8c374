"""A tiny model in a folder, and a way to run the command line in this process."""

from __future__ import annotations

import io
import shutil
import sys
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import LLM, SamplingParams
from selfspec.cli import main
from tests.tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def save_model(folder, tokenizer=True, template=None, **changes):
    """A random Llama of 4 layers over bytes, whose early layers are often right: the later ones do little."""
    torch.manual_seed(0)
    config = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 256}
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes}, bos_token_id=None))
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
        if "eos_token_id" not in changes:
            model.lm_head.weight[256] = 0.5 * model.lm_head.weight[0]  # never the likeliest: texts go on to their limit
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.normal_(std=0.6 if "layers.0" in name else 0.12)
    model.save_pretrained(folder)
    if tokenizer:
        made = byte_tokenizer()
        made.chat_template = template
        made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("chat"), template=TEMPLATE)


@pytest.fixture(scope="session")
def answer(model_folder):
    """What the library continues a prompt with."""
    llm = LLM(model_folder)

    def call(prompt, **params):
        [output] = llm.generate(prompt, SamplingParams(**params))
        return output.outputs[0]

    return call


@pytest.fixture
def copy_of(model_folder, tmp_path):
    """A copy of the model that a test may damage."""
    return shutil.copytree(model_folder, tmp_path / "copy")


class Terminal(io.StringIO):
    """What a person would see; it says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `selfspec ARGS`; `stdin` is piped bytes, or None for a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def call(*arguments, stdin=None):
        source = Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", source)
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


def assert_refused(outcome, code, *words):
    """One sentence on stderr that holds all the words, nothing on stdout."""
    assert outcome.out == ""
    assert outcome.err.startswith("selfspec: ") and outcome.err.count("\n") == 1, outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
    assert outcome.code == code, outcome.err
