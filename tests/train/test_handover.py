"""A model handed over as an archive in parts is the same model, and a part that is missing is named."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec.loading.hub import open_model
from tests.gguf_files import source_model, write_gguf
from tests.models import build
from train.handover import main, parts_of, unpack
from train.tokenizer import train_tokenizer


@pytest.fixture
def packed(tmp_path):
    """A tiny model's folder, and its archive in several parts."""
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    train_tokenizer(["some text"], 280, 64).save_pretrained(folder)
    archive = tmp_path / "out" / "tiny.tar.xz"
    assert main([str(folder), str(archive), "--part-mb", "0.02", "--dtype", "float32"]) == 0
    return folder, archive


def test_the_parts_are_joined_to_the_same_model(packed, tmp_path, capsys):
    folder, archive = packed
    parts = parts_of(archive)
    assert len(parts) > 2 and all(part.stat().st_size <= 20_000 for part in parts)
    made = unpack(archive, tmp_path / "made")
    assert sorted(tmp_path.iterdir()) == sorted([folder, archive.parent, made])
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).state_dict() for each in (folder, made)]
    assert all(torch.equal(models[1][name], weight) for name, weight in models[0].items())
    assert AutoTokenizer.from_pretrained(made).decode([260, 261]) == AutoTokenizer.from_pretrained(folder).decode(
        [260, 261]
    )
    whole = tmp_path / "whole.tar.xz"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert (unpack(whole, tmp_path / "other") / "config.json").is_file()
    kept = made / "config.json"
    kept.unlink()
    unpack(archive, made)  # one that is there is kept
    assert not kept.exists()


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_of_a_gguf_file_are_handed_over_exactly(tmp_path, tied, capsys):
    without = {"without": ("output.weight",)} if tied else {}  # the head is then the embeddings
    file = write_gguf(tmp_path / "tiny.gguf", source_model(), "Q4_1", **without)
    archive = tmp_path / "tiny.tar.xz"
    assert main([str(file), str(archive)]) == 0
    made = unpack(archive, tmp_path / "made")
    weights = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).state_dict()
    wanted, tokenizer = open_model(file, device="cpu")
    assert weights.keys() == wanted.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in wanted.state_dict().items())
    assert AutoTokenizer.from_pretrained(made).get_vocab() == tokenizer.get_vocab()
    assert main([str(file), str(tmp_path / "dense.tar.xz"), "--dtype", "float32"]) == 0
    sizes = [sum(part.stat().st_size for part in parts_of(each)) for each in (archive, tmp_path / "dense.tar.xz")]
    assert 2 * sizes[0] < sizes[1]
    capsys.readouterr()
    assert main([str(made), str(archive), "--dtype", "blocks"]) == 2
    assert "--dtype blocks is for GGUF files of quantised weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: parts[-1].unlink(), "damaged or lacks its last parts"),
        (lambda parts: parts[1].unlink(), r"all its parts beside it, from \.part000 on"),
        (lambda parts: [part.unlink() for part in parts], "got none"),
        (lambda parts: parts[1].write_bytes(b"\0" * parts[1].stat().st_size), "damaged or lacks its last parts"),
    ],
    ids=["last", "second", "all", "zeros"],
)
def test_a_missing_or_damaged_part_is_refused_and_leaves_nothing(packed, tmp_path, damage, message):
    _, archive = packed
    damage(parts_of(archive))
    with pytest.raises(ValueError, match=message):
        unpack(archive, tmp_path / "made")
    assert not list(tmp_path.glob("made*"))


def test_wrong_arguments_give_one_sentence(packed, tmp_path, capsys):
    folder, _ = packed
    capsys.readouterr()
    assert main([str(folder), str(tmp_path / "tiny.zip")]) == 2
    assert capsys.readouterr().err == "train.handover: the archive must be named NAME.tar.xz, got 'tiny.zip'\n"
    assert main([str(folder), str(tmp_path / "tiny.tar.xz"), "--part-mb", "0"]) == 2
    assert "--part-mb must be above 0" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(tmp_path / "tiny.tar.xz")]) == 1
    with torch.no_grad():
        model = build("llama")
        model.lm_head.weight[0, 0] = 1e6
    model.save_pretrained(folder)
    capsys.readouterr()
    assert main([str(folder), str(tmp_path / "tiny.tar.xz")]) == 2
    assert "--dtype must be one that holds all weights, got float16" in capsys.readouterr().err
