"""`python -m eval bench` from end to end on a tiny model: tables, one JSON document, one sentence for an error."""

from __future__ import annotations

import json

import pytest

from eval.__main__ import main
from eval.methods import Transformers
from eval.traces import load
from tests.eval.models import save_model

QUESTIONS = ["def f(x):\n", "for name in names:\n    print("]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(folder, tmp_path):
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    config = [
        f"model: {folder}",
        "questions: two.jsonl",
        "max_new_tokens: 12",
        "repeats: 2",
        "draft_lengths: [1, 3]",
        "early_exit_draft_lengths: [0]",
        "lookup_lengths: [3]",
        "batch_repeats: 1",
        "load_repeats: 0",
    ]
    (tmp_path / "bench.yaml").write_text("\n".join(config))
    return ["bench", "--config", str(tmp_path / "bench.yaml")]


def test_a_run_prints_tables_and_then_one_json_document_with_all_methods(arguments, tmp_path, capsys):
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    *tables, last = printed.out.splitlines()
    record = json.loads(last)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == record
    families = {"plain", "fixed", "generate", "early_exit", "prompt_lookup"}
    assert {row["family"] for row in record["comparison"]} == families
    grid = [row["settings"] for row in record["coarse"] if row["family"] == "fixed"]
    assert grid == [{"exit_layer": e, "num_draft_tokens": d} for e in (1, 2) for d in (1, 3)]
    for row in record["coarse"] + record["comparison"] + record["batch"]:
        assert "error" not in row
        assert row["differing_prompts"] == 0
        assert row["method"] in "\n".join(tables) or row["family"] == "fixed"
    figures = {(figure["figure"], figure["of"]): figure for figure in record["figures"]}
    assert {name for name, _ in figures} >= {
        "plain / generate",
        "fixed / plain",
        "fixed / early_exit",
        "fixed: batch / one by one",
        "plain: batch / one by one",
        "(pick + rest) / round",
        "differing prompts",
    }
    assert {"commit", "dirty", "threads", "torch", "dtype", "attention_of_transformers"} <= set(record["environment"])
    assert "full comparison" in printed.err


def test_traces_of_the_reference_can_be_recorded(arguments, tmp_path):
    quick = ["-q", "--exit-layers", "1", "--draft-lengths", "2", "--repeats", "1", "--max-new-tokens", "6"]
    assert main([*arguments, *quick, "--record-traces", str(tmp_path / "traces")]) == 0
    traces = load(tmp_path / "traces" / "two.npz")
    assert [(trace.task, len(trace.tokens)) for trace in traces] == [("two", 6)] * 2
    assert [trace.prompt_length for trace in traces] == [len(text) for text in QUESTIONS]


def test_json_only_prints_one_line_and_no_progress(arguments, capsys):
    quick = ["--exit-layers", "1", "--draft-lengths", "2", "--repeats", "1", "--max-new-tokens", "6"]
    assert main([*arguments, "-q", *quick]) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    assert json.loads(line)["config"]["exit_layers"] == [1]
    assert printed.err == ""


def test_a_method_of_transformers_that_fails_is_an_error_row_and_no_figure(arguments, capsys, monkeypatch):
    call = Transformers.__call__

    def failing(self, prompts, max_new_tokens):
        if self.family == "early_exit":
            raise NotImplementedError("no early exit here")
        return call(self, prompts, max_new_tokens)

    monkeypatch.setattr(Transformers, "__call__", failing)
    assert main([*arguments, "--max-new-tokens", "4", "--exit-layers", "1"]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    (row,) = [row for row in record["coarse"] if row["family"] == "early_exit"]
    assert row["error"] == "NotImplementedError: no early exit here"
    assert not any("early_exit" in figure["figure"] for figure in record["figures"])
    assert any("failed" in line for line in tables)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--exit-layers", "9"], "exit_layers must be in 1..3 for this model, got [9]"),
        (["--max-new-tokens", "1000"], "max_new_tokens must be at most"),
        (["--model", "no/such/model"], "there is no folder no/such/model"),
        (["--questions", "nowhere.jsonl"], "cannot read the questions 'nowhere.jsonl'"),
    ],
)
def test_what_is_not_possible_is_one_sentence_and_exit_code_two(arguments, given, sentence, capsys):
    assert main([*arguments, "-q", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"eval: {sentence}")
    assert len(printed.err.splitlines()) == 1


def test_a_missing_configuration_is_one_sentence(capsys):
    assert main(["bench", "--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.startswith("eval: cannot read the configuration 'nowhere.yaml'")
