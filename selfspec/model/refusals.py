"""Checks of a model before anything runs: errors for everything that a twin of it could not reproduce."""

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
    """Raise ValueError where torch.autocast is on for the device.

    Results under autocast depend on the number of tokens in a call, so tokens would differ from those of `generate`.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ValueError(
            f"torch.autocast must be off, got autocast to {dtype} on {device.type}; call outside it, and load the "
            f"model with dtype={dtype} for that number format"
        )


def refuse_wrapper(model: nn.Module) -> None:
    """Raise UnsupportedModelError where a PEFT wrapper changes the input of calls, not only the model's layers."""
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
    """Raise UnsupportedModelError where `generate` would change the model's input, as PEFT does for virtual tokens.

    PEFT passes the base model to a callable, with `prepare_inputs_for_generation` replaced.
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
            f"the model's prepare_inputs_for_generation was replaced by {_name(prepare)}, which is not called here; "
            "restore the model's own, or decode without custom_generate"
        )


def drop_hooks_of_call(model: nn.Module) -> None:
    """Remove the hooks that PEFT adds for one call (adapter_names, aLoRA) and leaves behind when the call raises."""
    for module in model.modules():
        for key, hook in _hooks_of_peft(module):
            if isinstance(hook, partial):  # it holds arguments of a call; other hooks belong to the adapter
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks_of_peft(module: nn.Module) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in module._forward_pre_hooks.items() if _name(hook).startswith("peft.tuners.")]


def refuse_unsplittable(model: nn.Module) -> None:
    """Raise UnsupportedModelError where weights are absent, or views would not run a module's replaced `forward`.

    Views replace the modules that contain the list of layers. Inside the layers, a replaced `forward` runs as usual
    (as in tensor-parallel layers), and the self-check decides. A `forward` compiled by `torch.compile` is supported.
    """
    for name, module in model.named_modules():
        where = name or "the model"
        _refuse_absent_weights(where, module)
        for _, hook in _hooks_of_peft(module):
            raise UnsupportedModelError(_by_call(f"a PEFT adapter with the hook {_name(hook)}"))
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
    """The error message for a module whose `forward` was replaced; None where there is none."""
    return next((_of_replaced(name, forward) for name, _, forward in _replaced(model)), None)


def _replaced(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Modules whose `forward` is neither that of their class nor compiled from it."""
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
    """Whether the module's `forward` is that of its class, compiled by torch.compile."""
    forward: Any = module.__dict__.get("forward")
    if not hasattr(forward, "_torchdynamo_orig_callable"):
        return False
    while hasattr(forward, "_torchdynamo_orig_callable"):
        forward = forward._torchdynamo_orig_callable
    return getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward


def _paths_of_views(model: nn.Module) -> list[str]:
    """The names of the modules that contain a list of layers; views replace these modules."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [name.rsplit(".", at)[0] for name in lists for at in range(1, name.count(".") + 1)]


def _refuse_absent_weights(where: str, module: nn.Module) -> None:
    hook: Any = getattr(module, "_hf_hook", None)
    is_offloaded = any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook]))
    tensors = (*module._parameters.values(), *module._buffers.values())
    if is_offloaded or any(tensor is not None and tensor.is_meta for tensor in tensors):
        raise UnsupportedModelError(
            f"weights of {where} are not in memory between calls (offloaded by accelerate, or on the meta device), so "
            "layers cannot be run in parts; load the whole model onto one device, without offloading or device_map, or "
            + INSTEAD
        )


def _virtual_tokens(instead: str) -> str:
    return (
        "a PEFT adapter of virtual tokens (prompt, prefix or p-tuning) is outside the model's layers, so the model "
        f"cannot be split; decode it with {instead}"
    )


def _by_call(what: str) -> str:
    return (
        f"{what} acts on calls and not on weights, so the model cannot be split; use one adapter of weights for all "
        "rows (set_adapter), or decode it with the PEFT model's own generate() without custom_generate"
    )


def _name(function: Any) -> str:
    """Module and name of a function, without the arguments of a partial."""
    while isinstance(function, partial):
        function = function.func
    named = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{named}"
