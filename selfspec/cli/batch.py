"""`selfspec batch`: a file of requests answered into another one; it can be stopped and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import ModelArgument, ModelOptions, Quiet, Replicas, ServedModelName, as_sentences
from selfspec.cli.serve import MAX_NUM_SEQS, PARTS, check_replicas, named, require
from selfspec.cli.session import open_llm
from selfspec.cli.status import StatusConsole
from selfspec.params import SpeculativeConfig
from selfspec.serving.config import ServerConfig

if TYPE_CHECKING:
    from selfspec.llm import LLM
    from selfspec.serving.batch_files import Answers, Line

PARQUET = ".parquet"


def batch(
    *,
    model: ModelArgument,
    input: Annotated[
        Path, Option(help="Requests, a line each: .jsonl or .parquet.", metavar="FILE", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, Option(help="Answers, a line each: .jsonl or .parquet.", metavar="FILE")],
    options: ModelOptions,
    speculative: SpeculativeConfig,
    config: ServerConfig,
    served_model_name: ServedModelName = None,
    replicas: Replicas = None,
    quiet: Quiet = False,
) -> None:
    """Answer what has no answer yet."""
    require("serve", PARTS)
    if replicas is not None:
        check_replicas(options)
    if PARQUET in (input.suffix, output.suffix):
        require("eval", ["pyarrow"])
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and transformers"):
            from selfspec.serving.batch import UNLIMITED
            from selfspec.serving.batch_files import read_lines

        size = config.max_num_seqs or MAX_NUM_SEQS
        config = named(config, served_model_name or [model], access_log=False, max_num_seqs=size, **UNLIMITED)
        make_llm = partial(open_llm, model, options, speculative, max_num_seqs=size)
        is_parquet = output.suffix == PARQUET
        with _opened(output.with_name(output.name + ".jsonl") if is_parquet else output) as answers:
            num_before = len(answers.done)
            _answer(make_llm, config, _left(read_lines(input), answers), answers, replicas, options.device, status)
            num_new = len(answers.done) - num_before
            if is_parquet:
                answers.to_parquet(output)
        status.say(f"{num_new} lines answered, {answers.num_failed} of them with an error; {num_before} were before")
    if answers.num_failed:
        raise Failure(f"{answers.num_failed} lines failed; their errors are in {output}, and they are asked again", RUN)


def _opened(file: Path) -> Answers:
    from selfspec.serving.batch_files import Answers

    try:
        return Answers(file)
    except BlockingIOError:
        raise Failure(f"--output {file} is being written by another process; let it end, or choose another") from None
    except OSError as problem:
        raise Failure(f"--output {file} cannot be written ({problem.strerror}); choose another") from None
    except ValueError as problem:
        raise Failure(f"--output {file}: {problem}; choose another file") from None


def _left(lines: Iterator[Line], answers: Answers) -> Iterator[Line]:
    """The requests that have no answer; lines that are wrong are answered here."""
    for line in lines:
        if line.custom_id in answers.done:
            continue
        if line.problem is None:
            yield line
        else:
            answers.write(line.refused())


def _answer(
    make_llm: Callable[[], LLM],
    config: ServerConfig,
    lines: Iterator[Line],
    answers: Answers,
    replicas: int | None,
    device: str | None,
    status: StatusConsole,
) -> None:
    from selfspec.serving.batch import Worker, answer_here, answer_on_ray

    first = next(lines, None)
    if first is None:
        return
    given = chain([first], lines), answers.write, 2 * (config.max_num_seqs or MAX_NUM_SEQS)
    with as_sentences():
        if replicas is not None:
            answer_on_ray((make_llm, config), *given, replicas, device)
            return
        with status.waiting(f"loading {config.model}"):
            worker = Worker(make_llm, config)
        answer_here(worker, *given)
