"""`selfspec calibrate`: tables for people, one document for programs, a profile for later runs."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from selfspec import LLM
from selfspec.calibrate import measure as measure_module
from selfspec.calibrate import profile
from selfspec.cli import calibrate as command
from selfspec.cli import status
from selfspec.cli.status import StatusConsole
from selfspec.control.costs import Costs
from selfspec.progress import report, tell
from tests.cli_fixtures import Terminal, assert_refused, save_model


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few repeats, and a cache of the test's own."""
    monkeypatch.setattr(command, "REPEATS", 1)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calibrate(run, model_folder):
    return lambda *arguments: run("calibrate", model_folder, *arguments)


# ------------------------------------------------------------------------------------------------------------ output


def told(err):
    """What is written to standard error besides that a measurement will take long, which depends on the machine."""
    return [line for line in err.splitlines() if "measuring what decoding costs" not in line]


def test_people_get_tables_and_later_runs_a_profile(calibrate, model_folder):
    done = calibrate()
    assert done.code == 0
    words = [
        "LlamaForCausalLM",
        "4 layers",
        "float32",
        "Milliseconds",
        "plain",
        "draft step: 2 layers",
        "head and pick",
    ]
    words += ["verification: all layers, 8 tokens per row", "keys and values: 128 more tokens of each row"]
    assert all(word in done.out for word in words)
    assert "Speedup" not in done.out
    assert told(done.err) == []
    split = LLM(model_folder).target.split
    costs = profile.read_costs(split)
    assert sorted(costs.rounds) == [1, 2, 4, 8]
    path = profile.path_of("costs", profile.costs_key(split))
    assert done.out.endswith(f"\nsaved in {path}\n") and path.is_file()
    assert f"{costs.plain_round(8) * 1e3:.3f}" in done.out


def test_the_plan_has_a_line_for_every_batch_size_and_exit(calibrate):
    done = calibrate("--plan", "--batch-sizes", "1,3")
    head, _, table = done.out.partition("Speedup over plain decoding")
    assert head and all(f"{rate}%" in table for rate in (50, 60, 70, 80, 90))
    lines = [line.split() for line in table.splitlines()[2:] if line.strip() and "saved" not in line]
    assert [line[0] for line in lines] == ["1", "2", "3", "2"]  # rows are not repeated: exits 1 and 2, twice
    assert all("plain" in line or "@" in " ".join(line) for line in lines)


def test_json_is_one_document(calibrate, model_folder):
    done = calibrate("--json", "--quiet", "--batch-sizes", "2", "--batch-sizes", "4, 3")
    document = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    costs = Costs.from_dict(document["costs"])
    assert sorted(costs.rounds) == [1, 2, 3, 4] and "plan" not in document
    assert costs == profile.read_costs(LLM(model_folder).target.split)
    assert document["model"] == str(model_folder) and document["key"]["num_layers"] == 4
    assert json.loads(Path(document["file"]).read_text("utf-8"))["key"] == document["key"]


def test_json_holds_the_plan_when_asked(calibrate):
    plan = json.loads(calibrate("--json", "--plan", "--batch-sizes", "2").out)["plan"]
    assert len(plan["assumed"]) == 2 * 2 * 5 and plan["seen"] == []
    assert {choice["batch_size"] for choice in plan["assumed"]} == {1, 2}
    for choice in plan["assumed"]:
        assert choice["speedup"] >= 1 and (choice["num_speculative_tokens"] > 0) == (choice["speedup"] > 1)


def test_a_saved_prior_says_more(calibrate, model_folder):
    profile.save_prior(LLM(model_folder).target.split, {"hits": [[30], [19], [1]], "misses": [[10], [1], [1]]})
    seen = json.loads(calibrate("--json", "--plan", "--batch-sizes", "1").out)["plan"]["seen"]
    assert [(choice["batch_size"], choice["exit_layer"] in (1, 2)) for choice in seen] == [(1, True)]
    assert seen[0]["acceptance"] == (0.75 if seen[0]["exit_layer"] == 1 else 0.95)
    assert "drafts of this very model" in calibrate("--plan").out


def test_a_long_wait_is_shown_and_on_a_terminal_taken_back(calibrate, monkeypatch):
    monkeypatch.setattr(status, "BETWEEN_LINES", -1.0)
    assert re.search(
        r"^measuring .*: repeat 1 of at most 1.* \.\.\.$", calibrate("--batch-sizes", "1").err, re.MULTILINE
    )
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert calibrate("--batch-sizes", "1").code == 0
    written = screen.getvalue()
    assert ": repeat 1 of at most 1" in written
    assert written.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the line is taken back"


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("sizes", ["0", "-1", "1,x", "1.5", "", "1,,2", "1025", "9" * 5000, "²"])
def test_batch_sizes_are_checked_before_a_model_is_looked_for(run, sizes):
    done = run("calibrate", "/no/such/folder", f"--batch-sizes={sizes}")
    assert_refused(done, 2, "--batch-sizes", "1..1024", "1,2,4,8")


def test_other_bad_input_is_one_sentence(run, model_folder, tmp_path):
    assert_refused(run("calibrate"), 2, "MODEL", "selfspec calibrate --help")
    assert_refused(run("calibrate", "/no/such/folder"), 1, "/no/such/folder", "'demo'")
    assert_refused(run("calibrate", model_folder, "--device", "toaster"), 2, "--device", "toaster")
    assert_refused(run("calibrate", model_folder, "--dtype", "int8"), 2, "--dtype", "int8")
    assert_refused(run("calibrate", model_folder, "--adapter", tmp_path / "none"), 1, "adapter")
    assert_refused(run("calibrate", save_model(tmp_path, num_hidden_layers=1)), 1, "at least 2 layers, got 1")


def test_too_many_rows_for_the_device_are_one_sentence(run, model_folder, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure_module, "measure", full)
    assert_refused(run("calibrate", model_folder, "--quiet"), 1, "out of memory", "8 rows", "--batch-sizes")


def test_where_nothing_can_be_saved_the_tables_still_come(calibrate, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    done = calibrate("--batch-sizes", "1")
    assert done.code == 0 and "plain" in done.out and "saved" not in done.out
    notice = done.err.splitlines()
    assert len(notice) == 1 and notice[0].startswith("selfspec: nothing can be kept in ")
    assert told(calibrate("--batch-sizes", "1", "--quiet").err) == []
    assert json.loads(calibrate("--json", "--batch-sizes", "1").out)["file"] is None


# ----------------------------------------------------------------------------------------------------------- notices


def test_a_warning_is_one_line_and_is_shown_once(capsys):
    log = logging.getLogger("selfspec")
    before = list(log.handlers)
    with StatusConsole():
        log.warning("two\nlines %s", "here")
        log.warning("two lines here")
        log.info("nothing to see")
    with StatusConsole(quiet=True):
        log.warning("unheard")
    assert capsys.readouterr() == ("", "selfspec: two lines here\n")
    assert log.handlers == before


def test_what_a_start_took_is_a_line_also_while_nothing_is_waited_for(capsys):
    with StatusConsole():
        tell("recorded %d rounds in %.1f s, %d MiB", 9, 1.5, 40)
        report("half of it")
    assert capsys.readouterr() == ("", "recorded 9 rounds in 1.5 s, 40 MiB\n")
