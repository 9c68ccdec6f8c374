"""A twin of the model that shares its weights, and views of the twin that run some of its layers.

No forward of a family is copied: a view is the family's own base model with a shorter list of layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from selfspec.errors import UnsupportedModelError
from selfspec.model.refusals import is_compiled_own, refuse_unsplittable, refuse_wrapper


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a family's parts. The defaults hold for nearly all families of transformers."""

    base: str = "model"  # path from the causal LM to the module that owns the layers
    layers: str = "layers"
    norm: str = "norm"
    only_first: tuple[str, ...] = ()  # modules that add to the embeddings; they must run in the first view only
    unit_after_first: tuple[str, ...] = ()  # factors on the embeddings; they must be 1 in later views


FAMILIES = {
    "phi": Family(norm="final_layernorm"),
    "gpt2": Family(base="transformer", layers="h", norm="ln_f", only_first=("wpe",)),
    "gpt_neox": Family(base="gpt_neox", norm="final_layer_norm"),
    "opt": Family(base="model.decoder", norm="final_layer_norm", only_first=("embed_positions",)),
    "granite": Family(unit_after_first=("embedding_multiplier",)),
}
COPIED = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "_forward_hooks", "_forward_pre_hooks")
STATELESS_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


class _Zero(nn.Module):
    """Replaces a learned position embedding in later views, whose input already contains it.

    Its zero is on the model's device, since a copy from the host cannot be part of a CUDA graph.
    """

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self._zero = torch.zeros((), device=like.device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._zero


@dataclass
class _BaseOutput(ModelOutput):
    """The output of a base model for any family's head: all fields but the hidden states are None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _HiddenStates(nn.Module):
    """Replaces the base model in front of the head, and returns the given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = None

    def forward(self, input_ids: None = None, inputs_embeds: Tensor | None = None, **kwargs: Any) -> _BaseOutput:
        return _BaseOutput(last_hidden_state=inputs_embeds)


def unwrap(model: nn.Module) -> nn.Module:
    """The causal LM without wrappers of PEFT (its adapters stay active) and torch.compile.

    Raises:
        UnsupportedModelError: a twin could not reproduce the model, see `selfspec.model.refusals`.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_wrapper(model)
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    refuse_unsplittable(base)
    return base


def make_twin(model: nn.Module) -> Any:
    """A copy of the model's modules and config that shares its parameters and buffers, in eval mode.

    Modules and forwards that torch.compile made are replaced by the originals, since they refer to the model's modules.
    """
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    compiled = [name for name, module in model.named_modules() if is_compiled_own(module)]
    twin = copy.deepcopy(model, shared).eval()
    for name in compiled:
        del twin.get_submodule(name).forward
    for module in list(twin.modules()):
        for name, child in module._modules.items():
            while child is not None and "_orig_mod" in child._modules:
                child = module._modules[name] = child._modules["_orig_mod"]
    return twin


def copied_state(model: nn.Module) -> list[Any]:
    """A comparable description of everything that a twin copies. After a change of it, a new twin is needed.

    In-place edits of weights need no new twin. Replaced weights, another device or dtype, hooks, a replaced `forward`
    and PEFT's switches (active adapter, disabled, merged) do.
    """
    state: list[Any] = []
    seen, waiting = set[int](), [model]
    while waiting:  # three times as fast as `modules`, `parameters` and `buffers`
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = module.__dict__
        for tensors in (own["_parameters"], own["_buffers"]):
            if tensors:
                state += [(id(t), t.device, t.dtype) for t in tensors.values() if t is not None]
        if "forward" in own:
            state.append(id(own["forward"]))
        held = [(name, own[name]) for name in COPIED if name in own]
        state.append([(name, str(value)) for name, value in held if value or not isinstance(value, dict | None)])
        if own["_modules"]:
            waiting += [child for child in own["_modules"].values() if child is not None]
    return state


def family_of(model: nn.Module) -> Family:
    """The entry of the model's family, or the default.

    Raises:
        UnsupportedModelError: views cannot split the layers.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    family = FAMILIES.get(kind, Family())
    config = model.config
    stateful = set(getattr(config, "layer_types", None) or ()) - STATELESS_LAYERS
    if stateful or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(stateful)) or "recurrent state"
        raise UnsupportedModelError(
            f"{kind}: its layers keep {what}, which cannot be rolled back after a rejected draft; "
            "decode it with transformers' own generate()"
        )
    base: Any = model
    for name in family.base.split("."):
        base = getattr(base, name, None)
    if base is None or not isinstance(getattr(base, family.layers, None), nn.ModuleList):
        raise UnsupportedModelError(
            f"{kind}: no list of layers at {family.base}.{family.layers}, so it cannot be split; "
            "decode it with transformers' own generate()"
        )
    settable = getattr(model, "_can_set_attn_implementation", None)
    if settable is None or not settable():
        raise UnsupportedModelError(
            f"{kind}: its attention does not go through transformers' AttentionInterface, so it cannot be split; "
            "decode it with transformers' own generate()"
        )
    return family


def base_of(model: nn.Module, family: Family) -> Any:
    return reduce(getattr, family.base.split("."), model)


def layer_view(base: nn.Module, family: Family, start: int, stop: int) -> Any:
    """The base model with layers [start, stop) only. It takes tokens if start is 0, else hidden states.

    The final norm is part of the view that includes the last layer.
    """
    part = copy.copy(base)
    part.__dict__["_modules"] = dict(base._modules)
    config: Any = copy.copy(base.config)
    layers = list(getattr(base, family.layers))
    setattr(part, family.layers, nn.ModuleList(layers[start:stop]))
    config.num_hidden_layers = stop - start
    config.pad_token_id = None  # else GPT-2 searches the tokens for it, to warn, which synchronises the device
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[start:stop]
    part.config = config
    if stop < len(layers):
        part._modules[family.norm] = nn.Identity()
    if start > 0:
        for name in family.only_first:
            part._modules[name] = _Zero(next(base.parameters()))
        for name in family.unit_after_first:
            setattr(part, name, 1.0)
    return part


def head_view(model: nn.Module, family: Family) -> Any:
    """The model without its base: its head, scaling and soft-capping over given hidden states."""
    head = part = copy.copy(model)
    part.__dict__["_modules"] = dict(model._modules)
    *path, last = family.base.split(".")
    for name in path:
        inner = copy.copy(getattr(part, name))
        inner.__dict__["_modules"] = dict(inner._modules)
        part._modules[name] = inner
        part = inner
    part._modules[last] = _HiddenStates()
    return head
