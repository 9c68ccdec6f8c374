"""Compiled attention to keys of several splits, which threads share: equal to the model's own, the same bits always."""

from __future__ import annotations

import pytest
import torch

from selfspec.executors.cpu.install import choose
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from tests.models import build
from tests.slow import slow

LENGTH, SPLIT = 700, 256  # SPLIT: as in kernels/cpu/attention.h
# One shared key head, three of them, a head of no whole vector, and windows that begin within a split and a vector.
SHAPES = {
    "one": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "three": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 64},
    "odd": {"family": "gemma3_text", "head_dim": 24, "num_key_value_heads": 1, "sliding_window": 300},
    "window": {"family": "mistral", "sliding_window": 333},
}


def made(name):
    model = build(**({"family": "llama", "max_position_embeddings": 1024} | SHAPES[name]))
    return SplitModel(model)


def read(split, calls, page_size):
    """Hidden states of all tokens, read by calls of so many tokens."""
    tokens = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(1))
    pages, at, out = PagedCache(-(-LENGTH // page_size) + 1, page_size), 0, []
    own = pages.reserve(LENGTH)
    with torch.inference_mode():
        for count in calls:
            rows = PackedRows(pages, [Span(own, at, count)])
            out.append(split.run(rows, 0, split.num_layers, tokens[at : at + count]))
            at += count
    return torch.cat(out)


@pytest.mark.parametrize("two_bytes", [slow(False), True])
@pytest.mark.parametrize("name", SHAPES)
def test_splits_of_keys_change_no_bit_whatever_shares_a_call_or_its_threads(name, two_bytes):
    split = made(name)
    choose(split, "compiled")
    split.compiled.has_two_byte_cache = two_bytes
    at_ends = [SPLIT - 1, 2, SPLIT - 1, LENGTH - 2 * SPLIT]
    calls = ([LENGTH], [250, *[1] * 9, 230, 4, 5, LENGTH - 498], at_ends)
    try:
        outputs = []
        for threads, page_size in ((1, 64), (1, 1024), (2, 64), (3, 1024)):
            torch.set_num_threads(threads)
            outputs += [read(split, each, page_size) for each in calls]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, outputs[0]) for one in outputs)


@pytest.mark.parametrize("name", SHAPES)
def test_attention_to_several_splits_equals_the_models_own(name):
    ours, reference = made(name), made(name)
    choose(ours, "compiled")
    calls = [500, *[1] * 13, 6, LENGTH - 519]
    assert reference.compiled is None
    assert torch.allclose(read(ours, calls, 64), read(reference, [LENGTH], 64), atol=1e-4)
