"""`selfspec corpus`: build an index of a corpus for drafts, and say what is in one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec.cli.failure import RUN, Failure, as_sentences
from selfspec.cli.options import CorpusBuild, CorpusInfo
from selfspec.cli.talk import Talk


def build(options: CorpusBuild) -> None:
    """Tokenize, sort, write, and say what was written."""
    model, output = options.model, options.output.expanduser()
    files = [file.expanduser() for file in options.files]
    _check(files, output)
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec import hub
            from selfspec.drafting import datastore_build
            from selfspec.drafting.documents import documents
            from selfspec.model.fingerprint import vocabulary_of

        with as_sentences():
            tokenizer = hub.open_tokenizer(model)
        if tokenizer is None:
            raise Failure(
                f"{model} has no tokenizer, so it cannot read text; save one in its folder, or choose another", RUN
            )
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        with _building(output), talk.waiting(f"building {output.name}"):
            found = documents(files, tokenizer, options.field)
            about = datastore_build.build(output, found, vocabulary_of(tokenizer), vocab_size, talk.progress)
    _write(output, about, {}, options.as_json)


def info(options: CorpusInfo) -> None:
    """Say what an indexed corpus holds, and whether it is whole."""
    from selfspec.drafting import datastore_file

    file = options.file.expanduser()
    with reading(file):
        if options.verify:
            about = datastore_file.verify(file)
        else:
            opened, about = datastore_file.open_file(file)
            opened.close()
    _write(file, about, {"verified": options.verify}, options.as_json)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what is wrong with an indexed corpus that is read into failures of the run."""
    from selfspec.errors import DatastoreError

    try:
        yield
    except (DatastoreError, FileNotFoundError) as problem:
        raise Failure(str(problem), RUN) from problem
    except OSError as problem:
        raise Failure(f"{file} cannot be read ({problem.strerror}); give a file of yours", RUN) from problem


@contextmanager
def _building(output: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise Failure(str(problem).replace("the field that does", "the field that does with --field"), RUN) from problem
    except OSError as problem:
        reason = problem.strerror or problem
        raise Failure(f"{output} cannot be written ({reason}); give a file in an existing folder", RUN) from problem


def _check(files: Sequence[Path], output: Path) -> None:
    """Refuse what would fail after a long time, or replace what is no indexed corpus."""
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
                raise Failure(f"--output {output} is there already and no indexed corpus; choose another name")


def _write(file: Path, about: Any, more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        document = {"file": str(file), **asdict(about), "num_bytes": about.num_bytes, **more}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        rows = {
            "corpus": file,
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
