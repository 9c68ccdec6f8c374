"""One contract for every attention backend; packages that are not here are stood in for, to see what they are told."""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen

from selfspec.decoding.engine import page_size_of
from selfspec.kernels import reference
from selfspec.kernels.suite import has_triton
from selfspec.model import attention_choice as fastest
from selfspec.model.attention import Reach, attend_rows
from selfspec.model.attention_backends import FLASH_PAGE, Backend, importable, named
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from tests.helpers import make_prompts, tokens_of
from tests.models import build
from tests.target import Target

# Triton's kernels run in its interpreter where there is no device.
HERE = importable("cpu") | ({"triton": importable("cuda")["triton"]} if has_triton() else {})
OF_TORCH = varlen.varlen_attn
a_row = st.tuples(st.integers(0, 40), st.one_of(st.integers(1, 6), st.just(35)))


def packed_call(rows, page_size, heads, kv_heads, dim, dtype, seed, spare=1):
    """Rows whose pages lie in a mixed order, with random content in them."""
    generator = torch.Generator().manual_seed(seed)
    need = [-(-(old + new) // page_size) for old, new in rows]
    order = torch.randperm(sum(need) + spare, generator=generator).tolist()
    cache = PagedCache(len(order), page_size)
    tables = [[order.pop() for _ in range(count)] for count in need]
    spans = [Span(table, old, new) for table, (old, new) in zip(tables, rows, strict=True)]
    packed = PackedRows(cache, spans)
    keys, values = torch.randn(2, cache.num_pages, page_size, kv_heads, dim, generator=generator).to(dtype)
    queries = torch.randn(heads, packed.num_tokens, dim, generator=generator).to(dtype)
    return packed, queries, keys, values


def check(backend, call, reach, softcap=None, sinks=None):
    wanted = attend_rows(*call, reach, 0.3, softcap, sinks)
    got = backend.attend(*call, reach, 0.3, softcap, sinks)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    rough = call[1].dtype != torch.float32
    torch.testing.assert_close(got, wanted, rtol=0.03 if rough else 1e-4, atol=0.03 if rough else 1e-5)


@pytest.mark.parametrize("backend", HERE.values(), ids=HERE)
@given(
    rows=st.lists(a_row, min_size=1, max_size=3),
    page_size=st.sampled_from([3, 16, 80]),
    heads=st.sampled_from([(4, 2), (3, 1)]),
    reach=st.sampled_from([Reach(None, None), Reach(7, None), Reach(None, 16)]),
    softcap=st.sampled_from([None, 4.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_backend_is_the_one_used_everywhere(backend, rows, page_size, heads, reach, softcap, with_sinks, seed):
    sinks = torch.linspace(-1, 2, heads[0]) if with_sinks else None
    check(backend, packed_call(rows, page_size, *heads, 8, torch.float32, seed), reach, softcap, sinks)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("rows", "dtype", "options", "asked"),
    [
        ([(0, 40)], torch.bfloat16, {}, False),
        ([(50, 40), (9, 1)], torch.float16, {"reach": Reach(90, None)}, False),
        ([(0, 40)], torch.float32, {}, True),
        ([(50, 40)], torch.bfloat16, {"reach": Reach(89, None)}, True),
        ([(0, 40)], torch.bfloat16, {"softcap": 4.0}, True),
        ([(0, 40)], torch.bfloat16, {"sinks": torch.ones(4)}, True),
        ([(50, 5), (9, 1)], torch.bfloat16, {}, True),
    ],
)
def test_prompts_in_half_precision_go_to_torch_and_not_to_the_kernel_of_decoding(
    monkeypatch, rows, dtype, options, asked
):
    from selfspec.kernels import paged_attention

    calls, kernel = [], reference.attend
    monkeypatch.setattr(paged_attention, "attend", lambda *given: (calls.append(1), kernel(*given))[1])
    call = packed_call(rows, 16, 4, 2, 8, dtype, 0)
    check(HERE["triton"], call, options.get("reach", Reach(None, None)), options.get("softcap"), options.get("sinks"))
    assert bool(calls) == asked


# --------------------------------------------------------------------------------------------- packages stood in for


def flash_attn_varlen_func(  # flash-attn 2.8's own parameters
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal and k.shape[1] % 256 == 0
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    return by_packages(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale, window_size, softcap, block_table)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, block_table=None, **given):
    if "block_table" in inspect.signature(OF_TORCH).parameters:
        inspect.signature(OF_TORCH).bind(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, block_table=block_table, **given
        )
    assert torch.equal(cu_seq_k.diff(), given["seqused_k"]) and given["enable_gqa"]
    window = given["window_size"]
    assert window[1] == 0, "not causal"
    return by_packages(query, key, value, cu_seq_q, given["seqused_k"], given["scale"], window, 0.0, block_table)


def by_packages(q, k, v, fed, held, scale, window, softcap, table):
    """What both packages document: bottom-right causal, `window[0]` keys before a query, pages by the table."""
    assert all(ints.dtype == torch.int32 for ints in (fed, held, table))
    out = torch.empty_like(q)
    for row, length in enumerate(held.tolist()):
        first, last = fed[row : row + 2].tolist()
        keys, values = (pages[table[row].long()].flatten(0, 1)[:length].float() for pages in (k, v))
        at = torch.arange(length)
        position = length - (last - first) + torch.arange(last - first)[:, None]
        seen = at <= position
        if window[0] >= 0:
            seen &= position - at <= window[0]
        share = q.shape[1] // k.shape[2]
        scores = torch.einsum("nhd,thd->hnt", q[first:last].float(), keys.repeat_interleave(share, 1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hnt,thd->nhd", weights, values.repeat_interleave(share, 1)).to(q.dtype)
    return out


@pytest.fixture
def packages(monkeypatch):
    """Backends by name as a program finds them where both packages are, and which of them were called."""
    called = []

    def listen(call):
        @wraps(call)
        def told(*args, **given):
            called.append(call.__name__)
            return call(*args, **given)

        return told

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.__spec__ = listen(flash_attn_varlen_func), ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(varlen, "varlen_attn", listen(varlen_attn))
    spec = find_spec(importable.__module__)
    fresh = module_from_spec(spec)  # what was looked for once is not looked for again
    spec.loader.exec_module(fresh)
    return fresh.importable("cuda"), called


@pytest.mark.parametrize(
    ("backend", "options", "served"),
    [
        ("flash", {}, True),
        ("flash", {"reach": Reach(9, None)}, True),
        ("flash", {"softcap": 4.0}, True),
        ("flash", {"page": 64}, False),
        ("varlen", {"page": 64}, False),
        ("flash", {"dtype": torch.float32}, False),
        ("varlen", {"dtype": torch.float32}, False),
        ("flash", {"reach": Reach(None, 64)}, False),
        ("flash", {"sinks": torch.ones(4)}, False),
        ("varlen", {}, True),
        ("varlen", {"reach": Reach(9, None)}, True),
        ("varlen", {"softcap": 4.0}, False),
        ("varlen", {"reach": Reach(None, 64)}, False),
        ("varlen", {"sinks": torch.ones(4)}, False),
    ],
)
def test_packages_are_told_what_they_document_or_not_asked(packages, backend, options, served):
    rows, page_size, dtype = [(270, 3), (0, 1), (20, 34)], options.get("page", FLASH_PAGE), options.get("dtype")
    call = packed_call(rows, page_size, 4, 2, 16, dtype or torch.bfloat16, 1)
    reach = options.get("reach", Reach(None, None))
    found, called = packages
    check(found[backend], call, reach, options.get("softcap"), options.get("sinks"))
    assert len(called) == (1 if served else 0)


# ---------------------------------------------------------------------------------------------------------- choosing


def test_a_backend_that_is_not_here_is_refused_by_name():
    with pytest.raises(ValueError, match="attention must be auto or one of sdpa, reference on cpu here, got 'flash'"):
        named("flash", "cpu")
    with pytest.raises(ValueError, match="got 'turbo'"):
        SplitModel(build("llama"), "turbo")


def test_the_fastest_is_so_on_the_whole_and_serves_every_call():
    times = {"sdpa": [4.0, 2.0, 10.0], "triton": [1.0, 1.0, 14.0], "flash": [float("inf"), 0.5, 9.0]}
    assert fastest.least(times) == "triton"
    assert fastest.least({"sdpa": [3.0], "triton": [float("inf")]}) == "sdpa"


def test_models_decode_the_same_tokens_with_another_backend():
    model, prompts = build("gpt_oss"), make_prompts([5, 19, 40])
    wanted = Target(model).generate(prompts, max_tokens=12, exit_layer=1)
    target = Target(model, attention="reference")
    assert target.attention_backend == "reference"
    assert tokens_of(target.generate(prompts, max_tokens=12, exit_layer=1)) == [one.token_ids for one in wanted]


@pytest.mark.parametrize("problem", ["raises", "wrong"])
def test_a_backend_that_disagrees_with_the_model_gives_way_to_sdpa(monkeypatch, caplog, problem):
    def attend(rows, queries, *given):
        if problem == "raises":
            raise RuntimeError("no kernel image is available")
        return torch.zeros_like(queries).transpose(0, 1).contiguous()

    monkeypatch.setattr(fastest, "choose", lambda *given: Backend("broken", attend))
    target = Target(build("qwen2"), backend="views")
    assert target.attention_backend == "sdpa" and target.split_error < 1e-3
    assert "attention backend broken does not serve this model here" in caplog.text


def test_an_engine_with_attention_of_its_own_says_so():
    with pytest.raises(ValueError, match="backend 'compiled' has attention of its own"):
        Target(build("llama"), backend="compiled", attention="reference")
    target = Target(build("llama"))
    assert target.attention_backend == ("compiled" if target.backend == "compiled" else "sdpa")


def test_pages_are_as_large_as_the_backend_asks():
    split = SplitModel(build("llama"))
    assert page_size_of(split) == 64
    split.attention = Backend("of large pages", attend_rows, FLASH_PAGE)
    assert page_size_of(split) == FLASH_PAGE
