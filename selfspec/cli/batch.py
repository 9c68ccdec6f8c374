"""`selfspec batch`: a file of requests answered into another one; it can be stopped and gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from selfspec.cli.failure import Failure, as_sentences
from selfspec.cli.options import Batch
from selfspec.cli.serve import PARTS, RAY_PARTS, open_llm, require
from selfspec.cli.talk import Talk

PARQUET = ".parquet"


def batch(options: Batch) -> None:
    """Answer what has no answer yet."""
    options.check()
    require("serve", PARTS)
    if options.replicas is not None:
        require("ray", RAY_PARTS)
    if PARQUET in (options.input.suffix, options.output.suffix):
        require("eval", ["pyarrow"])
    if not options.input.is_file():
        raise Failure(f"--input {options.input} is no file")
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec.serving.batch_files import read_lines
        is_parquet = options.output.suffix == PARQUET
        journal = options.output.with_name(options.output.name + ".jsonl") if is_parquet else options.output
        with _opened(journal) as answers:
            num_before = len(answers.done)
            _answer(options, read_lines(options.input), answers, talk)
            num_new = len(answers.done) - num_before
            if is_parquet:
                answers.to_parquet(options.output)
        line = f"{num_new} lines answered, {answers.num_failed} of them with an error; {num_before} were before"
        talk.console.print(line, style="dim", soft_wrap=True, markup=False)


def _opened(file: Path) -> Any:
    from selfspec.serving.batch_files import Answers

    try:
        return Answers(file)
    except BlockingIOError:
        raise Failure(f"--output {file} is being written by another process; let it end, or choose another") from None
    except OSError as problem:
        raise Failure(f"--output {file} cannot be written ({problem.strerror}); choose another") from None
    except ValueError as problem:
        raise Failure(f"--output {file}: {problem}; choose another file") from None


def _answer(options: Batch, lines: Iterator[Any], answers: Any, talk: Talk) -> None:
    from selfspec.serving.batch import UNLIMITED, Worker, answer_here, answer_on_ray
    from selfspec.serving.config import ServerConfig

    def left() -> Iterator[Any]:
        for line in lines:
            if line.custom_id in answers.done:
                continue
            if line.problem is None:
                yield line
            else:
                answers.write(line.refused())

    waiting = left()
    first = next(waiting, None)
    if first is None:
        return
    names = "max_num_seqs", "max_num_cached_tokens"
    limits: dict[str, Any] = UNLIMITED | {name: getattr(options, name) for name in names}
    config = ServerConfig(model=options.served_model_name or options.model, max_body_bytes=1 << 40, **limits)
    make_llm = partial(open_llm, options, options.max_num_seqs)
    rest = chain([first], waiting), answers.write, 2 * options.max_num_seqs
    with as_sentences():
        if options.replicas is not None:
            answer_on_ray((make_llm, config), *rest, options.replicas, options.device)
            return
        with talk.waiting(f"loading {options.model}"):
            worker = Worker(make_llm, config)
        answer_here(worker, *rest)
