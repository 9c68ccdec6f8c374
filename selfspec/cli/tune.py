"""`selfspec tune`: exit heads for one's own prompts, in minutes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import Json, ModelArgument, ModelOptions, Quiet, as_sentences
from selfspec.cli.session import open_llm
from selfspec.cli.status import StatusConsole

if TYPE_CHECKING:
    from selfspec.learning.card import Tuned

PARAGRAPHS = ".txt"


def tune(
    *,
    model: ModelArgument,
    prompts: Annotated[
        Path,
        Option(
            help="Texts between blank lines (.txt), or JSON lines: texts, or OpenAI bodies with prompt or messages.",
            metavar="FILE",
            exists=True,
            dir_okay=False,
        ),
    ],
    output: Annotated[
        Path | None, Option(help="Folder of the heads. Default: MODEL's last part and -heads.", metavar="DIR")
    ] = None,
    minutes: Annotated[float, Option(help="Time for all of it, loading apart.", min=0.01, max=1e5)] = 10.0,
    max_tokens: Annotated[int, Option(help="Most tokens of an answer, unless a body says it.", min=1)] = 128,
    keep: Annotated[bool, Option("--keep", help="Write the heads even if nothing is gained.")] = False,
    seed: Annotated[int, Option(help="Of the order of prompts and of first weights.", min=0)] = 0,
    options: ModelOptions,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Read the prompts, tune, and write a table of what was gained, or one JSON document."""
    given = read_workload(prompts)
    folder = Path(Path(model).stem.replace(":", "-") + "-heads") if output is None else output
    if folder.exists() and not folder.is_dir():
        raise Failure(f"--output must be a folder, got the file {folder}")
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and transformers"):
            from selfspec.learning.card import table

        with status.waiting(f"loading {model}"):
            llm = open_llm(model, options)
        with as_sentences():
            tuned = llm.tune(
                given, folder, minutes=minutes, max_tokens=max_tokens, keep=keep, seed=seed, report=status.say
            )
    if as_json:
        sys.stdout.write(json.dumps(_document(tuned)) + "\n")
    else:
        sys.stdout.write("\n".join([*table(tuned), "", *_end(tuned, model)]) + "\n")
    sys.stdout.flush()


def read_workload(file: Path) -> list[Any]:
    """The prompts of a file: texts, or bodies as `selfspec batch` reads them."""
    from selfspec.serving.batch_files import read_lines

    try:
        if file.suffix == PARAGRAPHS:
            found: list[Any] = [part.strip() for part in file.read_text("utf-8").split("\n\n") if part.strip()]
        else:
            given = enumerate(file.read_bytes().split(b"\n"), 1)
            found = [_prompt(file, number, line) for number, line in given if line.strip()]
            lines = {line.number: line for line in read_lines(file)}
            found = [one if isinstance(one, str) else _body(file, lines[one]) for one in found]
    except (OSError, UnicodeDecodeError) as problem:
        raise Failure(f"--prompts {file} cannot be read ({problem})", RUN) from problem
    if not found:
        raise Failure(f"{file} holds no prompt; write texts between blank lines, or JSON lines")
    return found


def _prompt(file: Path, number: int, line: bytes) -> str | int:
    """A line that is a JSON text; else the number of the line."""
    try:
        found = json.loads(line)
    except ValueError as problem:
        raise Failure(f"{file}, line {number}: not valid JSON ({problem})") from None
    if isinstance(found, str) and not found.strip():
        raise Failure(f"{file}, line {number}: the text is empty")
    return found if isinstance(found, str) else number


def _body(file: Path, line: Any) -> dict[str, Any]:
    body: dict[str, Any] = line.body
    if line.problem is not None or not (body.get("prompt") or body.get("messages")):
        problem = line.problem or "it needs a prompt or messages"
        raise Failure(f"{file}, line {line.number}: {problem}")
    return body


def _document(tuned: Tuned) -> dict[str, Any]:
    heads, document = tuned.heads, {}
    for name, value in asdict(tuned).items():
        document[name] = str(value) if isinstance(value, Path) else value
    return document | {"heads": {"weights": heads.weights, "exits": list(heads.layers), "inner_size": heads.inner_size}}


def _end(tuned: Tuned, model: str) -> list[str]:
    exits = ", ".join(map(str, tuned.exits))
    before, after = tuned.agreement[tuned.exits[0]]
    lines = [f"exit {exits}: agreement {before:.3f} before, {after:.3f} after; {tuned.num_held_out} held-out prompts"]
    if not tuned.gains:
        lines.append(f"nothing is gained: {tuned.reason}")
    if tuned.folder is not None:
        lines.append(f"use them: selfspec generate --model {model} --exit-heads {tuned.folder} ...")
    elif not tuned.gains:
        lines.append("nothing was written; --keep writes the heads, and more --minutes or prompts may help")
    return lines
