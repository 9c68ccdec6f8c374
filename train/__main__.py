"""Train a model, or exit heads for one: `python -m train CONFIG [section.key=value ...] [--resume | --export-only]`.

A configuration with a section `heads` trains exit heads (configs/train/exit_heads.yaml), any other one a model.
Exit code 2: the configuration or another input is bad; 1: the run failed after it had started; 130: interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path

from train.config import TrainConfig, parse_config
from train.config_file import read_file
from train.errors import RunFailed
from train.heads_config import HeadsRun, parse_heads

MODEL_OPTIONS = {"steps": "run.max_steps", "output": "run.output", "export": "run.export", "notes": "run.notes"}
HEADS_OPTIONS = {"steps": "training.steps", "output": "heads.output", "model": "heads.model"}
"""Options that stand for a key: of a run that trains a model, and of one that trains exit heads."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="another value of a key")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the output folder")
    start.add_argument("--export-only", action="store_true", help="export the newest checkpoint, train nothing")
    parser.add_argument("--steps", type=int, help="run.max_steps or training.steps")
    parser.add_argument("--output", help="run.output or heads.output")
    parser.add_argument("--model", help="heads.model")
    parser.add_argument("--export", help="run.export")
    parser.add_argument("--notes", help="run.notes, such as hardware and time for the model card")
    return parser.parse_intermixed_args(arguments)


def read_config(options: argparse.Namespace) -> TrainConfig | HeadsRun:
    """Read the configuration, with everything that the command line changes in it.

    Raises:
        ValueError: the file cannot be read, a key has a bad value, or an option is of the other kind of run.
    """
    content = read_file(options.config, options.overrides)
    heads = "heads" in content
    keys, others = (HEADS_OPTIONS, MODEL_OPTIONS) if heads else (MODEL_OPTIONS, HEADS_OPTIONS)
    given = {name: value for name, value in vars(options).items() if name in keys | others and value is not None}
    for name in [*given, *(["export-only"] if heads and options.export_only else [])]:
        if name not in keys:
            where = f"configurations {'with' if heads else 'without'} a section heads"
            raise ValueError(f"--{name} is no option for {where}; leave it out")
        section, key = keys[name].split(".")
        content[section] = {**(content.get(section) or {}), key: given[name]}
    try:
        return parse_heads(content) if heads else parse_config(content)
    except ValueError as error:
        raise ValueError(f"{options.config}: {error}") from error


def run(config: TrainConfig, options: argparse.Namespace, command: str) -> None:
    """Train a model unless only an export is wanted, then export it where `run.export` names a folder.

    Args:
        command: how to repeat the run, for the model card.
    """
    from train.release import release  # heavy: torch, transformers
    from train.run import train

    config = with_unpacked_base(config)
    if not options.export_only:
        train(config, resume=options.resume)
    if config.run.export or options.export_only:
        print(json.dumps(dataclasses.asdict(release(config, command))))


def with_unpacked_base(config: TrainConfig) -> TrainConfig:
    """The same run from a folder in `run.output`, where `model.base` names an archive of `python -m train.handover`."""
    from train.handover import SUFFIX, unpack

    base = Path(config.model.base)
    if not base.name.endswith(SUFFIX):
        return config
    output = Path(config.run.output)
    output.mkdir(parents=True, exist_ok=True)
    folder = unpack(base, output / base.name.removesuffix(SUFFIX))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, base=str(folder)))


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    try:
        config = read_config(options)
        if isinstance(config, TrainConfig):
            kept = [each for each in given if each not in ("--resume", "--export-only")]
            run(config, options, shlex.join(["python", "-m", "train", *kept]))
        else:
            from train.heads_run import train_heads  # heavy: torch, transformers

            train_heads(config, " ".join(["python -m train", *given]), options.resume)
    except ValueError as error:
        return _fail(error, 2)
    except (RunFailed, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; --resume continues from the last checkpoint, if there is one", 130)
    return 0


def _fail(error: object, code: int) -> int:
    print(f"train: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
