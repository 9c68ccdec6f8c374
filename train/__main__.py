"""Train a model by a recipe: `python -m train configs/train/demo.yaml [--resume | --export-only]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from train.config import TrainConfig, load_config


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("config", help="YAML file with the recipe")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.output")
    start.add_argument("--export-only", action="store_true", help="export the newest checkpoint, train nothing")
    parser.add_argument("--steps", type=int, help="another run.max_steps, such as fewer to start the decay now")
    parser.add_argument("--output", help="another run.output")
    parser.add_argument("--export", help="another run.export")
    parser.add_argument("--notes", help="another run.notes, such as hardware and time for the model card")
    return parser.parse_args(arguments)


def override(config: TrainConfig, **values: object) -> TrainConfig:
    """Replace keys of `run` that were given on the command line."""
    given = {key: value for key, value in values.items() if value is not None}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **given))  # type: ignore[arg-type]


def run(config: TrainConfig, options: argparse.Namespace) -> None:
    """Train unless told not to, then export if there is somewhere to export to."""
    from train.release import release  # heavy: torch, transformers
    from train.run import train

    if not options.export_only:
        train(config, resume=options.resume)
    if config.run.export or options.export_only:
        quality = release(config, f"python -m train {options.config}")
        print(json.dumps(dataclasses.asdict(quality)))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config)
        given = {"max_steps": options.steps, "output": options.output, "export": options.export, "notes": options.notes}
        run(override(config, **given), options)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
