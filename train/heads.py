"""Train exit heads for a model: `python -m train configs/train/exit_heads.yaml [--resume]`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from train.errors import RunFailed
from train.heads_config import HeadsRun, load_heads_config


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("config", help="YAML file with a section heads")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in heads.output")
    parser.add_argument("--model", help="another heads.model")
    parser.add_argument("--output", help="another heads.output")
    parser.add_argument("--steps", type=int, help="another training.steps")
    return parser.parse_args(arguments)


def override(config: HeadsRun, options: argparse.Namespace) -> HeadsRun:
    """Replace keys that were given on the command line."""
    heads: dict[str, Any] = {"model": options.model, "output": options.output}
    training: dict[str, Any] = {"steps": options.steps}
    return dataclasses.replace(
        config,
        heads=dataclasses.replace(config.heads, **{k: v for k, v in heads.items() if v is not None}),
        training=dataclasses.replace(config.training, **{k: v for k, v in training.items() if v is not None}),
    )


def main(arguments: list[str] | None = None) -> int:
    """Train; returns 0, 1 where a run that began well had to stop, 2 for bad input, 130 when interrupted."""
    options = parse_arguments(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        config = override(load_heads_config(options.config), options)
        from selfspec.errors import UnsupportedModelError
        from train.heads_run import train_heads  # heavy: torch, transformers
    except ValueError as error:
        return _say(error, 2)
    try:
        train_heads(config, " ".join(["python -m train", *given]), options.resume)
    except RunFailed as error:
        return _say(error, 1)
    except (ValueError, OSError, UnsupportedModelError) as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _say("interrupted; --resume goes on from the last checkpoint, if there is one", 130)
    return 0


def _say(error: object, code: int) -> int:
    print(f"train: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
