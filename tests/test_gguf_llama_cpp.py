"""llama.cpp as the judge of models: log-probabilities of GGUF files, whose weights are float32, are its own."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from selfspec.loading.gguf.file import GgufFile
from selfspec.loading.gguf.tokenizer import CONTROL, ENDS, FILE_ENDS, NORMAL, end_tokens
from tests.gguf_files import family_model, write_gguf, write_vocabulary
from tests.test_gguf import FAMILIES, SCALINGS, dense, factors_of_llama3

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
NUM_TOKENS, CHECKED = 100, (0, 1, 20, 99)
MOST = 1e-4  # difference of log-probabilities
WITHOUT = (), ("<|return|>",), ("<|return|>", "<|flush|>"), ("<|tool_response>",), ("<|call|>", "<|calls|>")
LETTER = 64  # the token of a letter
IDS = torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


def lively(model):
    """Weights so large that every part of the model shows in its log-probabilities."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif weight.ndim == 2:
                weight.normal_(std=0.1)
    return model


@torch.inference_mode()
def largest_difference(file):
    """Between llama.cpp's log-probabilities of the likeliest tokens after parts of a text, and those of the file."""
    from tests.llama_cpp import LlamaCpp

    judge, found = LlamaCpp(file, exact=True), dense(file)(IDS[None]).logits[0].float().log_softmax(-1)
    wanted = [judge.next_logprobs(IDS[: at + 1].tolist(), 8, forced=LETTER) for at in CHECKED]
    spread = max(max(one.values()) - min(one.values()) for one in wanted)
    assert spread > 0.5  # else the comparison says little
    rows = zip(CHECKED, wanted, strict=True)
    return max(abs(found[at, token].item() - one) for at, row in rows for token, one in row.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_every_family_are_those_of_llama_cpp(tmp_path, family):
    """Gemma's within 3e-3, since llama.cpp takes its activation from a table of float16 numbers."""
    source = lively(family_model(family, **FAMILIES[family]))
    most = 3e-3 if "gemma" in family else MOST
    assert largest_difference(write_gguf(tmp_path / "tiny.gguf", source, "F32")) < most


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_angles_are_those_of_llama_cpp(tmp_path, kind):
    keys = SCALINGS[kind][1]
    extra = {"rope_freqs.weight": factors_of_llama3()} if kind == "llama3" else {}
    source = lively(family_model("llama", tie_word_embeddings=False))
    file = write_gguf(tmp_path / "tiny.gguf", source, "F32", rope=keys, tensors=extra)
    assert largest_difference(file) < MOST


@pytest.mark.parametrize("original", [64, 2048])
def test_factors_for_long_and_for_short_texts_are_those_of_llama_cpp(tmp_path, original):
    """llama.cpp takes those for long texts where its context, 512 here, is longer than the original one."""
    source = lively(family_model("phi3", pad_token_id=0, max_position_embeddings=4096))
    keys = {"scaling.original_context_length": original, "scaling.attn_factor": 1.19, "dimension_count": 64}
    tensors = {
        "rope_factors_long.weight": np.linspace(1.5, 8, 32, dtype=np.float32),
        "rope_factors_short.weight": np.linspace(1, 1.4, 32, dtype=np.float32),
    }
    file = write_gguf(tmp_path / "tiny.gguf", source, "F32", rope=keys, tensors=tensors)
    assert largest_difference(file) < MOST


@pytest.mark.parametrize(("place", "without"), list(enumerate(WITHOUT)))
@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
def test_the_same_tokens_end_an_output_as_in_llama_cpp(tmp_path, kind, without, place):
    """All known names, of those between files one each, and names that end nothing, in an ordinary vocabulary."""
    from tests.llama_cpp import LlamaCpp

    between = {names[place % len(names)] for names in FILE_ENDS.values()}
    named = [*sorted((ENDS | between).difference(without)), "<|other|>", "<|start|>"]
    tokens = [*map(chr, range(33, 127)), *named]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * (len(tokens) - len(named)) + [kind] * len(named), np.int32),
        "tokenizer.ggml.merges": ["a b"],
    }
    path = write_vocabulary(tmp_path / "tiny.gguf", SimpleNamespace(metadata=metadata))
    judge, own = LlamaCpp(path), set(end_tokens(GgufFile(path, "tiny")))
    asked = range(len(tokens) - len(named), len(tokens))
    assert {tokens[one] for one in asked if one in own} == {tokens[one] for one in asked if judge.ends(one)}
