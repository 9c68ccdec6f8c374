"""Checkpoints. They are written into a temporary folder and then renamed, so that they are whole or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from train.config import MAY_DIFFER, TrainConfig
from train.configuration import as_plain, differences
from train.errors import RunFailed

KEPT = 3
SETTINGS = "train_config.json"
UNFINISHED = "unfinished"


def newest_checkpoint(output: str | Path) -> Path:
    """Return the newest whole checkpoint below a run's output folder.

    Raises:
        ValueError: there is none.
    """
    found = find_newest(output)
    if found is None:
        raise ValueError(f"run.output {str(output)!r} holds no checkpoint; train first")
    return found


def find_newest(output: str | Path) -> Path | None:
    """Return the newest whole checkpoint below a run's output folder, None where there is none."""
    return next(iter(whole_checkpoints(output)[::-1]), None)


def whole_checkpoints(output: str | Path) -> list[Path]:
    """Return all whole checkpoints below a run's output folder, the newest last."""
    found = [
        path
        for path in Path(output).glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdigit() and (path / "trainer_state.json").is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def checkpoint_to_resume(config: TrainConfig) -> Path:
    """Return the newest checkpoint of a run, after checking that its configuration is the present one.

    Raises:
        ValueError: there is no checkpoint, or keys differ that affect training steps.
    """
    checkpoint = newest_checkpoint(config.run.output)
    settings = checkpoint / SETTINGS
    if settings.is_file():
        different = differences(json.loads(settings.read_text("utf-8")), config, MAY_DIFFER)
        if different:
            raise ValueError(
                f"{checkpoint} was made with another configuration, which differs in {', '.join(different)}; "
                "restore them, or train into another run.output"
            )
    return checkpoint


@contextmanager
def checkpoint_folder(config: TrainConfig, step: int) -> Iterator[Path]:
    """Provide a temporary folder for `checkpoint-STEP`, which is moved to `run.output` after the block.

    Raises:
        RunFailed: writing failed, for example on a full disk; earlier checkpoints are unchanged.
    """
    output = Path(config.run.output)
    unfinished, name = output / UNFINISHED, f"checkpoint-{step}"
    shutil.rmtree(unfinished, ignore_errors=True)  # what a run that was killed while saving left behind
    try:
        yield unfinished
        (unfinished / name / SETTINGS).write_text(json.dumps(as_plain(config), indent=2) + "\n", "utf-8")
        shutil.rmtree(output / name, ignore_errors=True)
        (unfinished / name).rename(output / name)
        for old in whole_checkpoints(output)[:-KEPT]:
            shutil.rmtree(old)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise RunFailed(
            f"the checkpoint of step {step} could not be written to {str(output)!r}, perhaps for lack of space "
            f"({error}); {describe_remaining(output)}"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def describe_remaining(output: str | Path) -> str:
    """The clause of an error message that says how to continue."""
    found = find_newest(output)
    return f"{found.name} is whole, continue from it with --resume" if found else "there is no earlier checkpoint"


def check_finite(model: nn.Module, step: int, output: str | Path) -> None:
    """Raise RunFailed where a trained weight is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            raise RunFailed(
                f"weight {name} is not finite after step {step}, which is not saved; {describe_remaining(output)}, "
                "with a lower learning rate"
            )
