"""The choice of the fastest attention backend, by timing short calls in the model's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from selfspec.model.attention import Reach, attend_rows
from selfspec.model.attention_backends import Backend, importable
from selfspec.model.kv_cache import PackedRows, PagedCache, Span

CALLS = (((1023, 1),), ((1019, 5),) * 8, ((512, 512),))  # rows of (cached, new) tokens: decode, verify, prefill
PAGE = 256  # a page size that every backend supports
REPEATS, INNER = 5, 10
ALLOWED = 0.03  # largest relative error against `sdpa`; rounding in bfloat16 is well below


def choose(device: torch.device, dtype: torch.dtype, config: Any) -> Backend:
    """The backend that is fastest in decoding, verification and prefill (see `least`); outside CUDA, `sdpa`.

    Backends that raise, or differ from `sdpa`, are not considered.
    """
    found = importable(device)
    if device.type != "cuda":
        return found["sdpa"]
    heads = int(getattr(config, "num_attention_heads", 8))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    candidates = [backend for name, backend in found.items() if name != "reference"]
    seconds: dict[str, list[float]] = {backend.name: [] for backend in candidates}
    for rows in CALLS:
        call = _call(rows, heads, kv_heads, dim, device, dtype)
        wanted = attend_rows(*call, Reach(None, None), dim**-0.5)
        for backend in candidates:
            seconds[backend.name].append(_seconds(backend, call, wanted, dim**-0.5))
    return found[least(seconds)]


def least(seconds: Mapping[str, Sequence[float]]) -> str:
    """The name with the smallest sum of times, each divided by the best time of the same call."""
    best = [min(times) for times in zip(*seconds.values(), strict=True)]
    return min(seconds, key=lambda name: sum(mine / one for mine, one in zip(seconds[name], best, strict=True)))


def _call(
    rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[PackedRows, Tensor, Tensor, Tensor]:
    each = -(-max(old + new for old, new in rows) // PAGE)
    cache = PagedCache(each * len(rows), PAGE)
    spans = [Span(range(i * each, (i + 1) * each), old, new) for i, (old, new) in enumerate(rows)]
    packed = PackedRows(cache, spans, device)
    rng = torch.Generator(device).manual_seed(0)
    storage = (cache.num_pages, PAGE, kv_heads, dim)
    keys, values = torch.randn(2, *storage, generator=rng, device=device).to(dtype)
    queries = torch.randn(heads, packed.num_tokens, dim, generator=rng, device=device).to(dtype)
    return packed, queries, keys, values


def _seconds(backend: Backend, call: tuple[PackedRows, Tensor, Tensor, Tensor], wanted: Tensor, scale: float) -> float:
    """Median time of a call; infinite where the backend fails or differs."""
    packed, queries, keys, values = call

    def run() -> Tensor:
        return backend.attend(packed, queries, keys, values, Reach(None, None), scale, None, None)

    try:
        got = run().float()
        if not float((got - wanted.float()).norm() / wanted.float().norm()) <= ALLOWED:
            return float("inf")
        readings = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(INNER):
                run()
            end.record()
            end.synchronize()
            readings.append(start.elapsed_time(end))
        return median(readings)
    except Exception:
        return float("inf")
