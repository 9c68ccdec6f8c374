"""The report as Markdown, and its figure."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from eval.__main__ import main
from eval.answers import Turn, choice_of
from eval.figures import table
from eval.report import publish, render, shown
from eval.summary import summarise

METHODS = {"plain": 0.1, "fixed:2,3": 0.06, "adaptive": 0.04}


def answer(question, seconds, category):
    steps = [seconds] * 4
    turn = Turn([1, 2, 3, 4], 4 * seconds, accept_lengths=[1] * 4, step_seconds=steps, stage_seconds={"draft": 1.0})
    choice = choice_of([turn], ["text"])
    return json.loads(json.dumps({"question_id": question, "category": category, "choices": [choice]}))


def answers(categories=("qa", "math")):
    return {
        method: {i: answer(i, seconds * (1 + i / 10), categories[i % 2]) for i in range(4)}
        for method, seconds in METHODS.items()
    }


def made(rows=None, check=(), **more):
    found = summarise(rows or answers(), [], "plain", num_questions=4, resamples=20)
    return {**found, "check": list(check), "is_auto": True, "metrics": [], "environment": {}, "skipped": {}, **more}


def checked(method, num_different=0, **more):
    at = {"question_id": 1, "turn": 0, "position": 2, "token": 1, "reference": 2, "gap": 0.5, "is_tie": False}
    own = {"num_compared": 4, "num_different": num_different, "num_ties": 0, "differences": [at] * num_different}
    return {"method": method, **own, **more}


def test_the_report_has_the_figures_and_names_the_plot(tmp_path):
    text = publish(tmp_path, made(check=[checked("fixed:2,3"), checked("adaptive")]))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["## Outputs", "## Overall", "## Speedup by category"]
    assert "Every output compared is plain decoding's, token for token (questions: `fixed:2,3` 4, `adaptive` 4)" in text
    assert "Speedups are over `plain`, the fastest plain decoding" in text and "2.5" in text
    for cell in ("`adaptive`", "qa", "2.5 (2.5..2.5)", "100%", "figures/speedup_by_category.svg"):
        assert cell in text
    assert json.loads((tmp_path / "summary.json").read_text())["baseline"] == "plain"
    assert text == (tmp_path / "report.md").read_text("utf-8")
    file = tmp_path / "figures" / "speedup_by_category.svg"
    svg = file.read_bytes()
    words = {e.text.strip() for e in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text") if e.text}
    assert {"qa", "math", "overall", "adaptive", "plain = 1"} <= words and len(svg) < 60_000
    publish(tmp_path, made(check=[checked("fixed:2,3"), checked("adaptive")]))
    assert file.read_bytes() == svg


def test_different_outputs_are_reported_and_other_arithmetic_is_no_error(tmp_path):
    llama = checked("llama.cpp", 3, is_other_arithmetic=True)
    text = publish(tmp_path, made(check=[checked("adaptive"), llama]))
    assert "Every output compared is plain decoding's" in text
    assert "`llama.cpp` computes with other arithmetic, so its tokens may differ: they do in 3 of 4 questions" in text
    text = publish(tmp_path, made(check=[checked("adaptive", 1)]))
    assert "**Outputs differ from plain decoding's.**" in text and "question 1, turn 1, token 3, logit gap 0.5" in text
    assert "Not compared" in publish(tmp_path, {**made(), "check": None})


def test_missing_failed_and_skipped_answers_are_reported(tmp_path):
    few = {method: {i: row for i, row in rows.items() if i < 3} for method, rows in answers().items()}
    errors = [{"kind": "timeout", "method": "adaptive", "question_id": 3, "seconds": 1.0}]
    found = summarise(few, errors, None, num_questions=4, resamples=5)
    text = publish(tmp_path, {**made(), **found, "skipped": {"llama.cpp": "llama.cpp needs a file"}})
    for words in ("**Partial: up to 1 of 4", "No baseline", "Skipped: llama.cpp needs a file.", "| timeout |"):
        assert words in text
    found = summarise({"plain": {}, "adaptive": {}}, [], None, num_questions=2, resamples=5)
    assert not found["complete"]
    text = render({**made(), **found})
    assert "Partial: up to 2 of 2" in text and "## Overall" in text


def test_chosen_columns_and_how_figures_are_shown(tmp_path):
    text = publish(tmp_path, made(metrics=["stage_shares", "num_tokens"]))
    head = next(line for line in text.splitlines() if line.startswith("| method"))
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["method", "stage shares", "num tokens"]
    assert shown("time_to_first_token_p50", 0.01234) == "12.3 ms" and shown("speedup", 1234.5) == "1234"
    assert shown("acceptance_by_position", [{"joint": 0.5, "conditional": 1}]) == "0.50/1.00"
    assert shown("stage_shares", {"draft": 0.5}) == "draft 50%" and shown("speedup", None) == ""
    assert shown("speedup", {"value": 1.5, "low": 1.25, "high": 2}) == "1.5 (1.25..2)"


def test_data_are_escaped(tmp_path):
    rows = answers(("<script>alert(1)</script>", "a|b\n`c`"))
    text = publish(tmp_path, made(rows, environment={"model": "<b>\ud800</b>"}))
    assert "\\<script>" in text and "a\\|b `c`" in text and "\\<b>?\\</b>" in text


def test_numbers_in_tables_are_aligned_to_the_right():
    found = table(["name", "a", "b"], [["x", "1.5 (1..2)", "word"], ["long name", "", "2|3"]])
    assert found.splitlines() == [
        "| name      |          a | b    |",
        "| --------- | ---------: | ---- |",
        "| x         | 1.5 (1..2) | word |",
        "| long name |            | 2\\|3 |",
    ]


def test_an_unknown_command_is_one_sentence(capsys):
    assert main(["bench"]) == 2 and "command 'bench' is unknown; known: run" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "replay" in capsys.readouterr().out
