"""The weights of a Llama-like model by name, for executors that compute the layers themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.kernels.layout import Norm
from selfspec.model.gguf_blocks import Blocks, BlockWeight
from selfspec.model.quantized import is_dense

# Causal LMs whose layers are exactly: norm, attention (with optional biases and per-head q/k norms), norm, gated MLP.
# In Gemma 3, a norm follows attention and MLP, too.
LLAMA_SHAPED = {
    *("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GemmaForCausalLM", "Gemma3ForCausalLM"),
}
SCALED_EMBEDDINGS = ("GemmaTextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding")
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}  # by class
UNSERVED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")  # options
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Modules of other packages may compute more than their weights show: a LoRA layer has a `weight`, too.
KNOWN_MODULES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def is_readable(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor, or has blocks of a GGUF file."""
    return is_dense(weight) or isinstance(weight, BlockWeight)


def activation_bytes(weight: Tensor) -> int:
    """Bytes of the numbers that are multiplied with a weight's quantised blocks, see `BlockWeight`."""
    return weight.activation_bytes if isinstance(weight, BlockWeight) else 3


class Linear(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None

    @property
    def blocks(self) -> Blocks | None:
        """The weight's quantised blocks, if it has some that compiled products read."""
        weight = self.weight
        return weight.blocks if isinstance(weight, BlockWeight) and weight.blocks.is_packable else None

    def select(self, outputs: Tensor) -> Linear:
        """Some outputs, int64 `[n]`: copies of their rows, or the rows' blocks."""
        with torch.inference_mode(False), torch.no_grad():
            rows = self.weight.detach()[outputs.to(self.weight.device)]
            return Linear(rows, None if self.bias is None else self.bias.detach()[outputs])


class Layer(NamedTuple):
    """The weights of one decoder layer, shared with the model."""

    layer_idx: int
    window: int | None  # sliding window in tokens; None: no limit
    layer_type: str | None  # names the rotary angles where they differ between layers; else None
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
    post_norm: Norm | None  # of the attention's output, before it is added to the residual stream
    post_mlp_norm: Norm | None  # of the MLP's output

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """All norms, in the order of `kernels.compiled_call.Layer`."""
        return self.norm, self.mlp_norm, self.q_norm, self.k_norm, self.post_norm, self.post_mlp_norm

    def linears(self) -> tuple[Linear, ...]:
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down

    def weights(self) -> list[Tensor]:
        """All tensors of the layer."""
        linears = self.linears()
        norms = [norm.weight for norm in self.norms if norm is not None]
        return [*(x.weight for x in linears), *(x.bias for x in linears if x.bias is not None), *norms]


class LlamaWeights(NamedTuple):
    """The weights of a model, shared with it."""

    head_dim: int
    embedding: Tensor  # [vocab, hidden_size]
    layers: list[Layer]
    norm: Norm
    head: Linear
    rotary: Any  # the module that gives cos and sin of positions
    activation: str  # of the MLP, a value of `ACTIVATIONS`
    embed_scale: float  # embeddings are multiplied by it
    activation_bytes: int = 3  # of inputs of products with blocks; with 2, keys and values have 2 bytes, too

    @classmethod
    def of(cls, model: Any) -> LlamaWeights | None:
        """The weights of a Llama-like causal LM on one device; None for other models.

        Models with hooks, adapters, quantised weights or modules of other packages are others.
        """
        if model.device.type == "meta" or not _is_plain(model):
            return None
        try:
            base = model.model
            activations = {ACTIVATIONS.get(type(layer.mlp.act_fn).__name__, "") for layer in base.layers}
            layers = [_layer(layer) for layer in base.layers]
            has_angles = all(hasattr(base.rotary_emb, f"{x.layer_type}_inv_freq") for x in layers if x.layer_type)
            made = cls(
                head_dim=base.layers[0].self_attn.head_dim,
                embedding=base.embed_tokens.weight,
                layers=layers,
                norm=_norm(base.norm),
                head=_linear(model.lm_head),
                rotary=base.rotary_emb,
                activation=min(activations),
                embed_scale=_embed_scale(base.embed_tokens),
                activation_bytes=min(map(activation_bytes, model.parameters()), default=3),
            )
        except AttributeError:  # a part is missing or of another kind
            return None
        is_known = len(activations) == 1 and made.activation != "" and has_angles
        return made if is_known and made._is_served() else None

    def matrices(self) -> list[Tensor]:
        """The weights of the head and of all products of layers."""
        return [self.head.weight, *(linear.weight for layer in self.layers for linear in layer.linears())]

    def _is_served(self) -> bool:
        like, weights = self.embedding, [weight for layer in self.layers for weight in layer.weights()]
        is_readable = all(
            weight.dtype == like.dtype in DTYPES and weight.device == like.device and weight.is_contiguous()
            for weight in (like, self.head.weight, self.norm.weight, *weights)
        )
        return is_readable and self.head_dim % 2 == 0


def _is_plain(model: Any) -> bool:
    """Whether a model is of a Llama-like class and consists of unchanged modules of transformers."""
    ropes = _ropes(model.config)
    if type(model).__name__ not in LLAMA_SHAPED or any(
        rope.get("rope_type", "default") not in STATIC_ROPE for rope in ropes.values()
    ):
        return False
    if any(getattr(model.config, name, None) not in (None, False) for name in UNSERVED):
        return False
    modules = list(model.modules())
    linears = [m for m in modules if "proj" in type(m).__name__.lower() or isinstance(m, nn.Linear)]
    is_hooked = any(
        m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") or "forward" in m.__dict__ for m in modules
    )
    return (
        not is_hooked
        and all(type(m) is nn.Linear for m in linears)
        and _is_embedding(model.get_input_embeddings())
        and all(type(m).__module__.startswith(KNOWN_MODULES) for m in modules)
        and all(map(is_readable, model.parameters()))
    )


def _ropes(config: Any) -> dict[str | None, dict[str, Any]]:
    """The parameters of rotary angles by layer type; by None if they are the same for all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested: dict[str | None, dict[str, Any]] = {kind: own for kind, own in rope.items() if isinstance(own, dict)}
    return nested or {None: rope}


def _is_embedding(module: Any) -> bool:
    return type(module) is nn.Embedding or type(module).__name__ in SCALED_EMBEDDINGS


def _embed_scale(module: Any) -> float:
    """The number by which a model multiplies its embeddings, rounded to their dtype as in the module's forward."""
    return 1.0 if type(module) is nn.Embedding else float(module.embed_scale.to(module.weight.dtype))


def _linear(module: nn.Linear) -> Linear:
    return Linear(module.weight, module.bias)


def _norm(module: Any) -> Norm:
    if type(module).__name__.startswith("Gemma"):
        return Norm(module.weight, float(module.eps), offset=1.0)
    return Norm(module.weight, float(module.variance_epsilon))


def _layer(layer: Any) -> Layer:
    attn, mlp = layer.self_attn, layer.mlp
    has_post_norms = hasattr(layer, "post_feedforward_layernorm")
    return Layer(
        layer_idx=attn.layer_idx,
        window=_window(attn),
        layer_type=None if None in _ropes(attn.config) else attn.layer_type,
        scale=float(attn.scaling),
        norm=_norm(layer.input_layernorm),
        q=_linear(attn.q_proj),
        k=_linear(attn.k_proj),
        v=_linear(attn.v_proj),
        q_norm=_norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=_norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
        o=_linear(attn.o_proj),
        mlp_norm=_norm(layer.pre_feedforward_layernorm if has_post_norms else layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        post_norm=_norm(layer.post_attention_layernorm) if has_post_norms else None,
        post_mlp_norm=_norm(layer.post_feedforward_layernorm) if has_post_norms else None,
    )


def _window(attn: Any) -> int | None:
    """The sliding window that the family's attention uses: per layer in Qwen, for all layers in Mistral."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window
    return getattr(attn.config, "sliding_window", None) if "Mistral" in type(attn).__name__ else None
