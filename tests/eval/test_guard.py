"""`python -m eval guard`: cells, verdicts, and a run that is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import guard, guard_virtual
from eval.__main__ import main
from eval.config import FOLDER, config_of
from eval.guard import Cell, Found, GuardConfig
from eval.guard_virtual import RECORDING, Seconds, Virtual, simulate
from eval.records import read_lines
from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import Policy


@pytest.mark.parametrize(
    ("ratios", "is_equal", "verdict"),
    [
        ([1.2, 1.21, 1.19, 1.2], True, "passes"),
        ([0.99, 0.991, 0.989, 0.99], True, "passes"),
        ([0.9, 0.91, 0.9, 0.89], True, "fails"),
        ([1.2, 1.21, 1.19, 1.2], False, "fails"),  # an output that differs
        ([0.7, 1.3, 0.8, 1.2], True, "undecided"),
        ([0.975, 0.985, 0.97, 0.98], True, "fails"),
    ],
)
def test_a_cell_passes_where_its_interval_is_narrow_and_reaches_the_floor(ratios, is_equal, verdict):
    assert Found(ratios, is_equal).verdict(0.98, 0.02) == verdict


def test_the_shipped_configurations_name_files_that_exist():
    for name in ("guard", "guard_quick"):
        config = config_of(GuardConfig, FOLDER / f"{name}.yaml")
        assert len({*guard.cells_of(config)}) == len([*guard.cells_of(config)]) > 10
        for text in config.texts:
            assert Path(text.partition("=")[2]).is_file()


def test_a_run_prints_the_lowest_cells_first_and_is_resumed(tmp_path, capsys, monkeypatch):
    ratios = iter([1.1, 0.9])
    calls = []

    def measured(llm, cell, config):
        calls.append(cell)
        ratio = next(ratios)
        return Found([ratio, ratio * 1.001], True)

    monkeypatch.setattr(guard, "measured", measured)
    given = ["guard", "--models", "demo", "--threads", "1", "--rows", "1", "--temperatures", "0", "--starts", "warm"]
    given += ["--virtual-rows"]
    texts = ["--texts", *(f"{name}={FOLDER / 'prompts.jsonl'}" for name in ("code", "other"))]
    more = ["--output", str(tmp_path)]
    assert main([*given, *texts[:2], *more]) == 0
    assert "1 of 1 cells pass" in capsys.readouterr().out
    assert main([*given, "--texts", *texts[1:], *more]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 cells pass" in out and out.index("other") < out.index("code")
    assert (
        [cell.text for cell in calls] == ["code", "other"] == [x["text"] for x in read_lines(tmp_path / "cells.jsonl")]
    )
    assert (tmp_path / "guard.svg").read_text().startswith("<?xml")
    assert main([*given, *texts[:2], "--tokens", "7", *more]) == 2


def test_a_cell_is_measured_in_turns_and_its_outputs_are_compared():
    from eval.models import open_llm

    file = str(FOLDER / "prompts.jsonl")
    config = GuardConfig(models=("demo",), texts=(f"code={file}",), tokens=6, seconds=0.01)
    for start in (guard.COLD, guard.WARM):
        found = guard.measured(open_llm("demo"), Cell("demo", 1, 2, "code", 0.0, start), config)
        assert found.is_equal and len(found.ratios) == 1 and found.ratios[0] > 0


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_cold_cell_begins_every_time_without_statistics_of_earlier_texts(monkeypatch, start):
    from eval.models import open_llm

    priors, decoded = [], guard._decoded

    def seen(llm, *given):
        if llm.speculative.policy == "adaptive":
            priors.append(llm.target.policies.prior)
        return decoded(llm, *given)

    monkeypatch.setattr(guard, "_decoded", seen)
    monkeypatch.setattr(guard, "FEWEST", 3)
    config = GuardConfig(models=("demo",), tokens=16, half_width=9.0)
    guard.measured(open_llm("demo"), Cell("demo", 1, 1, "code", 0.0, start), config)
    assert len(priors) == 3 and all((later == priors[0]) == (start == "cold") for later in priors[1:])


def test_predicted_outputs_stand_for_texts_of_models_with_random_weights():
    from eval.models import open_llm

    config = GuardConfig(models=("demo",), texts=("most=0.9",), tokens=24, seconds=0.01)
    llm, cell = open_llm("demo"), Cell("demo", 1, 2, "most", 0.0, guard.WARM)
    assert guard.measured(llm, cell, config).is_equal
    batch = guard._random_prompts(llm)[:2]
    right, wrong = (guard._predicted(llm, batch, cell, 24, 0, share) for share in (1.0, 0.0))
    assert [len(one) for one in right] == [24, 24] and sum(map(int.__eq__, right[0], wrong[0])) < 8


def test_cells_in_virtual_time_charge_what_a_device_would_wait_for(tmp_path, capsys, monkeypatch):
    cell = Virtual(1, 0.8)
    found = simulate(cell, tokens=64, outputs=2)
    assert 0 < found.fixed < found.plain and found.recordings == 0, "a start records all shapes that a policy names"
    with monkeypatch.context() as unnamed:
        unnamed.setattr(Policy, "likely", lambda policy, rows: [])
        unnamed.setattr(Adaptive, "likely", Policy.likely)
        again = simulate(cell, tokens=64, outputs=2)
    monkeypatch.setattr(guard_virtual, "START_SECONDS", 0)
    late = simulate(cell, tokens=64, outputs=2)
    assert late.recordings == again.recordings, "a start without time records a plain round"
    assert again.recordings > 0 and again.recording == again.recordings * RECORDING < again.adaptive
    assert Seconds(2.0, 1.9, 1.0, 0, 0.0).passes(0.8) is False
    assert Seconds(1.0, 0.99, 0.5, 0, 0.0).passes(0.02) and not Seconds(1.0, 1.9, 0.9, 0, 0.0).passes(0.8)
    monkeypatch.setattr(guard, "cells_of", lambda config: ())
    monkeypatch.setattr(guard, "simulate", lambda cell: Seconds(1.0, 1.2, 0.97, 1, 0.1))
    given = ["guard", "--models", "demo", "--virtual-rows", "1", "--output", str(tmp_path)]
    assert main(given) == 0
    assert "best fixed over adaptive" in capsys.readouterr().out and len(read_lines(tmp_path / "virtual.jsonl")) == 2
    assert main(given) == 0 and len(read_lines(tmp_path / "virtual.jsonl")) == 2


def test_wrong_options_are_refused(capsys):
    assert main(["guard", "--texts", "code"]) == 2
    assert "texts must be NAME=FILE" in capsys.readouterr().err
    assert main(["guard", "--texts", "a=b", "--starts", "hot"]) == 2
