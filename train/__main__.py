"""Train a model by a recipe: `python -m train configs/train/demo.yaml [--resume | --export-only | --throughput]`.

A configuration with a section `heads` trains exit heads instead, see `train.heads`. Exit code 2 means that the
configuration or another input is bad, 1 that the run failed on its way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from train import heads
from train.config import TrainConfig, load_config
from train.errors import RunFailed
from train.heads_config import trains_heads


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("config", help="YAML file with the recipe")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.output")
    start.add_argument("--export-only", action="store_true", help="export the newest checkpoint, train nothing")
    start.add_argument("--throughput", action="store_true", help="measure tokens/s with and without early exits, only")
    parser.add_argument("--steps", type=int, help="another run.max_steps, such as fewer to start the decay now")
    parser.add_argument("--output", help="another run.output")
    parser.add_argument("--export", help="another run.export")
    parser.add_argument("--notes", help="another run.notes, such as hardware and time for the model card")
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the exported folder to this model repository")
    return parser.parse_args(arguments)


def override(config: TrainConfig, **values: object) -> TrainConfig:
    """Replace keys of `run` that were given on the command line."""
    given = {key: value for key, value in values.items() if value is not None}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **given))  # type: ignore[arg-type]


def run(config: TrainConfig, options: argparse.Namespace) -> None:
    """Train unless told not to, then export if there is somewhere to export to."""
    from train.release import push_to_hub, release  # heavy: torch, transformers
    from train.run import train

    if options.push_to_hub and not config.run.export:
        raise ValueError("run.export must name the folder that --push-to-hub uploads, got ''")
    if not options.export_only:
        train(config, resume=options.resume)
    if config.run.export or options.export_only:
        quality = release(config, f"python -m train {options.config}")
        if options.push_to_hub:
            print(f"uploaded to {push_to_hub(config.run.export, options.push_to_hub)}", flush=True)
        print(json.dumps(dataclasses.asdict(quality)))


def throughput(config: TrainConfig) -> None:
    """Print a line for people, then the same as one line of JSON."""
    from train.throughput import measure_throughput  # heavy: torch, transformers

    found = measure_throughput(config)
    print(
        f"{found.recipe:,.0f} tokens/s with early exits, {found.plain:,.0f} without: {found.ratio:.2f}x "
        f"({found.low:.2f} to {found.high:.2f} over {found.rounds} rounds)"
    )
    print(json.dumps(dataclasses.asdict(found)))


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if any(trains_heads(each) for each in given if not each.startswith("-")):
        return heads.main(given)
    options = parse_arguments(given)
    try:
        config = load_config(options.config)
        run_keys = {"max_steps": options.steps, "output": options.output}
        config = override(config, **run_keys, export=options.export, notes=options.notes)
        throughput(config) if options.throughput else run(config, options)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    except (RunFailed, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
