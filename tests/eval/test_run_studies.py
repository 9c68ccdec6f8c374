"""Studies of a run on a tiny model: their figures, and when they are made again."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import yaml

from eval import figures, studies
from eval.__main__ import main
from eval.config import STUDIES
from eval.models import decode, open_llm
from selfspec.control.registry import POLICIES
from tests.eval.models import save_model

QUESTIONS = [
    {"question_id": 1, "category": "a", "turns": ["def f(x):\n"]},
    {"question_id": 2, "category": "a", "turns": ["import os"]},
    {"question_id": 3, "category": "b", "turns": ["for name in names:\n    print("]},
    {"question_id": 4, "category": "b", "turns": ["x" * 3000]},  # longer than the context
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs of only `plain`, which are fast, with the given studies."""
    monkeypatch.setattr(figures, "speedup_by_category", lambda summary: None)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(studies, "BATCH_SIZES", (1, 2))
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    keys = {"questions": "own.jsonl", "max_new_tokens": 12, "resamples": 5, "warmups": 0, "methods": ["plain"]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"model": str(model), "study_tokens": 6, **keys}))
    return lambda *options: main(["run", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "out"), *options])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def study(out, name):
    return json.loads((out / "studies" / f"{name}.json").read_text())


def test_a_run_makes_and_reports_all_studies(run, out, capsys):
    assert run("--studies", *STUDIES, "--study-questions", "2") == 0
    text = capsys.readouterr().out
    for title in ("Acceptance", "Exit layer and draft length", "Batches", "Policies"):
        assert f"## {title}" in text
    for name in STUDIES:
        found = study(out, name)
        assert (found["num_questions"], found["study_tokens"]) == (2, 6) and "error" not in found
    grid = study(out, "grid")
    assert grid["exit_layers"] == [1, 2] and grid["draft_lengths"] == [1, 2, 3, 4, 6, 8]
    assert [len(row) for row in grid["tokens_per_second"]] == [6, 6] and grid["best"]["exit_layer"] in (1, 2)
    batch = study(out, "batch")
    assert batch["batch_sizes"] == [1, 2] and batch["methods"][0]["method"] == "adaptive"
    spread = batch["methods"][0]["speedup"][1]
    assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    rows = {row["name"]: row for row in study(out, "policies")["rows"]}
    assert set(POLICIES) <= set(rows) and rows["plain"]["speedup"] == pytest.approx(1)
    assert all(rows["clairvoyant"]["speedup"] >= row["speedup"] - 1e-9 for row in rows.values())


def test_acceptance_is_the_share_of_output_tokens_that_a_layer_picks(run, out, model):
    """Compare with picks computed from transformers' hidden states."""
    assert run("--studies", "acceptance", "--study-questions", "1") == 0
    import torch

    llm = open_llm(str(model))
    target = llm.target
    ids = [int(i) for i in llm.tokenizer(QUESTIONS[0]["turns"][0])["input_ids"]]
    (done,) = decode(llm, [ids], 12)
    tokens = torch.tensor([[*ids, *done.token_ids]])
    states = target.split.model(tokens, output_hidden_states=True).hidden_states
    found = study(out, "acceptance")
    assert found["num_tokens"] == 12
    for layer, each in enumerate(found["exits"], 1):
        picks = target.split.model.lm_head(target.split.model.model.norm(states[layer]))[0].argmax(-1)
        right = [int(picks[i - 1]) == int(tokens[0, i]) for i in range(len(ids), len(ids) + 12)]
        assert each["joint"][0] == pytest.approx(sum(right) / 12)
        pairs = [a and b for a, b in pairwise(right)]
        assert each["joint"][1] == pytest.approx(sum(pairs) / 11)


def test_a_study_is_made_once_and_again_when_its_sizes_change(run, out):
    assert run("--studies", "acceptance") == 0
    path = out / "studies" / "acceptance.json"
    written = path.stat().st_mtime_ns
    assert run("--studies", "acceptance", "grid") == 0  # a finished run may be given more
    assert path.stat().st_mtime_ns == written and study(out, "grid")["study"] == "grid"
    assert run("--studies", "acceptance", "--study-questions", "1") == 0
    assert study(out, "acceptance")["num_questions"] == 1


def test_a_failed_study_has_its_reason_and_the_others_continue(run, out, monkeypatch, capsys):
    def fail(material):
        raise RuntimeError("no\nmemory")

    monkeypatch.setitem(studies.MAKE, "grid", fail)
    assert run("--studies", "grid", "acceptance") == 0
    assert study(out, "grid")["error"] == "RuntimeError: no memory" and study(out, "acceptance")["exits"]
    assert "The study grid failed: RuntimeError: no memory" in capsys.readouterr().out
