"""`selfspec datastore`: build an index of a corpus for drafts, and say what is in one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from selfspec.commands.failure import RUN, Failure, as_sentences

EVERY = 0.1  # seconds between two progress lines


def build(model: str, corpus: Sequence[Path], output: Path, field: str, as_json: bool, quiet: bool) -> None:
    """Tokenize, sort, write, and say what was written."""
    output = output.expanduser()
    files = [file.expanduser() for file in corpus]
    _check(files, output)
    from selfspec import hub, show  # torch and transformers, from here on
    from selfspec.commands.corpus import documents
    from selfspec.drafting.datastore_build import build
    from selfspec.model.fingerprint import vocabulary_of

    with as_sentences():
        tokenizer = hub.open_tokenizer(model)
    if tokenizer is None:
        raise Failure(
            f"{model} has no tokenizer, so it cannot read text; save one in its folder, or choose another", RUN
        )
    say = _progress(output, show.make_console(sys.stderr, quiet=quiet))
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    try:
        about = build(output, documents(files, tokenizer, field), vocabulary_of(tokenizer), vocab_size, say)
    except ValueError as problem:
        raise Failure(str(problem), RUN) from problem
    except OSError as problem:
        reason = problem.strerror or problem
        raise Failure(f"{output} cannot be written ({reason}); give a file in an existing folder", RUN) from problem
    finally:
        say("")
    _write(output, about, {}, as_json)


def info(file: Path, verify: bool, as_json: bool) -> None:
    """Say what a datastore holds, and whether it is whole."""
    from selfspec.drafting import datastore_file

    file = file.expanduser()
    with reading(file):
        if verify:
            about = datastore_file.verify(file)
        else:
            opened, about = datastore_file.open_file(file)
            opened.close()
    _write(file, about, {"verified": verify}, as_json)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what is wrong with a datastore that is read into failures of the run."""
    from selfspec.errors import DatastoreError

    try:
        yield
    except (DatastoreError, FileNotFoundError) as problem:
        raise Failure(str(problem), RUN) from problem
    except OSError as problem:
        raise Failure(f"{file} cannot be read ({problem.strerror}); give a file of yours", RUN) from problem


def _check(files: Sequence[Path], output: Path) -> None:
    """Refuse what would fail after a long time, or replace what is no datastore."""
    from selfspec.drafting.datastore_file import MAGIC

    for file in files:
        if file.is_dir():
            raise Failure(f"{file} is a folder; give the files in it, such as {file}/*.txt")
        if not file.exists():
            raise Failure(f"there is no file {file}; give text or JSON-lines files")
    if output.is_dir():
        raise Failure(f"--output {output} is a folder; give a file in it")
    if not output.parent.is_dir():
        raise Failure(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.exists():
        with output.open("rb") as there:
            if there.read(len(MAGIC)) != MAGIC:
                raise Failure(f"--output {output} is there already and no datastore; choose another name")


def _progress(output: Path, talk: Console) -> Callable[[str], None]:
    """On a terminal one line that is rewritten and in the end taken back, elsewhere a line at the start."""
    shown, last = 0, 0.0

    def say(text: str) -> None:
        nonlocal shown, last
        if not talk.is_terminal:
            if text and not shown:
                talk.print(Text(f"building {output}"), soft_wrap=True)
                shown = 1
            return
        if text.startswith("read") and time.monotonic() < last + EVERY:
            return
        last = time.monotonic()
        line = f"building {output}: {text}" if text else ""
        talk.print(Text(line.ljust(shown), "dim"), end="\r", soft_wrap=True)
        shown = max(shown, len(line))

    return say


def _write(file: Path, about: Any, more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        document = {"file": str(file), **asdict(about), "num_bytes": about.num_bytes, **more}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        rows = {
            "datastore": file,
            "documents": f"{about.num_documents:,}",
            "tokens": f"{about.num_tokens:,}",
            "vocabulary": f"{about.vocab_size:,} tokens, fingerprint {about.tokenizer}",
            "size": f"{about.num_bytes:,} bytes, {about.num_bytes / about.num_tokens:.1f} per token",
        }
        if more.get("verified"):
            rows["checksum"] = "right"
        for name, value in rows.items():
            sys.stdout.write(f"{name:<12} {value}\n")
    sys.stdout.flush()
