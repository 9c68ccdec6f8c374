"""One contract for every attention backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen

from selfspec.kernels import reference
from selfspec.kernels.suite import has_triton
from selfspec.model import attention_backends
from selfspec.model.attention import Reach, attend_rows
from selfspec.model.attention_backends import Backend, importable, named
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


# ---------------------------------------------------------------------------------------------------------- choosing


def test_a_backend_that_is_not_here_is_refused_by_name():
    with pytest.raises(ValueError, match="attention must be auto or one of sdpa, reference on cpu here, got 'flash'"):
        named("flash", "cpu")
    with pytest.raises(ValueError, match="got 'turbo'"):
        SplitModel(build("llama"), "turbo")


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

    monkeypatch.setattr(attention_backends, "choose", lambda *given: Backend("broken", attend))
    target = Target(build("qwen2"), backend="views")
    assert target.attention_backend == "sdpa" and target.split_error < 1e-3
    assert "attention backend broken does not serve this model here" in caplog.text


def test_an_engine_with_attention_of_its_own_says_so():
    with pytest.raises(ValueError, match="backend 'compiled' has attention of its own"):
        Target(build("llama"), backend="compiled", attention="reference")
    target = Target(build("llama"))
    assert target.attention_backend == ("compiled" if target.backend == "compiled" else "sdpa")
