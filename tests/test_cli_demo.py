"""The embedded model, as the README shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import cli_fixtures
from tests.target import load

run = cli_fixtures.run
PROMPT = Path(__file__).parents[1] / "configs" / "generate" / "demo_prompt.txt"


@pytest.fixture(scope="module")
def demo():
    return load("demo")


def test_the_demo_knows_its_own_exit_and_has_room(demo):
    assert 1 <= demo.default_exit_layer < demo.stack.num_layers
    assert demo.default_num_draft_tokens >= 1
    assert demo.tokenizer is not None


def test_the_demo_s_text_is_that_of_plain_decoding(demo):
    prompt = PROMPT.read_text(encoding="utf-8").rstrip("\n")
    [drafted] = demo.generate(prompt, max_new_tokens=64, policy="fixed")
    [planned] = demo.generate(prompt, max_new_tokens=64)
    [plain] = demo.generate(prompt, max_new_tokens=64, policy="plain")
    assert drafted.tokens == planned.tokens == plain.tokens
    assert drafted.stats.mean_acceptance_length > 1.5


def test_the_demo_command_ends_with_its_line(run):
    prompt = PROMPT.read_text(encoding="utf-8").rstrip("\n")
    done = run("generate", "--model", "demo", "--show-drafts", "--compare", "--max-tokens", 24, prompt)
    assert done.code == 0
    assert all(words in done.err for words in ("tokens/s", "acceptance length", "x plain decoding", "same 24 tokens"))


def test_the_demo_is_the_default_and_can_be_inspected(run):
    report = json.loads(run("inspect", "demo", "--json").out)
    assert report["self_check"] and report["exit_layer"] >= 1
    assert run("generate", "def", "--max-tokens", 4) == run("generate", "def", "-m", "demo", "--max-tokens", 4)
