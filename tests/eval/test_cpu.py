"""The CPU figures: GGUF files hold the model's weights, ratios are of what was measured, and the command runs."""

from __future__ import annotations

import json
import os
import struct
import sys

import numpy as np
import pytest
import torch

from eval.__main__ import main
from eval.cpu import gguf
from eval.cpu.decoding import ratio_by_item
from eval.cpu.llamacpp import LlamaCpp
from eval.cpu.pieces import bytes_read, pieces
from eval.methods import Answer
from eval.timing import Sample
from selfspec.legacy import LoadedTarget as Target
from tests.models import build, rounded, tiny

FORMATS = {gguf.WHOLE: "<I", gguf.FRACTION: "<f"}


def read(path):
    """Facts and tensors of a GGUF file, by the format's description."""
    data, at = path.read_bytes(), 24
    magic, version, num_tensors, num_facts = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)

    def text(at):
        (size,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + size].decode(), at + 8 + size

    facts, places = {}, {}
    for _ in range(num_facts):
        key, at = text(at)
        (kind,) = struct.unpack_from("<I", data, at)
        if kind == gguf.TEXT:
            facts[key], at = text(at + 4)
        else:
            (facts[key],), at = struct.unpack_from(FORMATS[kind], data, at + 4), at + 8
    for _ in range(num_tensors):
        name, at = text(at)
        (dims,) = struct.unpack_from("<I", data, at)
        *sizes, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
        assert kind in (gguf.FLOAT32, gguf.BFLOAT16) and offset % gguf.ALIGNMENT == 0
        places[name], at = (sizes[::-1], kind, offset), at + 4 + 8 * dims + 12
    start = at + -at % gguf.ALIGNMENT
    tensors = {name: tensor(data, start + offset, kind, sizes) for name, (sizes, kind, offset) in places.items()}
    return facts, tensors


def tensor(data, start, kind, sizes):
    """float32; of bfloat16, the upper half of every number is there."""
    stored = np.frombuffer(data, np.uint16 if kind == gguf.BFLOAT16 else np.uint32, int(np.prod(sizes)), start)
    return (stored.astype(np.uint32) << (16 if kind == gguf.BFLOAT16 else 0)).view(np.float32).reshape(sizes)


def test_a_gguf_file_of_halves_holds_the_same_numbers(tmp_path):
    model = rounded(build("llama"))
    gguf.write(model, tmp_path / "whole.gguf")
    gguf.write(model, tmp_path / "half.gguf", half=True)
    (_, whole), (facts, half) = read(tmp_path / "whole.gguf"), read(tmp_path / "half.gguf")
    assert facts["general.file_type"] == gguf.MOSTLY_BFLOAT16
    assert all(np.array_equal(whole[name], half[name]) for name in {**whole, **half})
    assert os.path.getsize(tmp_path / "half.gguf") < 0.6 * os.path.getsize(tmp_path / "whole.gguf")
    assert gguf.fits_half(model) and not gguf.fits_half(build("llama"))


def test_a_gguf_file_holds_the_weights_and_their_shape(tmp_path):
    model = build("llama")
    gguf.write(model, tmp_path / "model.gguf")
    facts, tensors = read(tmp_path / "model.gguf")
    assert facts["llama.block_count"] == 4 and facts["llama.attention.head_count_kv"] == 2
    assert facts["llama.rope.freq_base"] == 10000.0 and facts["tokenizer.ggml.model"] == "none"
    assert np.array_equal(tensors["output.weight"], model.lm_head.weight.detach().numpy())
    assert np.array_equal(tensors["blk.3.ffn_down.weight"], model.model.layers[3].mlp.down_proj.weight.detach().numpy())
    whole = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()  # heads of 8: i and i + 4 become neighbours
    turned = tensors["blk.1.attn_q.weight"]
    assert [np.flatnonzero((whole == row).all(1))[0] for row in turned[8:16]] == [8, 12, 9, 13, 10, 14, 11, 15]
    assert len(tensors) == 3 + 4 * len(gguf.PARTS)


def test_other_models_are_not_handed_to_llama_cpp(tmp_path):
    with pytest.raises(ValueError, match=r"^only a Llama without biases .* got qwen2 with rotary positions 'default'$"):
        gguf.write(build("qwen2"), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="without biases"):
        gguf.write(build("llama", attention_bias=True), tmp_path / "model.gguf")


PEER = """#!{python}
import json, sys
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = asked["prompt"][:1] * asked["max_new_tokens"]
    print(json.dumps({{"tokens": tokens, "seconds": 2, "processor": 1}}), flush=True)
"""


def test_a_peer_answers_prompt_by_prompt_by_its_own_clock(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(PEER.format(python=sys.executable))
    interpreter.chmod(0o755)
    peer = LlamaCpp(str(interpreter), build("llama"), tmp_path, 64)
    assert peer([[5, 6], [7]], 3) == [Answer([5] * 3, None), Answer([7] * 3, None)]
    assert (peer.seconds, peer.processor) == (4, 2)
    peer.close()


def test_a_peer_that_cannot_run_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"^--llama-python .*nobody cannot be started"):
        LlamaCpp(str(tmp_path / "nobody"), build("llama"), tmp_path, 64)
    with pytest.raises(ValueError, match=r"llama\.cpp could not run this model"):
        LlamaCpp("/bin/true", build("llama"), tmp_path, 64)


def test_bytes_of_a_token_are_all_weights_but_the_embedding_which_a_tied_head_reads_after_all():
    untied, tied = tiny("llama"), build("llama", tie_word_embeddings=True)
    total = sum(p.nbytes for p in untied.model.parameters())
    assert bytes_read(untied.stack) == total - 4 * 96 * 32
    from selfspec.model.stack import Stack

    assert bytes_read(Stack(tied)) == sum(p.nbytes for p in tied.parameters())


def test_bytes_of_a_token_are_those_of_packed_weights_where_they_are_packed():
    even = {"hidden_size": 64, "intermediate_size": 96}  # nothing is filled up
    whole = Target(build("llama", **even), engine="compiled").stack
    half = Target(rounded(build("llama", **even)), engine="compiled").stack
    norms = 9 * 64 * 4
    assert 2 * (bytes_read(half) - norms) == bytes_read(whole) - norms
    assert bytes_read(whole) == sum(p.nbytes for p in whole.model.parameters()) - 4 * 96 * 64


def test_ratios_are_of_the_medians():
    found = pieces(tiny("llama").stack, 1, 2)
    ms = {piece: values["median"] for piece, values in found["milliseconds"].items()}
    assert found["verify_5_over_1"] == ms["1 row of 5"] / ms["1 row of 1"]
    assert found["throughput_16_over_1"] == 16 * ms["1 row of 1"] / ms["16 rows of 1"]
    assert found["clock"] == "processor time"


def test_methods_are_compared_prompt_by_prompt():
    taken = {"a": [[1.0, 4.0], [3.0, 4.0], [2.0, 4.0]], "b": [[4.0, 1.0]] * 3}
    readings = [(m, r, i, s) for m, rows in taken.items() for r, row in enumerate(rows) for i, s in enumerate(row)]
    samples = [Sample(*reading, []) for reading in readings]
    assert [*ratio_by_item(samples, "b", "a")] == [0.5, 4.0]


def test_the_command_measures_the_embedded_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.cpu.pieces.BYTES", 1 << 20)
    monkeypatch.setattr("eval.cpu.__main__.REPEATS", 2)
    few = ["--threads", "1", "--max-new-tokens", "6", "--repeats", "1", "--no-rivals", "--output", str(tmp_path)]
    assert main(["cpu", *few]) == 0
    *table, document = capsys.readouterr().out.strip().splitlines()
    record = json.loads(document)
    assert json.loads((tmp_path / "cpu.json").read_text()) == record
    whole, *categories = record["decoding"]
    assert [row["method"] for row in whole["rows"]] == ["plain", "adaptive"]
    assert all(row["differing_prompts"] == 0 for row in whole["rows"])
    assert len(categories) == 6
    assert record["pieces"][0]["engine"] == "compiled"
    assert any("verifying 5 tokens over 1" in line for line in table)
    assert torch.get_num_threads() == 1


def test_the_command_refuses_unknown_engines(capsys):
    assert main(["cpu", "--engine", "turbo"]) == 2
    assert capsys.readouterr().err.endswith("eval: engine must be one of auto, views, compiled, got 'turbo'\n")
