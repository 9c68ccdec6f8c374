"""`python -m eval tune`: heads are tuned once for a model and workload, measured cell by cell, and a run goes on."""

from __future__ import annotations

import argparse
import json
import logging.handlers
import shutil
import subprocess

import pytest

from eval.__main__ import main
from eval.config import FOLDER, config_of
from eval.records import read_lines
from eval.tune import TuneConfig, ratio_of
from eval.workloads import HELD_OUT, INSTRUCTIONS, make
from selfspec.learning.card import PLAIN, WITH, WITHOUT
from selfspec.model.exit_heads import FILE


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    """The three data sets in small."""
    for name in ("gsm8k", "humaneval", "spec_bench"):
        (tmp_path / name).mkdir()
    passages = [[f"{word} {n} {at} ".ljust(220, "x") for at in range(3)] for n, word in enumerate(["Text"] * 40)]
    passages[-1][0] = passages[0][0]  # one text in two questions
    rag = [{"category": "rag", "turns": ["\n".join([*texts, "Who?"])]} for texts in passages]
    files = {
        "gsm8k/test.jsonl": [{"question": f"What is {n} + 1?"} for n in range(9)],
        "humaneval/HumanEval.jsonl": [{"prompt": f"def f{n}(x):\n"} for n in range(9)],
        "spec_bench/question.jsonl": [*rag, {"category": "math", "turns": ["1 + 1?"]}],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_workloads_are_made_of_the_data(data, monkeypatch):
    library = data / "library"
    library.mkdir()
    for module in (argparse, logging.handlers, subprocess):
        shutil.copy(module.__file__, library)
    monkeypatch.setattr("eval.workloads.sysconfig.get_paths", lambda: {"stdlib": library})
    questions, functions, extraction = (make(name, data) for name in ("gsm8k", "functions", "extraction"))
    assert questions.prompts[0] == "What is 0 + 1?" and questions.held_out is None
    assert functions.prompts[0] == {"prompt": "def f0(x):\n"} and len(functions.prompts) > 50
    assert all(one["prompt"].lstrip().startswith("def ") for one in functions.prompts)
    assert functions == make("functions", data)
    asked, held_out = extraction
    assert len(held_out) == HELD_OUT and all(text.endswith(INSTRUCTIONS) for text in [*asked, *held_out])
    texts = [{text.partition("\n\n")[0] for text in part} for part in (asked, held_out)]
    assert len(asked) == len(INSTRUCTIONS) * len(texts[0]) and not texts[0] & texts[1]
    (data / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="the workload gsm8k cannot be made from"):
        make("gsm8k", data)


def test_a_run_tunes_and_measures_and_goes_on(tmp_path, capsys, monkeypatch):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "run"
    prompts.write_text("\n\n".join(f"def add_{word}(items):" for word in ("a", "b", "c", "d", "e", "f", "g", "h")))
    given = ["tune", "--models", "demo", "--workloads", f"code={prompts}", "--threads", "1", "--minutes", "0.01"]
    given += ["--tokens", "8", "--seconds", "0.01", "--output", str(out), "--temperatures"]
    assert main([*given, "0"]) == 0
    shown = capsys.readouterr()
    assert "| demo " in shown.out and "demo, code: 6 prompts, 2 held out" in shown.err
    assert (out / "tune.md").read_text("utf-8") == shown.out and (out / "heads" / "demo-code" / FILE).is_file()
    monkeypatch.setattr("selfspec.LLM.tune", None)  # heads are there
    assert main([*given, "0", "0.7"]) == 0
    cells = read_lines(out / "cells.jsonl")
    assert [line["temperature"] for line in cells] == [0, 0.7] and len(read_lines(out / "tuned.jsonl")) == 1
    for line in cells:
        assert set(line["seconds"]) == {PLAIN, WITHOUT, WITH} and line["num_different"] == 0
        assert line["tokens"][PLAIN] == line["tokens"][WITH]


def test_ratios_are_geometric_means_over_prompts():
    line = {"seconds": {PLAIN: [2.0, 8.0], WITH: [1.0, 2.0]}, "tokens": {PLAIN: [10, 20], WITH: [10, 20]}}
    mean, low, high = ratio_of(line, WITH, PLAIN)
    assert mean == pytest.approx(8**0.5) and low < 2 and high > 4


def test_bad_input_is_one_sentence(tmp_path, capsys):
    assert config_of(TuneConfig, FOLDER / "tune.yaml").models == ("smollm2",)
    assert main(["tune", "--workloads", "gsm9k", "--output", str(tmp_path)]) == 2
    assert "did you mean 'gsm8k'?" in capsys.readouterr().err
    assert main(["tune", "--models", "demo", "--workloads", f"a={tmp_path / 'none'}", "--output", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
