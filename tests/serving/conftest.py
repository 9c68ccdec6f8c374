"""The model, server and client of most tests, one for each module; a module may have its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from tests.serving.server import PATIENCE, serving, speaker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm():
    return speaker()


@pytest.fixture(scope="module")
def served(llm):
    with serving(llm, max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def local_ray():
    """Ray on this machine, for processes that find this repository."""
    if find_spec("ray") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Ray: pip install 'selfspec[ray]'")
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    told = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        yield
