"""GGUF files: converted once by transformers, kept in the cache folder, and read from there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from selfspec.errors import UnsupportedModelError
from selfspec.kernels.machine import cache_folder, warn_not_kept
from selfspec.loading import checkpoint, gguf_index
from selfspec.model.file_weights import FileWeights

HASHED = 1 << 20  # bytes at both ends of a file that its key depends on
ABANDONED = 24 * 3600  # seconds after which an unfinished conversion counts as abandoned
MANIFEST = "selfspec-gguf.json"  # sizes of the other files of a conversion; written last

_log = logging.getLogger("selfspec")
_one_at_a_time = threading.Lock()  # a conversion redirects stderr of the process


def read_model(file: Path, name: str, dtype: torch.dtype | str) -> tuple[nn.Module, FileWeights | None]:
    """Read the causal LM of a GGUF file with dequantised weights; `name` stands for the file in errors.

    With it comes what the file holds of its weights; None for other dtypes than float32, without a cache folder, or
    where no weight has blocks of a supported type.

    The first call converts the file into a folder of float32 weights; later calls read this folder. Dequantised values
    are not representable in bfloat16 or float16. Where the cache folder cannot be written, every call converts in
    memory.

    Args:
        dtype: dtype of the weights in memory; "auto" is float32.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is no GGUF file, is truncated, lacks weights, or changed meanwhile.
        UnsupportedModelError: transformers does not support its architecture or quantisation.
        ImportError: the file must be converted, and gguf or accelerate is not installed.
    """
    folder = _folder(file, name)
    if dtype == "auto":
        dtype = torch.float32
    with _one_at_a_time:
        if folder is None or not (_is_whole(folder) or _convert(file, name, folder)):
            return _unpacked(file, name, _config(file, name), dtype), None
    with torch.inference_mode(False):  # edits of tensors that were made in inference mode are not counted
        model = checkpoint.read_model(str(folder), name, dtype)
        held = gguf_index.read(file, model, folder) if dtype == torch.float32 else None
    if _folder(file, name) != folder:  # the file that was mapped may be another one than was converted
        raise OSError(f"{name} changed while it was read; read it again when it is complete")
    return model, held


def read_tokenizer(file: Path, name: str) -> Any:
    """Read the tokenizer and chat template of a GGUF file; None without a tokenizer. Errors as for `read_model`."""
    folder = _folder(file, name)
    if folder is not None and _is_whole(folder):
        kept = checkpoint.read_tokenizer(str(folder), name)
        if kept is not None:
            return kept
    with _one_at_a_time:
        return _own_tokenizer(file, name)


def _folder(file: Path, name: str) -> Path | None:
    """The folder of a file's conversion; None without a cache folder.

    Its name depends on the file's size, time and ends, and on the version of transformers.
    """
    try:
        stat = file.stat()
        with file.open("rb") as opened:
            first = opened.read(HASHED)
            opened.seek(max(stat.st_size - HASHED, 0))
            last = opened.read()
    except OSError as problem:
        raise OSError(f"{name} cannot be read ({problem.strerror}); check its permissions") from problem
    about = f"{transformers.__version__} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(b"".join([about.encode(), first, last])).hexdigest()[:16]
    try:
        return cache_folder() / "gguf" / f"{file.stem}-{key}"
    except OSError as problem:
        warn_not_kept(problem)
        return None


def _is_whole(folder: Path) -> bool:
    """Whether a conversion has all its files: a cleaner of caches may have removed some, or it is of an old version."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text("utf-8"))
        return gguf_index.INDEX in sizes and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _convert(file: Path, name: str, folder: Path) -> bool:
    """Convert a file into `folder`, whole or not at all; False, with a warning, where it cannot be written.

    If several processes convert at once, the first result is kept and used by all.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-", suffix=".tmp"))
    except OSError as problem:
        warn_not_kept(problem)
        return False
    start = perf_counter()
    try:
        config = _config(file, name)
        _log.warning("converting %s to float32 weights, ten seconds to some minutes, once ...", name)
        model = _unpacked(file, name, config, torch.float32)
        tokenizer = None
        with contextlib.suppress(OSError):  # `read_tokenizer` raises the error
            tokenizer = _own_tokenizer(file, name)
        try:
            size = _save(file, (model, tokenizer), made, folder)
        except OSError as problem:
            warn_not_kept(problem)
            return False
        _log.warning("converted in %.1f s; %.0f MB are kept in %s", perf_counter() - start, size / 1e6, folder)
        return True
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    """Remove what conversions left behind whose processes were killed."""
    for made in place.glob("*.tmp"):
        with contextlib.suppress(OSError):  # another process may remove it, too
            if time() - made.stat().st_mtime > ABANDONED:
                shutil.rmtree(made, ignore_errors=True)


def _save(file: Path, parts: tuple[Any, Any], made: Path, folder: Path) -> int:
    """Write model, tokenizer (if any), index and manifest into `made`, rename it to `folder`, and return its size.

    Raises:
        OSError: a file cannot be written.
    """
    for part in parts:
        if part is not None:
            try:
                part.save_pretrained(made)
            except OSError:
                raise
            except Exception as problem:  # safetensors and tokenizers have errors of their own for a full disk
                raise OSError(checkpoint.in_brief(problem)) from problem
    gguf_index.write(file, parts[0], made)
    sizes = {path.name: path.stat().st_size for path in made.iterdir()}
    (made / MANIFEST).write_text(json.dumps(sizes), "utf-8")
    if folder.is_dir() and not _is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rename(made, folder)
    except OSError:
        if not _is_whole(folder):
            raise
    return sum(sizes.values())


def _unpacked(file: Path, name: str, config: Any, dtype: torch.dtype | str) -> nn.Module:
    """The model with dequantised weights."""
    loader: Any = AutoModelForCausalLM
    own: Any = getattr(transformers, "GgufConfig", None)  # versions without it always dequantise
    options = {} if own is None else {"quantization_config": own(dequantize=True)}
    with _reading(file, name):
        model, report = loader.from_pretrained(
            file.parent,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_place(file),
            **options,
        )
    checkpoint.check_complete(report, name)
    return model


def _config(file: Path, name: str) -> Any:
    with _reading(file, name):
        config = AutoConfig.from_pretrained(file.parent, **_place(file))
    checkpoint.check_writes_text(config, name)
    return config


def _place(file: Path) -> dict[str, Any]:
    return {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}


def _own_tokenizer(file: Path, name: str) -> Any:
    try:
        with _reading(file, name):
            return AutoTokenizer.from_pretrained(file.parent, **_place(file))
    except UnsupportedModelError as problem:  # the file is not damaged
        if "tokenizer.ggml.tokens" not in _fields(file, name):
            return None
        cause = problem.__cause__
        assert isinstance(cause, Exception)
        raise OSError(f"{name}: its tokenizer cannot be read ({checkpoint.in_brief(cause)})") from cause


@contextlib.contextmanager
def _reading(file: Path, name: str) -> Iterator[None]:
    """Suppress the progress bar on stderr, and turn failures into errors about the file.

    Reading the header may take seconds, so the file is checked only after a failure.
    """
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ImportError(
            f"{name}: unpacking a GGUF file needs {' and '.join(missing)}; "
            'install what is needed with: pip install "selfspec[gguf]"'
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except MemoryError:
        raise
    except Exception as problem:
        kind = _fields(file, name).get("general.architecture", "no architecture")
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} cannot read this GGUF file of the architecture {kind!r} "
            f"({checkpoint.in_brief(problem)}); choose another one"
        ) from problem


def _fields(file: Path, name: str) -> dict[str, Any]:
    """The metadata of a file without arrays; OSError where it is no GGUF file or is damaged."""
    import gguf

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise OSError(f"{name} is no GGUF file; give a GGUF file or a folder")
    try:
        reader = gguf.GGUFReader(file)
    except Exception as problem:  # reading past the end raises various errors
        raise OSError(
            f"{name} is truncated or damaged ({checkpoint.in_brief(problem)}); copy or download it again"
        ) from problem
    return {key: field.contents() if len(field.data) == 1 else None for key, field in reader.fields.items()}
