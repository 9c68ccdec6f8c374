"""An exact stack: the same bits whatever else a call holds, and the same model up to rounding."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.errors import UnsupportedModelError
from selfspec.model import exact
from selfspec.model.exact import ExactStack, blocks_of
from selfspec.model.exact_check import difference
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.stack import Stack
from tests.models import FAMILIES, build
from tests.slow import slow
from tests.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def stacks(family, dtype, rows=8, wide=16):
    """The same tiny model, opened in the ordinary way and exactly."""
    source = Stack(build(family).to(DTYPES[dtype]))
    return source, ExactStack(source, rows, wide)


@pytest.mark.parametrize("family", [family if family in ("llama", "gpt2") else slow(family) for family in FAMILIES])
def test_every_family_is_exact(family):
    stacks(family, "bfloat16")  # checks itself when it is made, and is refused where it is not


@pytest.mark.parametrize(("dtype", "rows", "wide"), [("float32", 1, 1), ("bfloat16", 4, 64)])
def test_any_sizes_of_blocks_are_exact(dtype, rows, wide):
    assert difference(stacks("qwen3", dtype, rows, wide)[1]) == ""


def test_the_ordinary_mode_is_not_exact_and_the_check_sees_it():
    assert difference(stacks("llama", "float32")[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_it_is_the_same_model_up_to_rounding(family):
    source, made = stacks(family, "float32")
    lengths, tokens = (21, 3, 9), torch.arange(33) % 90 + 3
    out = []
    for stack in (source, made):
        cache = PagedCache(12, 8)
        rows = PackedRows(cache, [Span(cache.reserve(n), 0, n) for n in lengths])
        taps = {2: None}
        hidden = stack.run(rows, 0, 3, tokens, taps)
        out.append((taps[2], stack.logits(stack.run(rows, 3, 4, hidden)), stack.logits(hidden, 3)))
    for usual, exactly in zip(*out, strict=True):
        torch.testing.assert_close(exactly, usual, rtol=1e-3, atol=1e-4)


@st.composite
def calls(draw):
    """Spans of several rows, some of which are prompts being read."""
    spans, prompts = [], []
    for page in range(draw(st.integers(1, 8))):
        start, length = draw(st.integers(0, 40)), draw(st.integers(1, 40))
        spans.append(Span([page], start, length))
        prompts.append(draw(st.sampled_from([0, start + length, start + length + 5])))
    return spans, prompts


@given(calls(), st.sampled_from([4, 8]), st.sampled_from([8, 16]))
def test_blocks_hold_every_token_once_in_order_and_roles_go_by_position(call, narrow, wide):
    spans, prompts = call
    rows = PackedRows(PagedCache(8, 96), spans)
    rows.plans["prompts"] = prompts
    blocks = blocks_of(rows, narrow, wide)
    assert sorted(i for block in blocks for i in block.index.tolist()) == list(range(rows.num_tokens))
    seen = {}
    for block in blocks:
        assert block.rows.positions.shape == (1, block.width) and len(block.index) <= block.width
        assert block.rows.positions[0, : len(block.index)].tolist() == rows.positions[0, block.index].tolist()
        for span in block.rows.spans:
            (page,), num_prompt = span.pages, prompts[span.pages[0]]
            assert span.start == seen.get(page, spans[page].start)  # a row's earlier tokens come first
            seen[page] = span.start + span.length
            is_wide = [p < num_prompt // wide * wide for p in range(span.start, span.start + span.length)]
            assert set(is_wide) == {(block.width == wide and block.width != narrow) or all(is_wide)}
        for tile in block.rows.tiles:
            assert tile.size == block.width and tile.first % tile.size == 0
            assert tile.slot >= 0 and tile.slot + tile.num <= tile.size


def test_tokens_not_yet_accepted_have_no_part_in_what_comes_before_them():
    _, made = stacks("llama", "bfloat16")
    cache, tokens = PagedCache(1, 32), torch.arange(12) + 3
    made.run(PackedRows(cache, [Span([0], 0, 12)]), 0, 4, tokens)
    wanted = made.run(PackedRows(cache, [Span([0], 5, 1)]), 0, 4, tokens[5:6])
    example = torch.ones(1, 2, 8, dtype=torch.bfloat16)
    for layer in range(4):
        keys, values = cache.layer(layer, example, example)
        assert keys[0, 5].any()
        keys[0, 6:], values[0, 6:] = float("nan"), float("nan")
    assert torch.equal(made.run(PackedRows(cache, [Span([0], 5, 1)]), 0, 4, tokens[5:6]), wanted)


def test_exit_heads_are_those_of_the_target():
    target = Target(build("llama"), engine="views")
    assert target.exact_stack is target.exact_stack and target.exact_stack.exit_heads is None
    target.exit_heads = ExitHeads([1], 32, 4)
    assert target.exact_stack.exit_heads is target.stack.exit_heads is not None


def _refuse(self, name):
    raise ValueError(f"{name} is unknown")


def test_experts_that_cannot_be_settled_are_refused(monkeypatch):
    model = build("mixtral")
    monkeypatch.setattr(type(model), "set_experts_implementation", _refuse)
    with pytest.raises(UnsupportedModelError, match="mixtral: its experts run over as many tokens as are routed"):
        ExactStack(Stack(model))


def test_a_device_on_which_it_is_not_exact_is_refused(monkeypatch):
    monkeypatch.setattr(exact, "difference", lambda stack: "logits")
    with pytest.raises(UnsupportedModelError, match="llama: in exact mode its logits still depend on the other tokens"):
        Target(build("llama"), engine="views").generate([[3, 4]], exact=True)
