"""The model, server and client of most tests, one for each module; a module may have its own."""

from __future__ import annotations

import openai
import pytest

from tests.serving.server import PATIENCE, serving, speaker


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
