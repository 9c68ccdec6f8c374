"""Train a model, or exit heads for one: `python -m train CONFIG [--section.key VALUE ...] [--resume | --export-only]`.

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
from train.configuration import add_flags, build, flags_given, read_values, read_yaml
from train.errors import RunFailed
from train.heads import HeadsRun, train_heads

SHORT = ("run.output", "run.export", "run.notes", "heads.model", "heads.output")  # also --output and so on


def read_arguments(arguments: list[str]) -> tuple[TrainConfig | HeadsRun, argparse.Namespace]:
    """Read the command line and the configuration that it names.

    Raises:
        ValueError: the file cannot be read, or a key has a bad value.
    """
    file = next((each for each in arguments if not each.startswith("-")), None)
    kind = HeadsRun if file is not None and "heads" in read_yaml(file) else TrainConfig
    raw = argparse.RawDescriptionHelpFormatter
    usage = "python -m train CONFIG [--section.key VALUE ...] [--resume | --export-only]"
    parser = argparse.ArgumentParser("train", usage, __doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("config", help="YAML file with the keys below; it comes before all flags")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the output folder")
    if kind is TrainConfig:
        text = "export the newest checkpoint, train nothing"
        start.add_argument("--export-only", action="store_true", help=text)
    add_flags(parser, kind, SHORT)
    options = parser.parse_args(arguments)
    values = read_values(kind, options.config, flags_given(options))
    return (build(HeadsRun, values) if kind is HeadsRun else parse_config(values)), options


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
    try:
        config, options = read_arguments(given)
        if isinstance(config, TrainConfig):
            kept = [each for each in given if each not in ("--resume", "--export-only")]
            run(config, options, shlex.join(["python", "-m", "train", *kept]))
        else:
            train_heads(config)
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
