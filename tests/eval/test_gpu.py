"""`python -m eval gpu`: the whole command on a CPU, small; its figures; and what faults and too little time cost."""

import json
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.__main__ import main
from eval.gpu import bench, parts, speed
from eval.gpu.faults import told
from eval.gpu.figures import expected_speedup, figures
from eval.gpu.ours import WARM_ROUNDS, Rate, forward_seconds, rate_of, ready_engine
from eval.gpu.record import Record
from eval.gpu.speed import ragged_lengths, sizes_of
from eval.targets import synthetic_target
from tests.eval import faults

KILLED = faults.KILLED


class Case:
    """Of a kernel that is said to agree."""

    kernel, case, error, allowed = "pick", "x", 1.0, 1.0

    def as_dict(self):
        return {"kernel": self.kernel, "agrees": True}


CASE = Case()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The command's exit code, its record, and what it printed; its first shape kills the process that measures it.

    The other parts run in this process, since each fresh one imports torch again.
    """
    folder, printed, settings_of = tmp_path_factory.mktemp("gpu"), [], bench.settings_of
    run_apart = bench.run_apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *given, **more: None if more.get("file") else printed.append(given[0]))
        patch.setattr(bench, "settings_of", lambda options: settings_of(options)._replace(shapes=(KILLED, "tiny")))
        patch.setattr(bench, "measure_shape", faults.kill_or_measure)
        patch.setattr(bench, "run_apart", lambda *given: (run_apart if given[1][0] == KILLED else here)(*given))
        code = main(["gpu", "--smoke", "--output", str(folder)])
    return code, json.loads((folder / "gpu.json").read_text()), printed


def test_the_whole_command_runs_on_a_cpu(smoke):
    code, content, printed = smoke
    assert code == 0 and content["complete"] is True
    assert {"torch", "transformers", "device", "commit"} <= set(content["environment"])
    assert content["bandwidth"]["copy_bytes_per_second"] > 0
    shape = content["shapes"]["tiny"]
    methods = {(cell["method"], cell["batch"], cell["context"]) for cell in shape["cells"]}
    for context in (48, 96):
        assert {(method, batch, context) for method in speed.OURS for batch in (1, 2)} <= methods
    assert {("hf", 2, 48), ("hf early exit", 1, 48), ("hf static", 1, 48), ("hf", 1, 96)} <= methods
    assert all(0 < cell["lowest"] <= cell["tokens_per_second"] <= cell["highest"] for cell in shape["cells"])
    (table,) = printed
    assert "synthetic tiny" in table and "tokens/s" in table and "not measured" in table


def test_a_process_that_dies_costs_its_shape_alone(smoke):
    content = smoke[1]
    whys = {one["what"]: one["why"] for one in content["not_measured"]}
    assert whys[KILLED] == "the process ended with SIGKILL"
    assert content["shapes"][KILLED]["cells"] == []


def test_acceptance_while_timed_is_what_was_set(smoke):
    shape = smoke[1]["shapes"]["tiny"]
    rates = [cell["acceptance"] for cell in shape["cells"] if cell["method"] == "fixed"]
    assert len(rates) == 4 and sum(rates) / 4 == pytest.approx(shape["target"]["acceptance"], abs=0.12)


def test_what_a_cpu_cannot_tell_is_reported_as_not_measured(smoke):
    content = smoke[1]
    skipped = {one["what"] for one in content["not_measured"]}
    assert {"kernels", "tiny, busy", KILLED} == skipped
    unknown = [figure["name"] for figure in content["figures"] if figure["value"] is None]
    assert unknown[0] == f"{KILLED}: everything" and ["waits for the host" in name for name in unknown[1:]] == [True]
    (differs,) = [f for f in content["figures"] if f["name"].startswith("tiny: exact mode, batch 4: rows")]
    assert differs["value"] == 0
    assert all(figure["goal"] is None for figure in content["figures"])  # they are a GPU's


# --------------------------------------------------------------------------------------------------- time and trouble


def here(work, given, end, on_content):
    """What `run_apart` does, in this process, where tests can replace what it calls."""
    try:
        work(Record(on_content), *given)
    except Exception as problem:
        return told(problem)


def quick(monkeypatch, tmp_path, **changes):
    """The command with some of its settings changed; returns the record."""
    before = bench.settings_of
    monkeypatch.setattr(bench, "run_apart", here)
    monkeypatch.setattr(bench, "settings_of", lambda options: before(options)._replace(**{**QUICK, **changes}))
    assert main(["gpu", "--smoke", "--output", str(tmp_path)]) == 0
    return json.loads((tmp_path / "gpu.json").read_text())


QUICK = {"room": 48, "warm": 0.01, "window": 0.03}
SMALL = {"contexts": (48,), "batches": (1,), "fixed_batches": (1,)}


def test_without_time_every_cell_is_reported_as_not_measured(monkeypatch, tmp_path, capsys):
    content = quick(monkeypatch, tmp_path, warm=1e6)
    whys = [one["why"] for one in content["not_measured"] if one["what"].startswith("tiny, ")]
    assert len(whys) == 19 and all("s needed" in why and "s left" in why for why in whys)
    assert [cell["method"] for cell in content["shapes"]["tiny"]["cells"]] == ["hf static"]  # it has its own estimate
    assert "not measured" in capsys.readouterr().out


def test_a_cell_is_not_begun_that_would_take_as_long_as_others_did(monkeypatch, tmp_path):
    def slow(*given):
        now[0] += 100
        return rate

    now, rate = [0.0], Rate(1.0, 1.0, 1.0, 1, 1.0)
    monkeypatch.setattr(speed, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed, "rate_of", slow)
    made = Record(lambda content: None)
    settings = bench.settings_of(bench.parse_arguments(["--smoke"]))._replace(**SMALL)
    speed.Shape("tiny", settings, 250.0, made, lambda text: None).measure()
    assert [cell["method"] for cell in made.content["shapes"]["tiny"]["cells"]] == ["plain", "fixed", "hf static"]
    whys = {one["what"]: one["why"] for one in made.content["not_measured"]}
    assert whys["tiny, adaptive, batch 1, context 48"] == "about 100 s needed, 50 s left"


def test_without_memory_cells_are_reported_as_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "free_bytes", lambda device: 2e6)
    content = quick(monkeypatch, tmp_path, contexts=(48,), batches=(1, 64), fixed_batches=())
    cells = [(cell["method"], cell["batch"]) for cell in content["shapes"]["tiny"]["cells"]]
    assert ("plain", 1) in cells and ("plain", 64) not in cells
    assert any("batch 64" in one["what"] and "GiB free" in one["why"] for one in content["not_measured"])


def test_one_failure_costs_one_cell(monkeypatch, tmp_path):
    def failing(target, kind, *given):
        raise torch.OutOfMemoryError("too much") if kind == "hf" else RuntimeError("no such\ncache")

    monkeypatch.setattr(speed, "peer_rate", failing)
    content = quick(monkeypatch, tmp_path, **SMALL)
    whys = {one["what"].split(", ")[1]: one["why"] for one in content["not_measured"] if "batch" in one["what"]}
    assert whys["hf"] == "out of memory" and whys["hf static"] == "RuntimeError: no such cache"
    assert len(content["shapes"]["tiny"]["cells"]) == 3 and content["complete"]


def test_a_lost_context_costs_one_cell_and_a_process(monkeypatch, tmp_path):
    def losing(target, kind, *given):
        raise torch.AcceleratorError(f"CUDA error: lost by {kind}")

    made = []
    monkeypatch.setattr(speed, "peer_rate", losing)
    monkeypatch.setattr(bench, "measure_shape", lambda *given: made.append(given[1]) or parts.measure_shape(*given))
    content = quick(monkeypatch, tmp_path, **SMALL)
    assert made == ["tiny"] * 4  # once more after each of the three ways to decode that transformers has
    assert [cell["method"] for cell in content["shapes"]["tiny"]["cells"]] == ["plain", "fixed", "adaptive"]
    whys = {one["what"].split(", ")[1]: one["why"] for one in content["not_measured"] if "batch" in one["what"]}
    assert whys == {kind: f"AcceleratorError: CUDA error: lost by {kind}" for kind in speed.PEERS}
    assert content["complete"] and content["bandwidth"]


def test_a_target_that_cannot_be_made_is_tried_once(monkeypatch, tmp_path):
    def losing(*given, **options):
        raise torch.AcceleratorError("CUDA error: lost at once")

    monkeypatch.setattr(speed, "synthetic_target", losing)
    content = quick(monkeypatch, tmp_path)
    assert {"what": "tiny", "why": "AcceleratorError: CUDA error: lost at once"} in content["not_measured"]
    assert content["figures"][0]["why"] == "the target could not be made" and content["bandwidth"]


def test_a_run_that_is_cut_short_keeps_what_it_had(monkeypatch, tmp_path):
    def cut(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "peer_rate", cut)
    with pytest.raises(KeyboardInterrupt):
        quick(monkeypatch, tmp_path)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["complete"] is False
    assert [cell["method"] for cell in content["shapes"]["tiny"]["cells"]] == ["plain", "fixed", "adaptive"]


def test_kernels_are_checked_where_they_are_there(monkeypatch):
    module = ModuleType("eval.gpu.kernels")
    module.check_kernels = lambda device: iter([CASE] * 3)
    module.bandwidth = lambda device: {"copy_bytes_per_second": 4e12}
    monkeypatch.setitem(sys.modules, "eval.gpu.kernels", module)
    for end, count in [(1e99, 3), (0.0, 1)]:
        made = Record(lambda content: None)
        parts.measure_device(made, torch.device("cuda"), 0.0, end)
        assert made.content["kernels"] == [CASE.as_dict()] * count
        assert made.content["bandwidth"]["copy_bytes_per_second"] == 4e12
        assert [one["what"] for one in made.content["not_measured"]] == ["the other kernels"] * (count == 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "this machine has no CUDA device; --smoke runs the same"),
        (["--device", "cpu", "--shapes", "llama-9"], "shapes must be of tiny, llama-3.2-1b"),
        (["--device", "cpu", "--batch-sizes", "0"], "batch sizes must be at least 1"),
    ],
)
def test_what_is_not_possible_is_one_sentence_and_exit_code_two(given, sentence, capsys, tmp_path):
    if not given and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["gpu", "--output", str(tmp_path), *given]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"eval: {sentence}") and printed.out == ""


# ------------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("layers", "exit_layer", "head", "acceptance", "speedup"),
    [(32, 4, 0.6, 0.6, 1.47), (32, 4, 0.6, 0.8, 2.14), (32, 8, 0.6, 0.9, 1.99), (32, 8, 2.4, 0.8, 1.52)],
)
def test_the_cost_model_gives_the_figures_it_is_known_by(layers, exit_layer, head, acceptance, speedup):
    assert expected_speedup(layers, exit_layer, 4, head, acceptance) == pytest.approx(speedup, abs=0.011)


def test_figures_are_what_the_cells_say():
    cell = {"context": 1024, "acceptance": None}
    shape = {
        "target": {"exit_layer": 4, "num_layers": 32},
        "contexts": [1024, 8192],
        "sizes": {"read_bytes": 15e9, "kv_bytes_per_token": 131072, "head_in_layers": 2.4},
        "busy_seconds_per_plain_round": 0.0048,
        "forwards": {"rows": 32, "context": 1024, "seconds": {"one": 0.01, "even": 0.012, "ragged": 0.0126}},
        "cells": [
            {**cell, "method": "plain", "batch": 1, "tokens_per_second": 200.0},
            {**cell, "method": "fixed", "batch": 1, "tokens_per_second": 300.0, "acceptance": 0.8},
            {**cell, "method": "adaptive", "batch": 1, "tokens_per_second": 320.0},
            {**cell, "method": "plain", "batch": 64, "tokens_per_second": 4000.0},
            {**cell, "method": "adaptive", "batch": 64, "tokens_per_second": 3800.0},
        ],
    }
    content = {
        "environment": {"device": "cuda"},
        "bandwidth": {"copy_bytes_per_second": 4e12},
        "shapes": {"llama-3-8b": shape},
    }
    values = {figure.name: figure for figure in figures(content) if figure.value is not None}
    told = {name.split(": ", 1)[1]: (round(f.value, 3), f.holds) for name, f in values.items()}
    assert told["plain, batch 1, context 1024: share of the copy bandwidth"] == (0.757, False)
    assert told["plain, batch 1: share of a round that the device waits for the host"] == (0.04, True)
    assert told["fixed (E=4, D=4), batch 1: times plain"] == (1.5, None)
    assert told["adaptive: times plain, lowest of 2 (batch 64, context 1024)"] == (0.95, False)
    assert told["forward, batch 32, context 1024: 4 tokens per row over 1"] == (1.2, True)
    assert told["forward, batch 32, context 1024: ragged rows over even ones, as many tokens"] == (1.05, True)


@given(st.integers(1, 200))
def test_ragged_rows_have_as_many_tokens_as_even_ones(rows):
    lengths = ragged_lengths(rows)
    assert len(lengths) == rows and sum(lengths) == 4 * rows and 1 <= min(lengths) <= max(lengths) <= 7
    assert rows < 2 or max(lengths) > 4


def test_rows_made_ready_hold_what_reading_their_prompts_would_have_given():
    target = synthetic_target("tiny", acceptance=None)
    engine = ready_engine(target, 3, 40, 24, policy="plain")
    prompts = [row.content[:] for row in engine.rows]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    texts = {row.request_id: [] for row in engine.rows}
    for round_ in engine.run():
        for row in round_.rows:
            texts[row.request_id] += row.tokens
    for done in target.generate(prompts, policy="plain", max_new_tokens=24):
        assert texts[done.request_id] == done.tokens


def test_a_rate_counts_what_was_emitted_in_its_window():
    target = synthetic_target("tiny", acceptance=None)
    rate = rate_of(ready_engine(target, 2, 20, 60, policy="plain"), warm=0.0, window=1e9)
    rounds = 60 - WARM_ROUNDS
    assert rate.rounds == rounds and rate.plans == {"plain": rounds} and rate.acceptance is None
    assert rate.tokens_per_second == pytest.approx(2 * rounds / rate.seconds)
    assert forward_seconds(ready_engine(target, 2, 20, 20, policy="plain"), [1, 3], repeats=1) > 0


def test_sizes_are_those_of_the_weights():
    for tied in (False, True):
        target = synthetic_target("tiny", acceptance=None, check=False, tie_word_embeddings=tied)
        sizes = sizes_of(target)
        weights = sum(p.nbytes for p in target.model.parameters())
        assert sizes["weight_bytes"] == weights
        assert weights - sizes["read_bytes"] == (0 if tied else 1024 * 64 * 4)
        assert sizes["kv_bytes_per_token"] == 2 * 2 * 16 * 8 * 4
