"""`selfspec.load`: every way to name a model, and nothing left changed behind."""

from __future__ import annotations

import builtins
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import selfspec
from selfspec.calibrate import profile
from selfspec.control.acceptance import Tracker
from selfspec.model.exit_heads import FILE as EXIT_HEADS
from selfspec.model.exit_heads import ExitHeads
from tests.target import Target, load

BEST = "cuda" if torch.cuda.is_available() else "cpu"  # the device where none is named


def test_a_folder_is_loaded_with_its_tokenizer(model_folder):
    for name in (model_folder, str(model_folder)):
        target = load(name)
        assert isinstance(target, Target)
        assert target.split_error < 1e-3
        assert target.tokenizer.decode(target.tokenizer("abc")["input_ids"]) == "abc"
        assert (target.split.dtype, target.split.device) == (torch.float32, torch.device(BEST))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.float64, torch.float64),
        ("torch.float16", torch.float16),
        ("auto", torch.bfloat16),
    ],
)
def test_dtypes_may_be_named_or_given(model_folder, tmp_path, dtype, expected):
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path, dtype=dtype, device="cpu").split.dtype is expected


@pytest.mark.parametrize(
    "option", [{"dtype": "int8"}, {"dtype": torch.int64}, {"device": "toaster"}, {"device": "meta"}]
)
def test_unknown_dtypes_and_devices_are_refused(model_folder, option):
    [name] = option
    with pytest.raises(ValueError, match=rf"{name} must be one of .*, got {option[name]}"):
        load(model_folder, **option)


def test_a_model_object_is_used_as_it_is(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    target = load(model)
    assert target.model is model
    assert target.tokenizer is None
    assert target.generate([[1, 2, 3]], max_tokens=3)[0].text == ""
    assert all(id(value) == before[name][0] for name, value in model.named_parameters())
    assert all(torch.equal(value, before[name][1]) for name, value in model.named_parameters())


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"device": "cpu"}, {"adapter": "somewhere"}])
def test_a_model_object_is_not_changed_on_request_either(model_folder, option):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(ValueError, match=f"{next(iter(option))} is for a model given by name"):
        load(model, **option)


def test_a_folder_without_a_tokenizer_gives_a_target_of_token_ids(model_folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.tokenizer is None
    with pytest.raises(ValueError, match="no tokenizer"):
        target.generate("abc")
    given = object()
    assert load(tmp_path, given).tokenizer is given


def test_loading_is_silent_and_leaves_the_logging_as_it_was(model_folder, capfd):
    transformers_logging.set_verbosity(logging.INFO)
    try:
        load(model_folder)
        with pytest.raises(OSError, match=r"config\.json"):
            load(model_folder.parent)
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.set_tqdm_hook(None) is None
        assert capfd.readouterr() == ("", "")
    finally:
        transformers_logging.set_verbosity(logging.WARNING)


def test_code_from_a_checkpoint_is_never_run(copy_of):
    config = (copy_of / "config.json").read_text(encoding="utf-8")
    config = config.replace('"llama"', '"own"').replace("{", '{"auto_map": {"AutoConfig": "own.Config"},', 1)
    (copy_of / "config.json").write_text(config, encoding="utf-8")
    (copy_of / "own.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    with pytest.raises(selfspec.UnsupportedModelError, match="code from its own repository, which is not run"):
        load(copy_of)


# ------------------------------------------------------------------------------------------------------ adapters


@pytest.fixture
def adapter_folder(model_folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_put_on_the_model(model_folder, adapter_folder):
    import peft

    target = load(model_folder, adapter=adapter_folder)
    whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), adapter_folder)
    ids = [5, 6, 7]
    expected = whole.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    [done] = target.generate([ids], max_tokens=12)
    assert done.token_ids == expected[0, 3:].tolist()
    assert done.token_ids != load(model_folder).generate([ids], max_tokens=12)[0].token_ids


def test_an_adapter_is_not_a_model(adapter_folder):
    with pytest.raises(FileNotFoundError, match="PEFT adapter; give its base model"):
        load(adapter_folder)


def test_without_peft_one_sentence_says_what_to_install(model_folder, adapter_folder, monkeypatch):
    real = builtins.__import__

    def without_peft(name, *arguments, **options):
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ImportError, match="pip install peft"):
        load(model_folder, adapter=adapter_folder)


@pytest.mark.slow
def test_what_lies_beside_the_weights_is_found_in_a_repository_of_the_hub_too(model_folder, tmp_path):
    name, commit = "models--org--tiny", "0" * 40
    folder = tmp_path / "hub" / name / "snapshots" / commit
    shutil.copytree(model_folder, folder)
    target = load(folder)
    ExitHeads([1], target.split.config.hidden_size, 2).save(folder)
    profile.store_prior(folder, load(folder).split, Tracker(target.split.num_layers).state())
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text(commit)
    names = [str(folder / name) for name in (profile.STORED, EXIT_HEADS)]
    code = f"""
import os
from selfspec.loading.hub import open_target
first = open_target('org/tiny')
print(first.exit_heads.layers, first.policies.stored_prior is not None)
for name in {names}:
    os.unlink(name)
bare = open_target('org/tiny')
print(bare.exit_heads, bare.policies.stored_prior is not None)
"""
    own = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    own.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "(1,) True\nNone False\n"), done.stderr


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(selfspec.UnsupportedModelError, match="must be a transformers causal LM, got a Identity"):
        load(torch.nn.Identity())
