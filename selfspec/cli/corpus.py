"""`selfspec corpus`: build an index of a corpus for drafts, and say what is in one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import Json, ModelArgument, Quiet, as_sentences
from selfspec.cli.status import StatusConsole

if TYPE_CHECKING:
    from selfspec.drafting.datastore_file import About


def build(
    *,
    model: ModelArgument,
    files: Annotated[
        list[Path], Argument(metavar="CORPUS...", help="Text or JSON-lines files, UTF-8.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, Option("--output", "-o", help="The index.", metavar="FILE", dir_okay=False)],
    field: Annotated[str, Option(help="Where a line of a JSON-lines file (.jsonl, .ndjson) has its text.")] = "text",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tokenize, sort, write, and say what was written."""
    _check(output)
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and transformers"):
            from selfspec.drafting import datastore_build
            from selfspec.drafting.documents import documents
            from selfspec.loading import hub
            from selfspec.model.fingerprint import vocabulary_of

        with as_sentences():
            tokenizer = hub.open_tokenizer(model)
        if tokenizer is None:
            raise Failure(
                f"{model} has no tokenizer, so it cannot read text; save one in its folder, or choose another", RUN
            )
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        with _building(output), status.waiting(f"building {output.name}"):
            found = documents(files, tokenizer, field)
            about = datastore_build.build(output, found, vocabulary_of(tokenizer), vocab_size, status.progress)
    _write(output, about, False, as_json)


def info(
    *,
    file: Annotated[Path, Argument(metavar="FILE", help="The index.", show_default=False)],
    verify: Annotated[bool, Option("--verify", help="Read all of it and compare it with its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """Say what an indexed corpus holds, and whether it is whole."""
    from selfspec.drafting import datastore_file

    with as_sentences():
        if verify:
            about = datastore_file.verify(file)
        else:
            opened, about = datastore_file.open_file(file)
            opened.close()
    _write(file, about, verify, as_json)


@contextmanager
def _building(output: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise Failure(str(problem).replace("the field that does", "the field that does with --field"), RUN) from problem
    except OSError as problem:
        reason = problem.strerror or problem
        raise Failure(f"{output} cannot be written ({reason}); give a file in an existing folder", RUN) from problem


def _check(output: Path) -> None:
    """Refuse what would fail after a long time, or replace what is no indexed corpus."""
    from selfspec.drafting.datastore_file import MAGIC

    if not output.parent.is_dir():
        raise Failure(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.exists():
        with output.open("rb") as there:
            if there.read(len(MAGIC)) != MAGIC:
                raise Failure(f"--output {output} is there already and no indexed corpus; choose another name")


def _write(file: Path, about: About, is_verified: bool, as_json: bool) -> None:
    if as_json:
        document = {"file": str(file), **asdict(about), "num_bytes": about.num_bytes, "verified": is_verified}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        rows = {
            "corpus": file,
            "documents": f"{about.num_documents:,}",
            "tokens": f"{about.num_tokens:,}",
            "vocabulary": f"{about.vocab_size:,} tokens, fingerprint {about.tokenizer}",
            "size": f"{about.num_bytes:,} bytes, {about.num_bytes / about.num_tokens:.1f} per token",
        }
        if is_verified:
            rows["checksum"] = "right"
        for name, value in rows.items():
            sys.stdout.write(f"{name:<12} {value}\n")
    sys.stdout.flush()
