"""One profile for every property: the same examples on every machine, no time limit."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.cli_fixtures", "tests.compiling", "tests.kernels.as_on_devices"]
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
if not torch.cuda.is_available():  # kernels then run in Triton's interpreter; it must know before they are imported
    os.environ["TRITON_INTERPRET"] = "1"
gc.disable()  # until all is imported
torch.set_num_threads(1)  # rounding, and so every pinned choice, is that of one thread


def pytest_collection_modifyitems(items):
    """Tests that were asked for and need a device that is not here are skipped, and say so."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """What the imports have made stays to the end: later collections, which many measurements ask for, leave it out."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def unfrozen():
    """Commands freeze what there is for the rest of their process, which is not this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.cli.session.freeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def measured_once():
    """Targets measure what rounds cost at few points, each once: no test asks how well. Measuring has its own tests."""
    from selfspec.calibrate import profile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "measure", partial(profile.measure, repeats=1, within=0.0))
        yield


STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"


@pytest.fixture(scope="session")
def stories_folder():
    """A small trained Llama, 5 layers; it lies beside the repository, and the continuous integration always has it."""
    if not STORIES.is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no trained checkpoint at {STORIES}")
    return STORIES


@pytest.fixture(scope="session")
def stories(stories_folder):
    """The trained checkpoint as a target, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.target import Target

    model = AutoModelForCausalLM.from_pretrained(stories_folder, dtype=torch.float32)
    return Target(model, AutoTokenizer.from_pretrained(stories_folder))
