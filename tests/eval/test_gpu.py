"""`python -m eval gpu`: what it measures, its figures, and the effects of errors and of too little time."""

from __future__ import annotations

import json
import signal
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from eval import gpu, gpu_rates
from eval.__main__ import main
from eval.config import FOLDER
from eval.gpu import GpuConfig, Shape, cells_of, measure_in_process, run
from eval.gpu_figures import Cell, figures, render
from eval.gpu_rates import Rows, sizes_of
from eval.models import with_policy
from eval.synthetic import synthetic_target
from selfspec.kernels.layout import CONTENT
from tests.cuda.standin import with_runner
from tests.slow import slow
from train.configuration import read_config

SMALL = str(FOLDER / "gpu_small.yaml")
LARGE_VOCABULARY = {"vocab_size": 32768}  # `fixed` drafts over an eighth of it
FAKE = {"tokens_per_second": 1.0, "mean_context": 50, "rounds": 1, "seconds": 1.0}
FEW = {"contexts": [48], "batch_sizes": [1], "draft_lengths": []}


def here(path, name, end):
    """`measure_in_process` in this process, so that tests can replace functions."""
    try:
        Shape(path, name, end).measure()
    except SystemExit as problem:
        return f"the process ended with exit code {problem.code}"


def ticks():
    """A clock that advances by a second whenever it is read."""
    numbers = count()
    return lambda: float(next(numbers))


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Measures the tiny shape with fake figures; returns the record."""

    def made(measured=lambda self, cell: FAKE, **given):
        monkeypatch.setattr(Shape, "measured", measured)
        monkeypatch.setattr(gpu, "device_speed", lambda device: {"copy_bytes_per_second": 1e9})
        return run(read_config(GpuConfig, SMALL, {**FEW, **given}), tmp_path / "gpu.json", here)

    return made


def methods_of(found):
    return [cell["method"] for cell in found["shapes"]["tiny"]["cells"]]


@pytest.mark.slow
def test_the_command_measures_every_cell_on_a_cpu(tmp_path, capsys):
    assert main(["gpu", SMALL, "--output", str(tmp_path)]) == 0
    table, last = capsys.readouterr().out.rsplit("\n\n", 1)
    content = json.loads(last)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["complete"] and kept.keys() == content.keys() and "commit" in content["environment"]
    shape = content["shapes"]["tiny"]
    cells = cells_of(GpuConfig(**{name: content["config"][name] for name in ("contexts", "batch_sizes")}))
    assert shape["missing"] == {} and shape["speed"]["copy_bytes_per_second"] > 0
    measured = {Cell(c["context"], c["batch"], c["method"]) for c in shape["cells"]}
    assert {cell for cell in cells if not cell.method.startswith("fixed:")} <= measured
    rates = [cell for cell in shape["cells"] if "lowest" in cell]
    assert len(rates) > 20 and all(0 < c["lowest"] <= c["tokens_per_second"] <= c["highest"] for c in rates)
    fixed = [cell["acceptance"] for cell in rates if cell["method"] == "fixed"]
    assert sum(fixed) / len(fixed) == pytest.approx(shape["target"]["acceptance"], abs=0.1)
    assert "synthetic tiny" in table and "hf early exit" in table and "wall / floor" in table


# ------------------------------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("policy", [{"policy": "plain"}, {"policy": "fixed", "exit_layer": 1}])
def test_a_rate_counts_steps_of_full_batches_also_where_rows_end_before_the_measurement(policy):
    """By a clock that counts its readings: 16 new tokens end long before 40 steps are counted."""
    target = synthetic_target("tiny", acceptance=None)
    rows = Rows(with_policy(target.llm, **policy), 2, 20, 16, ticks())
    found = rows.rate(warm=4.0, window=40.0)
    assert found["seconds"] == 40 and found["rounds"] >= 40 and rows.num_begun > 2
    assert sum(found["plans"].values()) == found["rounds"] and 20 < found["mean_context"] < 36
    tokens = found["tokens_per_second"] * 40
    assert tokens == 2 * found["rounds"] if policy["policy"] == "plain" else tokens >= 2 * found["rounds"]
    rows.stop()
    assert not rows.engine.has_unfinished_requests()


@pytest.mark.parametrize("shape", [{}, slow(LARGE_VOCABULARY)], ids=["tiny", "large vocabulary"])
def test_a_rate_has_the_acceptance_that_its_target_promises(shape):
    target = synthetic_target("tiny", temperature=gpu_rates.TEMPERATURE, **shape)
    assert target.split.default_draft_vocab == (4096 if shape else None)
    llm = with_policy(target.llm, policy="fixed", exit_layer=1, num_speculative_tokens=4)
    done = gpu_rates.Counts()
    for seconds, rounds, held in Rows(llm, 8, 256, 120, ticks()).full_steps():
        done.add(seconds, rounds, held)
        if done.rounds > 150:
            break
    assert done.as_dict()["acceptance"] == pytest.approx(0.8, abs=0.05)
    assert abs(target.made.acceptance - 0.8) < 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_those_of_the_weights(tied):
    target = synthetic_target("tiny", acceptance=None, tie_word_embeddings=tied)
    sizes, head = sizes_of(target), 1024 * 64 * 4
    weights = sum(p.nbytes for p in target.split.model.parameters())
    assert sizes["head_bytes"] == head and weights - sizes["read_bytes"] == (0 if tied else head)
    assert sizes["kv_bytes_per_token"] == 2 * 2 * 16 * 8 * 4
    assert sizes["draft_head_bytes"] == sizes["head_bytes"]
    wide = sizes_of(synthetic_target("tiny", acceptance=None, **LARGE_VOCABULARY))
    assert wide["draft_head_bytes"] == wide["head_bytes"] / 8


# ------------------------------------------------------------------------------------------------- order and figures


def test_the_most_important_cells_come_first():
    cells = cells_of(GpuConfig())
    assert len(cells) == len({*cells})
    first = [f"{cell.method} {cell.batch}" for cell in cells[:7]]
    assert first == ["plain 1", "fixed 1", "adaptive 1", "hf 1", "plain 32", "fixed 32", "adaptive 32"]
    assert cells.index(Cell(1024, 128, "adaptive")) < cells.index(Cell(1024, 1, "plain, exact"))
    assert cells[-1] == Cell(1024, 1, "hf static")


def rate(method, speed, context=1024, **more):
    cell = {"context": context, "batch": 1, "method": method, "tokens_per_second": speed, "mean_context": context}
    return {**cell, "rounds": speed, "seconds": 1.0, **more}


def test_figures_follow_from_the_cells():
    shape = {
        "target": {"exit_layer": 4, "num_layers": 32, "wanted": 0.8},
        "sizes": {"read_bytes": 15e9, "head_bytes": 1e9, "draft_head_bytes": 0.25e9, "kv_bytes_per_token": 131072},
        "speed": {"copy_bytes_per_second": 4e12},
        "cells": [
            rate("plain", 200.0, busy_seconds=0.0048),
            rate("fixed", 300.0, rounds=100, acceptance=0.85),
            rate("fixed:2", 310.0),
            rate("adaptive", 320.0),
            rate("adaptive, hopeless", 99.0),
            rate("plain, hopeless", 100.0),
            rate("hf", 40.0),
            rate("fixed", 300.0, 8192, rounds=100, acceptance=0.6),
            rate("plain", 200.0, 8192),
            {**rate("prefill", 2e4), "hf_tokens_per_second": 1e4},
        ],
    }
    rows = {(row["method"], row["context"]): row for row in figures(shape)}
    plain, fixed, adaptive = (rows[method, 1024] for method in ("plain", "fixed", "adaptive"))
    # A round reads all weights but the embedding, and 1,024 tokens' keys and values: 15.134 GB at 4 TB/s.
    assert plain["wall ms"] == 5 and plain["floor ms"] == pytest.approx(3.784, abs=1e-3)
    assert plain["wall / floor"] == pytest.approx(1.3215, abs=1e-3)
    assert plain["busy / floor"] == pytest.approx(1.2686, abs=1e-3)
    assert plain["host share"] == pytest.approx(0.04) and plain["over hf"] == 5
    # Layers 1.5 times (4 of 32 for each of 4 drafts), the head once, and a quarter of it for each of 4 drafts.
    assert fixed["floor ms"] == pytest.approx(5.8, abs=1e-3) and fixed["over plain"] == 1.5
    assert adaptive["over best fixed"] == pytest.approx(1.0323, abs=1e-4) and adaptive["over plain"] == 1.6
    hopeless = rows["adaptive, hopeless", 1024]
    assert hopeless["over plain"] == 0.99 and not {"over best fixed", "over hf"} & hopeless.keys()
    assert "over plain" not in rows["fixed", 8192] and rows["fixed", 8192]["acceptance"] == 0.6  # another acceptance
    assert rows["prefill", 1024]["over hf"] == 2


# --------------------------------------------------------------------------------------------------- time and trouble


def test_without_time_every_cell_is_reported_as_not_measured(record):
    found = record(warm_seconds=1e6)
    whys = found["shapes"]["tiny"]["missing"]
    assert len(whys) == 12 and all("no time: about" in why and "s left" in why for why in whys.values())
    assert methods_of(found) == ["hf static"]  # what compiles has an estimate of its own


def test_a_cell_is_skipped_when_too_little_time_is_left(record, monkeypatch):
    now = [0.0]

    def slowly(self, cell):
        now[0] += 100
        return FAKE

    monkeypatch.setattr(gpu, "time", lambda: now[0])
    found = record(slowly, minutes=4.16)
    assert methods_of(found)[:2] == ["plain", "fixed"] and "adaptive" not in methods_of(found)
    whys = found["shapes"]["tiny"]["missing"]
    assert whys["adaptive, batch 1, context 48"] == "no time: about 100 s needed, 50 s left"


def test_one_failure_costs_one_cell_and_a_lost_context_a_process(record, monkeypatch):
    def failing(self, cell):
        if cell.method == "hf":
            raise torch.OutOfMemoryError("too much")
        if cell.method == "plain, exact":
            raise torch.AcceleratorError("CUDA error: lost")
        if cell.method == "prefill":
            raise RuntimeError("no such\ncache")
        return FAKE

    opened, make = [], gpu.synthetic_target
    monkeypatch.setattr(gpu, "synthetic_target", lambda *given, **more: opened.append(given) or make(*given, **more))
    found = record(failing)
    assert found["shapes"]["tiny"]["missing"] == {
        "hf, batch 1, context 48": "out of memory",
        "plain, exact, batch 1, context 48": "AcceleratorError: CUDA error: lost",
        "prefill, batch 1, context 48": "RuntimeError: no such cache",
    }
    assert len(opened) == 2 and found["complete"]
    more = ["adaptive, again", "adaptive:exit", "adaptive, hopeless", "plain, hopeless", "first token"]
    assert methods_of(found) == ["plain", "fixed", "adaptive", *more, "hf early exit", "hf static"]


def test_a_target_that_cannot_be_made_is_tried_once(record, monkeypatch):
    def losing(*given, **options):
        raise torch.AcceleratorError("CUDA error: lost at once")

    monkeypatch.setattr(gpu, "synthetic_target", losing)
    found = record()
    assert found["shapes"]["tiny"]["missing"] == {"opening": "AcceleratorError: CUDA error: lost at once"}
    assert "not measured (1)" in render(found)


def test_a_run_that_is_cut_short_keeps_what_it_had(record, tmp_path):
    def cut(self, cell):
        if cell.method == "adaptive":
            raise KeyboardInterrupt
        return FAKE

    with pytest.raises(KeyboardInterrupt):
        record(cut)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["complete"] is False and methods_of(found) == ["plain", "fixed"]


def test_a_process_that_dies_costs_what_it_was_measuring(tmp_path, monkeypatch):
    killed = SimpleNamespace(returncode=-signal.SIGKILL)
    names = {"run": lambda command, **options: killed, "TimeoutExpired": OSError, "DEVNULL": None}
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(**names))
    found = run(read_config(GpuConfig, SMALL, FEW), tmp_path / "gpu.json", measure_in_process)
    assert found["shapes"]["tiny"]["missing"] == {"opening": "the process ended with SIGKILL"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "this machine has no CUDA device; configs/eval/gpu_small.yaml"),
        (["--device", "cpu", "--shapes", "llama-9"], "shapes must be of tiny, smollm2-135m"),
        (["--device", "cpu", "--batch-sizes", "0"], "batch_sizes must be numbers of at least 1, got [0]"),
        (["--device", "cpu", "--dtype", "int8"], "dtype must be among bfloat16, float16, float32, got 'int8'"),
    ],
)
def test_invalid_options_give_one_sentence_and_exit_code_2(given, sentence, capsys, tmp_path):
    if not given and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["gpu", "--output", str(tmp_path), *given]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"eval: {sentence}") and printed.out == ""


def test_earlier_shapes_have_more_of_the_time_and_the_first_a_minimum(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "time", lambda: 0.0)
    for minutes, ends in [(1, [60, 40, 60]), (16, [480, 640, 960])]:
        seen = []
        config = GpuConfig(shapes=("llama-3-8b", "tiny", "llama-2-7b"), minutes=minutes)
        run(config, tmp_path / "gpu.json", lambda path, name, end, seen=seen: seen.append(end))
        assert seen == ends


# ---------------------------------------------------------------------------------------------- cells on the stand-in


@pytest.mark.slow
def test_every_cell_of_the_package_is_measured_on_the_stand_in(tmp_path, monkeypatch):
    def on_tape(*given, **more):
        made = synthetic_target(*given, **more)
        with_runner(made.llm.target, packing="copy", max_rows=32)
        return made

    monkeypatch.setattr(gpu, "synthetic_target", on_tape)
    methods = ("plain", "fixed", "adaptive", "launches", "prefill", "first token", *gpu.ADAPTIVE)
    short = {"warm_seconds": 0.0, "window_seconds": 0.05, "methods": methods, "peer_batch_sizes": [], "minutes": 30}
    found = run(read_config(GpuConfig, SMALL, {**FEW, **short}), tmp_path / "gpu.json", here)["shapes"]["tiny"]
    assert found["missing"] == {} and {*methods} <= {cell["method"] for cell in found["cells"]}
    assert found["opened"]["layers"] == "recorded, fused (weights: copy)" and found["speed"]["read_bytes_per_second"]
    cells = {cell["method"]: cell for cell in found["cells"]}
    for method in ("plain", "fixed", "adaptive", *gpu.ADAPTIVE):
        assert cells[method]["recordings"] >= 0 and cells[method]["recording_seconds"] >= 0
        assert cells[method]["recording_mib"] > 0
    assert all(cells[method]["busy_seconds"] > 0 for method in ("plain", "fixed"))
    assert "recordings" in render({"environment": {"cpu": "", "torch": ""}, "shapes": {"tiny": found}})


def test_recordings_and_their_seconds_are_counted_and_launches_timed_on_the_stand_in():
    target = synthetic_target("tiny", acceptance=None)
    with_runner(target.llm.target, packing="copy")
    llm = with_policy(target.llm, policy="plain")
    before = gpu_rates.recordings_of(llm)
    rows = Rows(llm, 1, 20, 16, ticks())
    next(rows.full_steps())
    rows.stop()
    after = gpu_rates.recordings_of(llm)
    assert after["recordings"] > before["recordings"] and after["recording_seconds"] > 0
    found = gpu_rates.launches(target.split, counts=(1, 5))
    five = {f"five: {one}" for one in ("norm, qkv", "rotate, attend", "o, add", "norm, gate, up", "down, add")}
    five |= {"five: rotate, attend; o, add", "five: rotate, attend; o, add; prefetch"}
    assert found.keys() == {"chain", "1", "5"}
    assert found["5"].keys() == {"add_norm", "qkv", "rotate, attend", "o", "gate_up", "gate", "down"} | five
    assert all(micros > 0 for one in found.values() for micros in one.values())


@pytest.mark.parametrize("policy", [{"policy": "plain"}, {"policy": "fixed", "exit_layer": 1}])
def test_a_rounds_time_on_the_device_is_that_of_its_own_recording(policy):
    target = synthetic_target("tiny", acceptance=None)
    with_runner(target.llm.target, packing="copy")
    rows = Rows(with_policy(target.llm, **policy), 2, 20, 60, ticks())
    next(rows.full_steps())
    rows.stop()
    graphs = target.split.runner.graphs
    recorded = graphs.num_recorded
    found = gpu_rates.replayed(rows)
    latest = [*graphs._kept.values()][-1]  # used last
    assert graphs.num_recorded == recorded and latest.recording.num_replays > 4
    assert found["busy_seconds"] > 0 and found["launch_seconds"] > 0
    assert (latest.inputs.rows[:2, CONTENT] > 20).all(), "rows that have not ended"
    assert gpu_rates.layers_of(target.split) == "recorded, fused (weights: copy)"
    with pytest.raises(ValueError, match="not recorded"):
        gpu_rates.replayed(
            Rows(with_policy(synthetic_target("tiny", acceptance=None).llm, **policy), 2, 20, 60, ticks())
        )


def test_a_first_token_comes_sooner_where_its_prompt_was_read_before():
    target = synthetic_target("tiny", acceptance=None)
    llm, caching = (with_policy(target.llm, policy="plain") for _ in range(2))
    caching._prefix_cache = True
    found = gpu_rates.first_token(llm, caching, 96)
    assert found["first_token_seconds"] > 0 and found["first_token_seconds_cached"] > 0


def test_launches_of_layers_that_are_not_recorded_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="fused layers in recordings, which do not run here"):
        gpu_rates.launches(synthetic_target("tiny", acceptance=None).split)
