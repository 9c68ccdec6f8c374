"""Checks of the tensors that kernels take. The Triton kernels and their reference implementations share them.

A kernel reads memory by address. A tensor of another dtype, shape, layout or device would give wrong results without an
error, so it raises a ValueError that names the tensor. The reference implementations raise it, too, so that a caller's
mistake shows without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.kernels.layout import GIVEN, Layout, Norm, Rotation, SamplingTensors

INT32, INT64, FLOAT32 = torch.int32, torch.int64, torch.float32
LAYER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of fused layers, which compute in float32
SKINNY_ROWS, SQUARED = 64, 32  # of products of few rows: most rows; numbers whose squares are one sum
GATES = ("silu", "gelu_tanh")  # activations of gated MLPs


class Requirements:
    """Checks the tensors of one kernel call. Each method raises ValueError if its condition does not hold.

    Args:
        kernel: the kernel's name, for the message.
        device: the device of all tensors.
    """

    def __init__(self, kernel: str, device: torch.device) -> None:
        self.kernel, self.device = kernel, device

    def dense(self, name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
        """Require a contiguous tensor of this dtype and shape."""
        self._check(name, tensor, dtype, shape, tensor.is_contiguous(), "contiguous")

    def lines(self, name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
        """Require a tensor of this dtype and shape whose last dimension is contiguous; other strides are free."""
        is_dense = tensor.dim() > 0 and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
        self._check(name, tensor, dtype, shape, is_dense, "contiguous in its last dimension")

    def holds(self, what: str, allowed: str, got: object, is_true: bool) -> None:
        """Require a condition. `allowed` describes it, `got` is the actual value."""
        if not is_true:
            raise ValueError(f"{self.kernel}: {what} must be {allowed}, got {got}")

    def _check(
        self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], is_dense: bool, layout: str
    ) -> None:
        if tensor.dtype == dtype and tensor.shape == shape and tensor.device == self.device and is_dense:
            return
        got = f"{_short(tensor.dtype)} {list(tensor.shape)} of strides {list(tensor.stride())} on {tensor.device}"
        allowed = f"{_short(dtype)} {list(shape)}, {layout}, on {self.device}"
        raise ValueError(f"{self.kernel}: {name} must be {allowed}; got {got}")


def check_scatter(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Raise ValueError for arguments that `kv_scatter.scatter` does not accept."""
    require = Requirements("scatter", key.device)
    require.holds("key", "[N, kv_heads, head_dim]", list(key.shape), key.dim() == 3)
    require.holds("keys", "[pages, page_size, kv_heads, head_dim]", list(keys.shape), keys.dim() == 4)
    require.lines("key", key, keys.dtype, *key.shape)
    require.lines("value", value, keys.dtype, *key.shape)
    require.dense("keys", keys, keys.dtype, *keys.shape[:2], *key.shape[1:])
    require.dense("values", values, keys.dtype, *keys.shape)
    require.dense("slots", slots, INT64, key.shape[0])


def check_attend(
    queries: Tensor, keys: Tensor, values: Tensor, layout: Layout, sinks: Tensor | None, split: int | None = None
) -> None:
    """Raise ValueError for arguments that `paged_attention.attend` does not accept."""
    require = Requirements("attend", queries.device)
    require.holds("queries", "[N, heads, head_dim]", list(queries.shape), queries.dim() == 3)
    require.holds("keys", "[pages, page_size, kv_heads, head_dim]", list(keys.shape), keys.dim() == 4)
    count, heads, dim = queries.shape
    dtype, kv_heads = queries.dtype, keys.shape[2]
    require.holds("heads", f"a multiple of the {kv_heads} key heads", heads, heads % kv_heads == 0)
    require.lines("queries", queries, dtype, count, heads, dim)
    require.dense("keys", keys, dtype, *keys.shape[:3], dim)
    require.dense("values", values, dtype, *keys.shape[:3], dim)
    slots, width = layout.pages.shape
    for name in ("starts", "counts", "lengths"):
        require.dense(name, getattr(layout, name), INT32, slots)
    require.lines("pages", layout.pages, INT32, slots, width)
    require.dense("rows", layout.rows, INT32, count)
    require.dense("positions", layout.positions, INT64, count)
    require.holds("split", "a positive multiple of 64 or None", split, split is None or (split > 0 and split % 64 == 0))
    if sinks is not None:
        require.holds("sinks", "floating-point", _short(sinks.dtype), sinks.is_floating_point())
        require.dense("sinks", sinks, sinks.dtype, heads)


def check_pick(logits: Tensor, sampling: SamplingTensors, names: Tensor | None = None) -> None:
    """Raise ValueError for arguments that `fused_pick.pick` does not accept."""
    require = Requirements("pick", logits.device)
    require.holds("logits", "[N, vocab]", list(logits.shape), logits.dim() == 2)
    count, vocab = logits.shape
    require.lines("logits", logits, FLOAT32, count, vocab)
    for name in ("temperature", "top_p", "min_p"):
        require.dense(name, getattr(sampling, name), FLOAT32, count)
    require.dense("top_k", sampling.top_k, INT32, count)
    require.dense("seeds", sampling.seeds, INT64, count)
    require.dense("positions", sampling.positions, INT64, count)
    if names is not None:
        require.dense("names", names, INT64, vocab)


def check_accept(state: Tensor, fed: Tensor, picks: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Raise ValueError for arguments that `fused_accept.accept` does not accept."""
    require = Requirements("accept", state.device)
    is_wide = state.dim() == 2 and state.shape[1] >= GIVEN
    require.holds("state", f"[S, at least {GIVEN}]", list(state.shape), is_wide)
    require.lines("state", state, INT64, *state.shape)
    require.dense("fed", fed, INT64, fed.numel())
    require.dense("picks", picks, INT64, fed.numel())
    require.dense("starts", starts, INT32, len(state))
    require.dense("counts", counts, INT32, len(state))


def check_prepare(state: Tensor, pages: Tensor, width: int) -> None:
    """Raise ValueError for arguments that `prepare_round.prepare` does not accept."""
    require, least = Requirements("prepare", state.device), GIVEN + width - 1
    is_wide = state.dim() == 2 and state.shape[1] >= least
    require.holds("state", f"[S, at least {least}]", list(state.shape), is_wide)
    require.lines("state", state, INT64, *state.shape)
    require.holds("pages", "[S, P]", list(pages.shape), pages.dim() == 2)
    require.lines("pages", pages, INT32, state.shape[0], pages.shape[1])


def check_add_norm(hidden: Tensor, branch: Tensor | None, norm: Norm | None, post: Norm | None) -> None:
    """Raise ValueError for arguments that `fused_layer.add_norm` does not accept."""
    require = Requirements("add_norm", hidden.device)
    require.holds("hidden", "[N, size]", list(hidden.shape), hidden.dim() == 2)
    _check_layer_dtype(require, "hidden", hidden)
    require.dense("hidden", hidden, hidden.dtype, *hidden.shape)
    if branch is not None:
        require.dense("branch", branch, hidden.dtype, *hidden.shape)
    for name, one in (("norm", norm), ("post", post)):
        if one is not None:
            require.dense(f"{name}.weight", one.weight, hidden.dtype, hidden.shape[1])


def check_rotate(qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation) -> None:
    """Raise ValueError for arguments that `fused_layer.rotate` does not accept."""
    require, (cos, sin, q_norm, k_norm) = Requirements("rotate", qkv.device), rotation
    require.holds("qkv", "[N, (heads + 2 * kv_heads) * head_dim]", list(qkv.shape), qkv.dim() == 2)
    require.holds("keys", "[pages, page_size, kv_heads, head_dim]", list(keys.shape), keys.dim() == 4)
    _check_layer_dtype(require, "qkv", qkv)
    (count, width), (kv_heads, dim) = qkv.shape, keys.shape[2:]
    whole = dim % 2 == 0 and width % dim == 0 and width // dim > 2 * kv_heads
    require.holds("qkv", f"[N, (heads + {2 * kv_heads}) * {dim}] with an even head_dim", list(qkv.shape), whole)
    require.lines("qkv", qkv, qkv.dtype, count, width)
    require.dense("keys", keys, qkv.dtype, *keys.shape)
    require.dense("values", values, qkv.dtype, *keys.shape)
    require.dense("slots", layout.slots, INT64, count)
    require.dense("positions", layout.positions, INT64, count)
    require.holds("cos", "[positions, head_dim / 2]", list(cos.shape), cos.dim() == 2)
    require.dense("cos", cos, qkv.dtype, cos.shape[0], dim // 2)
    require.dense("sin", sin, qkv.dtype, cos.shape[0], dim // 2)
    alike = (q_norm and q_norm[1:]) == (k_norm and k_norm[1:])
    require.holds("q_norm and k_norm", "both given, with equal eps and offset, or None", (q_norm, k_norm), alike)
    for name, one in (("q_norm", q_norm), ("k_norm", k_norm)):
        if one is not None:
            require.dense(f"{name}.weight", one.weight, qkv.dtype, dim)


def check_rotate_attend(
    qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation, counters: Tensor
) -> None:
    """Raise ValueError for arguments that `layer_attention.rotate_attend` does not accept."""
    check_rotate(qkv, keys, values, layout, rotation)
    dim = keys.shape[3]
    check_attend(qkv.unflatten(1, (-1, dim))[:, : qkv.shape[1] // dim - 2 * keys.shape[2]], keys, values, layout, None)
    require = Requirements("rotate_attend", qkv.device)
    require.dense("counters", counters, INT32, counters.numel())
    least = len(layout.counts) * layout.most_new * keys.shape[2]
    require.holds("counters", f"at least {least} numbers", len(counters), len(counters) >= least)
    require.holds("q_norm.offset", "0", rotation.offset, rotation.offset == 0.0)


def check_gate(gate_up: Tensor, activation: str) -> None:
    """Raise ValueError for arguments that `fused_layer.gate` does not accept."""
    require = Requirements("gate", gate_up.device)
    whole = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    require.holds("gate_up", "[N, 2 * inner]", list(gate_up.shape), whole)
    _check_layer_dtype(require, "gate_up", gate_up)
    require.lines("gate_up", gate_up, gate_up.dtype, *gate_up.shape)
    require.holds("activation", f"one of {', '.join(GATES)}", activation, activation in GATES)


def check_norm_product(hidden: Tensor, squares: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError for arguments that `skinny_products.norm_product` does not accept."""
    require = Requirements("norm_product", hidden.device)
    _check_normed(require, hidden, squares, norm)
    _check_weight(require, "weight", weight, bias, hidden)


def check_gate_product(hidden: Tensor, squares: Tensor, norm: Norm, gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise ValueError for arguments that `skinny_products.gate_product` does not accept."""
    require = Requirements("gate_product", hidden.device)
    _check_normed(require, hidden, squares, norm)
    _check_weight(require, "gate", gate, None, hidden)
    require.lines("up", up, hidden.dtype, *gate.shape)
    require.holds("strides of gate and up", "equal", (gate.stride(), up.stride()), gate.stride() == up.stride())
    require.holds("activation", f"one of {', '.join(GATES)}", activation, activation in GATES)


def check_product_add(x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> None:
    """Raise ValueError for arguments that `skinny_products.product_add` does not accept."""
    require = Requirements("product_add", x.device)
    _check_rows(require, "x", x)
    _check_weight(require, "weight", weight, bias, x)
    require.dense("hidden", hidden, x.dtype, len(x), len(weight))


def check_squares(hidden: Tensor) -> None:
    """Raise ValueError for arguments that `skinny_products.squares_of` does not accept."""
    require = Requirements("squares_of", hidden.device)
    _check_rows(require, "hidden", hidden)
    require.dense("hidden", hidden, hidden.dtype, *hidden.shape)


def check_prefetch(weight: Tensor) -> None:
    """Raise ValueError for a weight that `prefetch.prefetch` does not accept."""
    Requirements("prefetch", weight.device).dense("weight", weight, weight.dtype, *weight.shape)


def _check_rows(require: Requirements, name: str, x: Tensor) -> None:
    fits = x.dim() == 2 and len(x) <= SKINNY_ROWS
    require.holds(name, f"[N, size] with at most {SKINNY_ROWS} rows", list(x.shape), fits)
    _check_layer_dtype(require, name, x)
    require.lines(name, x, x.dtype, *x.shape)


def _check_normed(require: Requirements, hidden: Tensor, squares: Tensor, norm: Norm) -> None:
    _check_rows(require, "hidden", hidden)
    count, size = hidden.shape
    require.dense("squares", squares, FLOAT32, count, -(-size // SQUARED))
    require.dense("norm.weight", norm.weight, hidden.dtype, size)
    require.holds("norm.offset", "0", norm.offset, norm.offset == 0.0)


def _check_weight(require: Requirements, name: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    require.holds(name, "[out, in]", list(weight.shape), weight.dim() == 2)
    require.lines(name, weight, x.dtype, weight.shape[0], x.shape[1])
    if bias is not None:
        require.dense("bias", bias, x.dtype, len(weight))


def _check_layer_dtype(require: Requirements, name: str, tensor: Tensor) -> None:
    allowed = ", ".join(map(_short, LAYER_DTYPES))
    require.holds(f"{name}'s dtype", f"one of {allowed}", _short(tensor.dtype), tensor.dtype in LAYER_DTYPES)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
