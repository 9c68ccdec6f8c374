"""The report as Markdown and HTML, its figure, and folders of an earlier version."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import pytest
import yaml

from eval.__main__ import main
from eval.answers import Turn, choice_of
from eval.figures import table
from eval.report import opening_of, publish, render, sections, shown
from eval.summary import summarise

METHODS = {"plain": 0.1, "fixed:2,3": 0.06, "adaptive": 0.04}


def answer(question, seconds, category):
    steps = [seconds] * 4
    turn = Turn([1, 2, 3, 4], 4 * seconds, accept_lengths=[1] * 4, step_seconds=steps, stage_seconds={"draft": 1.0})
    choice = choice_of([turn], ["text"], [5])
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


class Page(HTMLParser):
    """Collects open tags, text, and URLs that would be loaded."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.loads, self.images = [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [v for k, v in attributes if k in ("src", "href", "action") and not (v or "").startswith("data:")]
        self.images += [v for k, v in attributes if k == "src"]
        if tag not in ("meta", "img", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_markdown_and_html_have_the_same_content(tmp_path):
    text = publish(tmp_path, made(check=[checked("fixed:2,3"), checked("adaptive")]))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["## Outputs", "## Overall", "## Speedup by category"]
    assert "Every output compared is plain decoding's, token for token (questions: `fixed:2,3` 4, `adaptive` 4)" in text
    assert "Speedups are over `plain`, the fastest plain decoding" in text and "2.5" in text
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert page.open == [] and page.loads == []
    for cell in ("adaptive", "qa", "speedup", "2.5 (2.5..2.5)", "100%"):
        assert cell in text and cell in page.text
    assert json.loads((tmp_path / "summary.json").read_text())["baseline"] == "plain"
    svg = (tmp_path / "figures" / "speedup_by_category.svg").read_bytes()
    assert page.images == [f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"]


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
    assert not found["complete"] and "Partial: up to 2 of 2" in opening_of(found)[0]
    assert "## Overall" in render("md", list(sections(found, None)), "", [])


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
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page and "<title>Run report: &lt;b&gt;" in page
    assert Page(page).open == []


def test_numbers_in_tables_are_aligned_to_the_right():
    found = table(["name", "a", "b"], [["x", "1.5 (1..2)", "word"], ["long name", "", "2|3"]])
    assert found.splitlines() == [
        "| name      |          a | b    |",
        "| --------- | ---------: | ---- |",
        "| x         | 1.5 (1..2) | word |",
        "| long name |            | 2\\|3 |",
    ]


@pytest.fixture
def old(tmp_path):
    """A run folder of version 0.1."""
    folder = tmp_path / "old"
    (folder / "answers").mkdir(parents=True)
    (folder / "studies").mkdir()
    config = {
        "methods": list(METHODS),
        "model": "demo",
        "cost_repeats": 15,
        "questions_sha256": "x",
        "baseline": "auto",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {**made(check=[checked("adaptive")]), "harness_share_inside": 0.1}
    del summary["skipped"]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "environment.json").write_text(json.dumps({"model": "demo", "cpu": "one"}))
    for method, rows in answers().items():
        name = method.replace(":", "-")
        (folder / "answers" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    spread = {"median": 1.5, "low": 1.25, "high": 1.75}
    grid = {"exit_layers": [2], "draft_lengths": [1, 2], "plain_tokens_per_second": 10.0}
    studies = {
        "acceptance": {"num_layers": 3, "exits": [{"exit_layer": 1, "joint": [0.5, None], "conditional": [0.5, None]}]},
        "grid": {**grid, "tokens_per_second": [[12.0, 15.0]], "predicted_speedup": [[1.1, 1.2]]},
        "batch": {"batch_sizes": [4], "methods": [{"method": "adaptive", "speedup": [spread], "settings": None}]},
        "policies": {"rows": [{"name": "fs", "kind": "policy", "speedup": 1.25, "tasks": {}}], "num_questions": 6},
    }
    for name, study in studies.items():
        (folder / "studies" / f"{name}.json").write_text(json.dumps({"study": name, **study}))
    return folder


def test_a_folder_of_the_first_release_is_reported(old, capsys):
    assert main(["report", str(old)]) == 0
    text = capsys.readouterr().out
    assert text == (old / "report.md").read_text("utf-8") and "token for token" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for row in (["1", "0.50", ""], ["2", "1.20", "1.50"], ["`adaptive`", "1.50 (1.25..1.75)"]):
        assert row in rows
    assert ["`fs`", "policy", "1.25"] in rows
    assert main(["report", str(old), "--baseline", "fixed:2,3"]) == 0
    assert "Speedups are over `fixed:2,3`." in capsys.readouterr().out


def test_an_unknown_command_is_one_sentence(capsys):
    assert main(["bench"]) == 2 and "command 'bench' is unknown; known: run" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "compare" in capsys.readouterr().out
