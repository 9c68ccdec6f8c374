"""A lean body for Llama-shaped models: the same layers as the model's own forward, without its per-call overhead.

One decoded token of a small model costs the model's own forward more in Python and small kernels than in arithmetic.
This body runs the same products on the same weights in fewer steps. It is built only for layers known to be of this
shape, and used only after the self-check has found it equal to the whole model; the views are the reference everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.target.attention import Reach, attend_rows
from selfspec.target.cache import PackedRows
from selfspec.target.quantized import is_dense

# Causal LMs whose layers are exactly: norm, attention (with optional biases and per-head q/k norms), norm, gated MLP.
LLAMA_SHAPED = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# Parts from elsewhere may do more than their weights say: a LoRA layer has a `weight` too, its base layer's.
KNOWN_MODULES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    weight: Tensor
    eps: float


class Layer(NamedTuple):
    """One decoder layer's weights, shared with the model."""

    layer_idx: int
    reach: Reach
    scale: float
    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    activation: Any


class LeanBody:
    """Layers, embedding and head of one model; the same interface as `Stack.run` and `Stack.logits`."""

    name = "fused"

    def __init__(self, model: Any) -> None:
        base = model.model
        self.head_dim: int = base.layers[0].self_attn.head_dim
        self.embedding: Tensor = base.embed_tokens.weight
        self.layers = [_layer(layer) for layer in base.layers]
        self.norm = _norm(base.norm)
        self.head = _linear(model.lm_head)
        self._rotary = base.rotary_emb
        self._tables: tuple[Tensor, Tensor] | None = None
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # recordings may go on reading them

    @classmethod
    def of(cls, model: Any, half: bool = False) -> LeanBody | None:
        """The lean body of a causal LM, or None when any part of it is not of the plain Llama shape (LoRA, hooks, ...).

        Args:
            half: in half precision too, where the views round exactly where the model's own forward does, and this body
                does not.
        """
        rope = getattr(model.config, "rope_parameters", None) or {}
        if type(model).__name__ not in LLAMA_SHAPED or rope.get("rope_type", "default") not in STATIC_ROPE:
            return None
        if model.get_input_embeddings().weight.dtype.itemsize < 4 and not half:
            return None
        parts = [m for m in model.modules() if "proj" in type(m).__name__.lower() or isinstance(m, nn.Linear)]
        plain = all(type(m) is nn.Linear for m in parts) and type(model.model.embed_tokens) is nn.Embedding
        plain = plain and all(type(m).__module__.startswith(KNOWN_MODULES) for m in model.modules())
        plain = plain and all(is_dense(weight) for weight in model.parameters())
        hooked = any(
            m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") or "forward" in m.__dict__
            for m in model.modules()
        )
        try:
            return cls(model) if plain and not hooked else None
        except AttributeError:  # a part is missing or of another kind
            return None

    def run(
        self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """See `Stack.run`."""
        x = F.embedding(given, self.embedding) if start == 0 else given  # [N, hidden_size]
        cos, sin = self._rope(rows)
        for depth in range(start, stop):
            x = self._block(self.layers[depth], x, cos, sin, rows)
            if taps and depth + 1 in taps:
                taps[depth + 1] = x
        return _rms(x, self.norm) if stop == len(self.layers) else x

    def logits(self, hidden: Tensor, normed: bool) -> Tensor:
        """See `Stack.logits`."""
        return F.linear(hidden if normed else _rms(hidden, self.norm), *self.head).float()

    def _block(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, rows: PackedRows) -> Tensor:
        n, d = x.shape[0], self.head_dim
        h = _rms(x, layer.norm)
        q, k = F.linear(h, *layer.q).view(n, -1, d), F.linear(h, *layer.k).view(n, -1, d)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _rms(q, layer.q_norm), _rms(k, layer.k_norm)
        v = F.linear(h, *layer.v).view(n, -1, d)
        heads = q.shape[1]
        qk = _rotate(torch.cat((q, k), 1), cos, sin)
        keys, values = rows.write(layer.layer_idx, qk[:, heads:], v)
        attend = rows.attend or attend_rows
        out = attend(rows, qk[:, :heads].transpose(0, 1), keys, values, layer.reach, layer.scale, None, None)
        x = _add_linear(x, out.reshape(n, -1), layer.o)
        h = _rms(x, layer.mlp_norm)
        gated = layer.activation(F.linear(h, *layer.gate)).mul_(F.linear(h, *layer.up))
        return _add_linear(x, gated, layer.down)

    def _rope(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """cos and signed sin `[N, 1, head_dim]` at the call's positions, from a table that grows by doubling."""
        known = rows.plans.get("rope")
        if known is None:
            _, (cos, sin) = self.reach(rows)
            at = rows.positions[0]
            known = rows.plans["rope"] = (cos[at], sin[at])
        return known

    def reach(self, rows: PackedRows) -> tuple[int, tuple[Tensor, Tensor]]:
        """The call's longest row, in tokens, and tables that are as long: another thread may be making others."""
        return rows.most_tokens, self.tables(rows.most_tokens)

    def tables(self, last: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of at least so many positions."""
        tables = self._tables
        if tables is None or last > tables[0].shape[0]:
            self._outgrown += [] if tables is None else [tables]
            tables = self._tables = self._make_tables(max(512, 1 << (last - 1).bit_length()))
        return tables

    def refresh(self, deeply: bool = False) -> None:
        """Take over what was edited in the model's weights, for bodies that have copies of them; this one has none."""

    def _make_tables(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.embedding.device)[None]
        cos, sin = self._rotary(self.embedding[:1, None], position_ids=positions)  # [1, length, head_dim]
        sign = torch.ones_like(sin[0, :1])
        sign[:, : self.head_dim // 2] = -1
        return cos[0][:, None], (sin[0] * sign)[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[N, heads, head_dim]`; `sin` carries the sign of the rotated half."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)


def _rms(x: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], *norm)


def _add_linear(x: Tensor, h: Tensor, linear: Linear) -> Tensor:
    if linear.bias is None:
        return torch.addmm(x, h, linear.weight.t())
    return x + F.linear(h, *linear)


def _linear(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _layer(layer: Any) -> Layer:
    attn, mlp = layer.self_attn, layer.mlp
    return Layer(
        layer_idx=attn.layer_idx,
        reach=Reach(_window(attn), None),
        scale=float(attn.scaling),
        norm=_norm(layer.input_layernorm),
        q=_linear(attn.q_proj),
        k=_linear(attn.k_proj),
        v=_linear(attn.v_proj),
        q_norm=_norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=_norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
        o=_linear(attn.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _window(attn: Any) -> int | None:
    """The sliding window, where the family's attention hands it on: per layer in Qwen, for all layers in Mistral."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window
    return getattr(attn.config, "sliding_window", None) if "Mistral" in type(attn).__name__ else None
