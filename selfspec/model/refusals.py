"""What is seen on a model, before anything is run, that a twin of it could not do likewise: refused by its own name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from selfspec.errors import UnsupportedModelError

INSTEAD = "decode it with transformers' own generate()"
FROM_CALLS = {"POLY": "a routing by task", "XLORA": "a classifier of every call"}  # PEFT types that act on calls


def refuse_autocast(device: torch.device) -> None:
    """ValueError where torch.autocast is on for the device: its casts change the model's own numbers.

    What they come to depends on how many tokens share a call, so tokens would not be those of `generate`.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ValueError(
            f"torch.autocast must be off, got autocast to {dtype} on {device.type}; call outside it, and load the "
            f"model with dtype={dtype} for that number format"
        )


def refuse_wrapper(model: nn.Module) -> None:
    """UnsupportedModelError where a PEFT wrapper changes the input of every call, not only the model's layers."""
    name = getattr(model, "active_adapter", None)
    configs = getattr(model, "peft_config", None)
    if not hasattr(model, "get_base_model") or not isinstance(configs, dict):
        return
    for one in [name] if isinstance(name, str) else list(name or ()):
        config = configs.get(one)
        kind = getattr(getattr(config, "peft_type", None), "value", "")
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(_virtual_tokens("the PEFT model's own generate()"))
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(_by_call("a LoRA that begins at invocation tokens (aLoRA)"))
        if kind in FROM_CALLS:
            raise UnsupportedModelError(_by_call(f"{kind}, {FROM_CALLS[kind]},"))


def refuse_call(model: nn.Module) -> None:
    """UnsupportedModelError where `generate` would change the model's input, as PEFT does to add virtual tokens.

    PEFT hands a callable the base model; what it adds then sits in the base model's `prepare_inputs_for_generation`.
    """
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is None or (getattr(prepare, "__self__", None) is model and getattr(prepare, "__func__", None) is own):
        return
    config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(_virtual_tokens("generate() without custom_generate"))
    if config is None:
        raise UnsupportedModelError(
            f"the model's prepare_inputs_for_generation was replaced by {_name(prepare)}, which is not asked here; "
            "put the model's own back, or decode without custom_generate"
        )


def drop_hooks_of_call(model: nn.Module) -> None:
    """Take back the hooks that PEFT gave a call (adapter_names, aLoRA): where the call raises, PEFT leaves them."""
    for module in model.modules():
        for key, hook in _hooks_of_peft(module):
            if isinstance(hook, partial):  # it holds arguments of a call; other hooks are the adapter's own
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks_of_peft(module: nn.Module) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in module._forward_pre_hooks.items() if _name(hook).startswith("peft.tuners.")]


def refuse_unsplittable(model: nn.Module) -> None:
    """UnsupportedModelError with the reason where modules lack their weights, or views would not run their `forward`.

    Views take the place of the modules on the way to the layers. Below those, a replaced `forward` runs as it is, as
    that of a tensor-parallel layer does, and the self-check tells whether it can be split. One that `torch.compile`
    made of the module's own is served everywhere.
    """
    for name, module in model.named_modules():
        where = name or "the model"
        _refuse_absent_weights(where, module)
        for _, hook in _hooks_of_peft(module):
            raise UnsupportedModelError(_by_call(f"a PEFT adapter that is told of each call by {_name(hook)}"))
    rebuilt = ("", *_paths_of_views(model))
    for name, module, forward in _replaced(model):
        if hasattr(module, "_hf_hook"):
            raise UnsupportedModelError(
                f"accelerate moves the inputs of {name or 'the model'} between devices "
                f"({type(module._hf_hook).__name__}), which cannot be split; load the model onto one device, or "
                f"{INSTEAD}"
            )
        if name in rebuilt:
            raise UnsupportedModelError(_of_replaced(name, forward))


def replaced_forward(model: nn.Module) -> str | None:
    """Of a model that does not pass its self-check: why, if a part of it runs something else than its class."""
    return next((_of_replaced(name, forward) for name, _, forward in _replaced(model)), None)


def _replaced(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Modules whose `forward` is not their class's, nor made of that by torch.compile."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if forward is not None and not hasattr(module, "_orig_mod") and not is_compiled_own(module):
            yield name, module, forward


def _of_replaced(name: str, forward: Any) -> str:
    return (
        f"forward of {name or 'the model'} was replaced by {_name(forward)}, which cannot be split; remove it with "
        f"del ({name or 'model'}.forward), put it into a subclass, or {INSTEAD}"
    )


def is_compiled_own(module: nn.Module) -> bool:
    """Whether the module's `forward` is its class's, through torch.compile."""
    forward: Any = module.__dict__.get("forward")
    if not hasattr(forward, "_torchdynamo_orig_callable"):
        return False
    while hasattr(forward, "_torchdynamo_orig_callable"):
        forward = forward._torchdynamo_orig_callable
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward


def _paths_of_views(model: nn.Module) -> list[str]:
    """Modules on the way to the layers: views take their place, and would run the replaced forward of the whole."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [name.rsplit(".", at)[0] for name in lists for at in range(1, name.count(".") + 1)]


def _refuse_absent_weights(where: str, module: nn.Module) -> None:
    hook: Any = getattr(module, "_hf_hook", None)
    is_offloaded = any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook]))
    tensors = (*module._parameters.values(), *module._buffers.values())
    if is_offloaded or any(tensor is not None and tensor.is_meta for tensor in tensors):
        raise UnsupportedModelError(
            f"weights of {where} are not there between calls (offloaded by accelerate, or on the meta device), so "
            "layers cannot be run in parts; load the whole model onto one device, without offloading or device_map, or "
            + INSTEAD
        )


def _virtual_tokens(instead: str) -> str:
    return (
        "a PEFT adapter of virtual tokens (prompt, prefix or p-tuning) lies outside the model's layers, so it "
        f"cannot be split; decode it with {instead}"
    )


def _by_call(what: str) -> str:
    return (
        f"{what} acts on calls and not on weights, so the model cannot be split; use one adapter of weights for all "
        "rows (set_adapter), or decode it with the PEFT model's own generate() without custom_generate"
    )


def _name(function: Any) -> str:
    """Where a function comes from, without the arguments that a partial holds."""
    while isinstance(function, partial):
        function = function.func
    named = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{named}"
