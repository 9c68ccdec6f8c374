"""Files of real sizes: load time, memory and speed, beside llama.cpp's on the same file: `python -m eval sizes`.

Every pair of a shape and a type is a file of random weights (`eval.sizes_gguf`), which is written where it is missing.
Of bfloat16 folders the peer is transformers. Everything is measured in processes of their own, selfspec's and the
peer's in turns. Files are read once before, so loading does not wait for the disk. The folder has a line per
measurement; a run that was stopped is resumed by the same command, and runs with other shapes and types add to it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from eval import measurement
from eval.config import config_of, parser_of
from eval.records import write_file
from eval.session import Resumable
from eval.shapes import SHAPES
from eval.sizes_gguf import FILE_TYPES, FOLDER
from eval.sizes_table import LLAMA_CPP, OURS, TRANSFORMERS, Cell, cell_of, render
from selfspec.kernels.machine import cache_folder
from train.configuration import check, check_known, check_least, flags_given, option


@dataclass(frozen=True, slots=True)
class SizesConfig:
    """The configuration of `python -m eval sizes`."""

    shapes: tuple[str, ...] = option(("llama-3.2-1b",), f"Shapes: {', '.join(SHAPES)}, or config.json files.")
    types: tuple[str, ...] = option(("Q4_0",), f"Types of each shape: {', '.join((*FILE_TYPES, FOLDER))}.")
    threads: tuple[int, ...] = option((1, 2), "Numbers of threads to decode with; loading has the largest.")
    peers: bool = option(True, "Measure llama.cpp, or transformers on folders, too.")
    context: int = option(512, "Tokens that the cache has room for when memory is read.")
    prompt_tokens: int = option(512, "Tokens of the prompt whose reading is timed.")
    new_tokens: int = option(32, "Tokens of a timed output.")
    verify: tuple[int, ...] = option((2, 4, 8), "Numbers of tokens whose verification is timed.")
    contexts: tuple[int, ...] = option((), "Numbers of tokens after which decoding is timed, too; a GGUF file's.")
    repeats: int = option(3, "Timed repeats after an untimed one.")
    time_limit: float = option(600.0, "Seconds of a process.")
    files: str = option("runs/sizes/files", "Folder of the files.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "repeats", "time_limit")
        check_least(self, 2, "new_tokens")
        check_least(self, 17, "prompt_tokens")
        check_least(self, 32, "context")
        check(bool(self.threads) and min(self.threads) >= 1, "threads", "numbers of at least 1", list(self.threads))
        check(all(n >= 2 for n in self.verify), "verify", "numbers of at least 2", list(self.verify))
        check(all(n >= 1 for n in self.contexts), "contexts", "numbers of at least 1", list(self.contexts))
        for name in self.types:
            check_known("type", name, (*FILE_TYPES, FOLDER))
        for name in self.shapes:
            check(name in SHAPES or Path(name).is_file(), "shapes", f"of {', '.join(SHAPES)}, or a config.json", name)


class Session(Resumable[SizesConfig]):
    """Files of every shape and type, and their speeds."""

    may_change = ("output", "files", "shapes", "types", "threads")

    def __init__(self, config: SizesConfig) -> None:
        super().__init__(config, config.output)
        Path(config.files).mkdir(parents=True, exist_ok=True)
        self._done_seconds = self._done_bytes = 0.0

    def run(self) -> None:
        """Measure what is missing, file by file."""
        paths = {
            self._file(shape, kind).name: (shape, kind) for shape in self.config.shapes for kind in self.config.types
        }
        failed = {cell_of(row) for row in self.lines if "failed" in row}
        left = {
            name: sorted((cell for cell in self._cells(name) if self._row(cell) is None), key=failed.__contains__)
            for name in paths
        }
        for name, (shape, kind) in paths.items():
            if left[name]:
                path = self._written(shape, kind)
                for part in path.rglob("*") if path.is_dir() else [path]:
                    with part.open("rb") as opened:
                        while opened.read(1 << 24):
                            pass
            while left[name]:
                self._measure(left[name][0], left)
                del left[name][0]

    def _file(self, shape: str, kind: str) -> Path:
        stem = f"{Path(shape).stem if shape not in SHAPES else shape}.{kind}"
        return Path(self.config.files) / (stem if kind == FOLDER else f"{stem}.gguf")

    def _written(self, shape: str, kind: str) -> Path:
        path = self._file(shape, kind)
        if not path.exists():
            self.say(f"writing {path}")
            unfinished = path.with_name(f"{path.name}.tmp")
            self._child("eval.sizes_gguf", shape, kind, str(unfinished))
            os.replace(unfinished, path)
        return path

    def _cells(self, name: str) -> Iterator[Cell]:
        config, most = self.config, max(self.config.threads)
        engines = [OURS, *([LLAMA_CPP if name.endswith(".gguf") else TRANSFORMERS] if config.peers else [])]
        yield Cell(name, "", "imports", most)
        for task in ("first", "second"):
            for engine in engines:
                yield Cell(name, engine, task, most)
        for threads in config.threads:
            yield Cell(name, "", "bandwidth", threads)
            for engine in engines:
                yield Cell(name, engine, "speed", threads)
            yield Cell(name, OURS, "verify", threads)
            if self.config.contexts and name.endswith(".gguf"):
                yield Cell(name, OURS, "contexts", threads)

    def _row(self, cell: Cell) -> Mapping[str, Any] | None:
        about = cell._asdict()
        return next((row for row in self.lines if about.items() <= row.items() and "failed" not in row), None)

    def _measure(self, cell: Cell, left: Mapping[str, Sequence[Cell]]) -> None:
        """Run a cell's process and keep its result, or why there is none."""
        folder = Path(self.config.files)
        path, size = folder / cell.file, size_of(folder / cell.file)
        rest = sum(size_of(folder / name) * len(cells) for name, cells in left.items())
        expected = f", about {rest * self._done_seconds / self._done_bytes:.0f} s left" if self._done_bytes else ""
        self.say(f"{cell.file} {cell.engine} {cell.task}, {cell.threads} threads{expected}")
        cache, begun = self.folder / "cache", perf_counter()
        row = {**cell._asdict(), "bytes": size, "token_bytes": token_bytes(path)}
        try:
            before = self._emptied(cache) if (cell.engine, cell.task) == (OURS, "first") else size_of(cache)
            found = self._child("eval.sizes_child", *self._arguments(cell, path), threads=cell.threads)
            row |= {"found": json.loads(found.splitlines()[-1]), "written": size_of(cache) - before}
        except RuntimeError as problem:
            row["failed"] = str(problem)
            self.say(f"failed: {problem}")
        self.keep(measurement.rounded(row))
        self._done_seconds += perf_counter() - begun
        self._done_bytes += size

    def _emptied(self, cache: Path) -> int:
        """Remove what selfspec keeps, but for its compiled engine, which is made here; returns the bytes left."""
        if not (cache / "compiled").exists():
            if (own := cache_folder() / "compiled").is_dir():
                shutil.copytree(own, cache / "compiled")
            about = {"engine": OURS, "model": "demo", "threads": 1, "begun": 0, "context": 64, "limit": 60}
            self._child("eval.sizes_child", "load", json.dumps(about))
        for one in cache.iterdir():
            if one.name != "compiled":
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        return size_of(cache)

    def _arguments(self, cell: Cell, path: Path) -> tuple[str, str]:
        """The arguments of `eval.sizes_child`."""
        config, given = self.config, {"engine": cell.engine, "model": str(path), "threads": cell.threads}
        if cell.task in ("first", "second"):
            more = {"begun": perf_counter(), "context": config.context, "limit": config.time_limit}
            return "load", json.dumps({**given, **more})
        if cell.task == "speed":
            more = {"prompt": config.prompt_tokens, "tokens": config.new_tokens, "repeats": config.repeats}
            return "speed", json.dumps({**given, **more, "limit": config.time_limit})
        if cell.task == "verify":
            more = {"widths": list(config.verify), "repeats": config.repeats}
            return "verify", json.dumps({"model": str(path), "threads": cell.threads, **more})
        if cell.task == "contexts":
            more = {"contexts": list(config.contexts), "tokens": config.new_tokens}
            return "contexts", json.dumps({"model": str(path), "threads": cell.threads, **more})
        return cell.task, json.dumps({"threads": cell.threads} if cell.task == "bandwidth" else {})

    def _child(self, module: str, *arguments: str, threads: int = 1) -> str:
        """Run a module in a process; returns its output, or RuntimeError with the reason in a sentence."""
        own = {"OMP_NUM_THREADS": str(threads), "SELFSPEC_CACHE": str((self.folder / "cache").resolve())}
        command = [sys.executable, "-m", module, *arguments]
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": {**os.environ, **own}}
        try:
            done = subprocess.run(command, check=False, timeout=self.config.time_limit, **options)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took longer than {self.config.time_limit:g} s") from None
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [""])[-1]
            raise RuntimeError(f"exit code {done.returncode}: {why[:300]}")
        return str(done.stdout)

    def finish(self) -> str:
        """Write the tables of what the folder holds; returns them."""
        text = render(self.lines, measurement.machine())
        write_file(self.folder / "sizes.md", text)
        return text


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files of a folder; 0 where there is neither."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size if path.exists() else 0


def token_bytes(path: Path) -> int:
    """Bytes of the weights that a token reads: all but an embedding that is not the head, too."""
    if path.is_dir():
        config = json.loads((path / "config.json").read_text("utf-8"))
        other = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
        return sum(one.stat().st_size for one in path.glob("*.safetensors")) - other
    from selfspec.loading.gguf.file import GgufFile

    tensors = GgufFile(path, path.name).tensors
    embedding = tensors["token_embd.weight"].nbytes if "output.weight" in tensors else 0
    return sum(tensor.nbytes for tensor in tensors.values()) - embedding


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or resume; returns the exit code.

    Raises:
        ValueError, OSError: an option or file cannot be used.
    """
    options = parser_of("sizes", SizesConfig, __doc__).parse_args(arguments)
    try:
        return Session(config_of(SizesConfig, options.config, flags_given(options))).complete()
    except RuntimeError as problem:
        raise ValueError(f"a file could not be written: {problem}") from problem
