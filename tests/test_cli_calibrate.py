"""`selfspec calibrate`: tables for people, one document for programs, a profile for later runs."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from selfspec.calibrate import forecast, profile
from selfspec.calibrate import measure as measure_module
from selfspec.cli import calibrate as command
from selfspec.cli import talk
from selfspec.cli.talk import Talk
from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from tests import cli_fixtures
from tests.cli_fixtures import Terminal, assert_refused
from tests.target import load

model_folder, run = cli_fixtures.model_folder, cli_fixtures.run


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few repeats, and a cache of the test's own."""
    monkeypatch.setattr(command, "REPEATS", 1)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calibrate(run, model_folder):
    return lambda *arguments: run("calibrate", model_folder, *arguments)


# ------------------------------------------------------------------------------------------------------------ output


def test_people_get_tables_and_later_runs_a_profile(calibrate, model_folder):
    done = calibrate()
    assert done.code == 0
    words = ["LlamaForCausalLM", "4 layers", "float32", "Milliseconds", "plain", "early pass: 2 layers", "head", "pick"]
    words += ["verification: a layer, 8 tokens per row", "keys and values: 128 more tokens of each row, a layer"]
    assert all(word in done.out for word in words)
    assert "Speedup" not in done.out
    assert done.err == ""
    stack = load(model_folder).stack
    costs = profile.read_costs(stack)
    assert costs.plain.points == (1, 2, 4, 8)
    path = profile.path_of("costs", profile.costs_key(stack))
    assert done.out.endswith(f"\nsaved in {path}\n") and path.is_file()
    assert f"{costs.plain(8) * 1e3:.3f}" in done.out


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
    assert costs.plain.points == (1, 2, 3, 4) and "plan" not in document
    assert costs == profile.read_costs(load(model_folder).stack)
    assert document["model"] == str(model_folder) and document["key"]["num_layers"] == 4
    assert json.loads(Path(document["file"]).read_text("utf-8"))["key"] == document["key"]


def test_json_holds_the_plan_when_asked(calibrate):
    plan = json.loads(calibrate("--json", "--plan", "--batch-sizes", "2").out)["plan"]
    assert len(plan["assumed"]) == 2 * 2 * 5 and plan["seen"] == []
    assert {choice["batch_size"] for choice in plan["assumed"]} == {1, 2}
    for choice in plan["assumed"]:
        assert choice["speedup"] >= 1 and (choice["num_draft_tokens"] > 0) == (choice["speedup"] > 1)


def test_a_saved_prior_says_more(calibrate, model_folder):
    profile.save_prior(load(model_folder).stack, {"hits": [[30], [19], [1]], "misses": [[10], [1], [1]]})
    seen = json.loads(calibrate("--json", "--plan", "--batch-sizes", "1").out)["plan"]["seen"]
    assert [(choice["batch_size"], choice["exit_layer"] in (1, 2)) for choice in seen] == [(1, True)]
    assert seen[0]["acceptance"] == (0.75 if seen[0]["exit_layer"] == 1 else 0.95)
    assert "drafts of this very model" in calibrate("--plan").out


def test_a_long_wait_is_told_and_on_a_terminal_taken_back(calibrate, monkeypatch):
    monkeypatch.setattr(talk, "PATIENCE", 0.0)
    assert re.search(r"^measuring .* \.\.\.$", calibrate("--batch-sizes", "1").err, re.MULTILINE)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert calibrate("--batch-sizes", "1").code == 0
    said = screen.getvalue()
    assert ": repeat 1 of at most 1" in said
    assert said.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the line is taken back"


def test_the_demo_can_be_calibrated(run):
    assert run("calibrate", "demo", "--batch-sizes", "1", "--quiet").code == 0


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
    assert_refused(
        run("calibrate", cli_fixtures.save_model(tmp_path, num_hidden_layers=1)), 1, "at least 2 layers, got 1"
    )


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
    assert calibrate("--batch-sizes", "1", "--quiet").err == ""
    assert json.loads(calibrate("--json", "--batch-sizes", "1").out)["file"] is None


# ----------------------------------------------------------------------------------------------------------- notices


def test_a_notice_is_one_line_and_is_said_once(capsys):
    log = logging.getLogger("selfspec")
    before = list(log.handlers)
    with Talk():
        log.warning("two\nlines %s", "here")
        log.warning("two lines here")
        log.info("nothing to see")
    with Talk(quiet=True):
        log.warning("unheard")
    assert capsys.readouterr() == ("", "selfspec: two lines here\n")
    assert log.handlers == before


# ---------------------------------------------------------------------------------------------------------- forecast


def flat_costs(num_layers=8, knee=None):
    """Every layer takes 1 whatever its width, or grows beyond `knee` tokens; head and all else are free."""
    points = (1, 2, 4, 8, 16, 32, 64)
    grow = Table(points, tuple(1.0 if knee is None else max(1.0, n / knee) for n in points))
    free = Table((1,), (0.0,))
    depths = tuple(range(1, num_layers + 1))
    early = {rows: Table(depths, tuple(e * grow(rows) for e in depths)) for rows in points}
    late = {rows: Table((1, 2, 4, 8, 18), tuple(grow(rows * n) for n in (1, 2, 4, 8, 18))) for rows in points}
    return Costs(num_layers, grow.scaled(num_layers), early, late, free, free, free, free)


def test_expected_tokens_are_a_geometric_sum():
    assert forecast.expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert forecast.expected_tokens(1.0, 4) == 5 and forecast.expected_tokens(0.0, 4) == 1


@pytest.mark.parametrize(
    ("acceptance", "exit_layer", "length", "speedup"),
    [(0.5, 1, 2, 1.40), (0.7, 1, 4, 1.85), (0.9, 1, 9, 3.07), (0.5, 2, 1, 1.20), (0.8, 2, 3, 1.69)],
)
def test_where_layers_cost_the_same_at_any_width_the_forecast_is_the_known_one(acceptance, exit_layer, length, speedup):
    """T = d E + L layers: the best d and the speedup at an eighth and a quarter of the layers, worked out by hand."""
    choice = forecast.choose(flat_costs(), 1, exit_layer, acceptance)
    assert choice.num_draft_tokens == length and choice.speedup == pytest.approx(speedup, abs=0.006)


def test_beyond_the_knee_drafts_shorten_and_then_end():
    costs = flat_costs(knee=16)
    lengths = [forecast.choose(costs, rows, 1, 0.8).num_draft_tokens for rows in (1, 4, 8, 16, 32)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 4 and lengths[-1] == 0
    assert forecast.choose(costs, 32, 1, 0.8).speedup == 1


@pytest.mark.parametrize(
    ("prior", "rates"),
    [
        (None, {}),
        ({}, {}),
        ({"hits": 3, "misses": 4}, {}),
        ({"hits": [[1]], "misses": [["a"]]}, {}),
        ({"hits": [[8, 8], [2, 3]], "misses": [[2, 2], [1, 1]]}, {1: 0.8}),  # the second layer was hardly seen
        ({"hits": [[20]] * 9, "misses": [[0]] * 9}, {1: 1.0, 2: 1.0, 3: 1.0}),
    ],
)
def test_rates_come_from_layers_that_were_seen(prior, rates):
    assert forecast.rates_of(prior, 4) == rates


def test_without_a_good_layer_the_best_plan_is_plain():
    [choice] = forecast.seen(flat_costs(), [4], {4: 0.1, 6: 0.2})
    assert (choice.num_draft_tokens, choice.speedup) == (0, 1.0)
