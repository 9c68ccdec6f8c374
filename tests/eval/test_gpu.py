"""`python -m eval gpu`: the command on a CPU, its figures, and the effects of errors and of too little time."""

from __future__ import annotations

import json
from time import perf_counter

import pytest
import torch

from eval import gpu, gpu_layers, gpu_shape
from eval.__main__ import main
from eval.config import FOLDER
from eval.gpu_plan import TRANSFORMERS, GpuConfig
from eval.gpu_plan import cells_of as in_order
from eval.gpu_rates import Rate
from tests.eval import faults

SMALL = ["gpu", str(FOLDER / "gpu_small.yaml")]
QUICK = [*SMALL, "--new-tokens", "96", "--warm-seconds", "0.01", "--window-seconds", "0.03", "--draft-lengths", "4"]
ONE = [*QUICK, "--contexts", "48", "--batch-sizes", "1"]
OURS = ("plain", "fixed", "adaptive")


def here(work, given, end, save):
    """`run_in_process` in this process, so that tests can replace functions."""
    try:
        work(save, *given)
    except Exception as problem:
        return gpu_shape.one_line(problem)


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Runs the command in this process; returns the record."""
    monkeypatch.setattr(gpu, "run_in_process", here)
    monkeypatch.setattr(gpu_layers, "compiled_views", gpu_layers.views)  # tracing takes seconds

    def run(*given):
        assert main([*given, "--output", str(tmp_path)]) == 0
        return json.loads((tmp_path / "gpu.json").read_text())

    return run


def cells_of(content, shape="tiny"):
    return [(cell["method"], cell["batch"], cell["context"]) for cell in content["shapes"][shape]["cells"]]


def cells_of_config(content):
    return in_order(GpuConfig(**content["config"]))


def whys_of(content, shape="tiny"):
    return {one["what"]: one["why"] for one in content["shapes"][shape]["not_measured"]}


@pytest.mark.slow
def test_the_command_runs_on_a_cpu_and_survives_a_killed_process(tmp_path, monkeypatch, capsys):
    apart = gpu.run_in_process
    monkeypatch.setattr(gpu, "measure_shape", faults.kill_or_measure)
    monkeypatch.setattr(gpu_layers, "compiled_views", gpu_layers.views)  # tracing takes seconds
    # The other shape is measured in this process, since each fresh one imports torch again.
    monkeypatch.setattr(gpu, "run_in_process", lambda *given: (apart if given[1][0] == faults.KILLED else here)(*given))
    assert main([*SMALL, "--shapes", faults.KILLED, "tiny", "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["complete"] is True and {"torch", "transformers", "commit"} <= set(content["environment"])
    assert whys_of(content, faults.KILLED) == {"opening": "the process ended with SIGKILL"}
    shape = content["shapes"]["tiny"]
    assert shape["speed"]["copy_bytes_per_second"] > 0
    for context in (48, 96):
        assert {(method, batch, context) for method in OURS for batch in (1, 2)} <= {*cells_of(content)}
    others = [("plain, exact", 2, 48), ("prefill", 1, 96), ("pause", 1, 96), ("attention", 2, 96), ("layers", 2, 48)]
    others += [("hf", 2, 48), ("hf early exit", 1, 48), ("hf static", 1, 48), ("hf", 1, 96), ("fixed:2", 1, 48)]
    assert {*others, ("compiled layers", 1, 48), ("costs", 2, 48)} <= {*cells_of(content)}
    rates = [cell for cell in shape["cells"] if "tokens_per_second" in cell]
    assert all(0 < cell["lowest"] <= cell["tokens_per_second"] <= cell["highest"] for cell in rates)
    rates = [cell["acceptance"] for cell in rates if cell["method"] == "fixed"]
    assert len(rates) == 4 and sum(rates) / 4 == pytest.approx(shape["target"]["acceptance"], abs=0.1)
    assert all(what.startswith("busy:") for what in whys_of(content))  # a CPU cannot tell
    unknown = [figure["name"] for figure in content["figures"] if figure["value"] is None]
    assert unknown[0] == f"{faults.KILLED}: everything"
    words = ("busy ms", "host share", "kernels", "busy / floor", "kernels a layer", "fused body: ms a layer")
    assert all(name.endswith(words) for name in unknown[1:])
    printed = capsys.readouterr().out
    assert "synthetic tiny" in printed and "tokens/s" in printed and "not measured" in printed
    assert "fixed: acceptance" in printed


# --------------------------------------------------------------------------------------------------- time and trouble


def test_without_time_every_cell_is_reported_as_not_measured(record):
    content = record(*QUICK, "--warm-seconds", "1e6")
    whys = whys_of(content)
    cells = [*cells_of_config(content)]
    assert len(cells) > 30 and all("no time: about" in why and "s left" in why for why in whys.values())
    # What compiles has an estimate of its own.
    assert [method for method, *_ in cells_of(content)] == ["compiled layers", "hf static"]
    assert len(whys) == len(cells) - 2


def test_a_cell_is_skipped_when_too_little_time_is_left(monkeypatch, record):
    def slow(*given):
        now[0] += 100
        return Rate(1.0, 1.0, 1.0, 1, 1.0, 48.0)

    now = [0.0]
    for module in (gpu, gpu_shape):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gpu_shape, "rate_of", slow)
    content = record(*ONE, "--minutes", "4.16")
    assert [method for method, *_ in cells_of(content)][:2] == ["plain", "fixed"]
    assert ("adaptive", 1, 48) not in cells_of(content)
    assert whys_of(content)["adaptive, batch 1, context 48"] == "no time: about 100 s needed, 50 s left"


def test_without_memory_cells_are_reported_as_not_measured(monkeypatch, record):
    monkeypatch.setattr(gpu_shape, "free_bytes", lambda device: 2e6)
    content = record(*QUICK, "--contexts", "48", "--batch-sizes", "1", "64", "--peer-batch-sizes", "2")
    assert ("plain", 1, 48) in cells_of(content) and ("plain", 64, 48) not in cells_of(content)
    assert "GiB free" in whys_of(content)["plain, batch 64, context 48"]


def test_one_failure_costs_one_cell(monkeypatch, record):
    def failing(target, kind, *given):
        raise torch.OutOfMemoryError("too much") if kind == "hf" else RuntimeError("no such\ncache")

    monkeypatch.setattr(gpu_shape, "peer_rate", failing)
    content = record(*ONE)
    whys = whys_of(content)
    assert whys["hf, batch 1, context 48"] == "out of memory"
    assert whys["hf static, batch 1, context 48"] == "RuntimeError: no such cache"
    assert {*OURS} <= {method for method, *_ in cells_of(content)} and content["complete"]


def test_a_lost_context_costs_one_cell_and_a_process(monkeypatch, record):
    def losing(target, kind, *given):
        raise torch.AcceleratorError(f"CUDA error: lost by {kind}")

    made, measure = [], gpu.measure_shape
    monkeypatch.setattr(gpu_shape, "peer_rate", losing)
    monkeypatch.setattr(gpu, "measure_shape", lambda *given: made.append(given[1]) or measure(*given))
    content = record(*ONE)
    assert made == ["tiny"] * 4  # once more after each of the three ways to decode that transformers has
    cells = [method for method, *_ in cells_of(content)]
    assert {*OURS} <= {*cells} and len(cells) == len({*cells}) and content["complete"]
    whys = {what: why for what, why in whys_of(content).items() if what.startswith("hf")}
    lost = {f"{kind}, batch 1, context 48": f"AcceleratorError: CUDA error: lost by {kind}" for kind in TRANSFORMERS}
    assert whys == lost


def test_a_target_that_cannot_be_made_is_tried_once(monkeypatch, record):
    def losing(*given, **options):
        raise torch.AcceleratorError("CUDA error: lost at once")

    monkeypatch.setattr(gpu_shape, "synthetic_target", losing)
    content = record(*QUICK)
    assert whys_of(content) == {"opening": "AcceleratorError: CUDA error: lost at once"}
    assert content["figures"][0]["why"] == "the target could not be made"


def test_a_run_that_is_cut_short_keeps_what_it_had(monkeypatch, tmp_path):
    def cut(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_in_process", here)
    monkeypatch.setattr(gpu_shape, "peer_rate", cut)
    assert main([*ONE, "--output", str(tmp_path)]) == 130
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["complete"] is False and [method for method, *_ in cells_of(content)] == [*OURS, "costs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "grace", "why", "last"),
    [
        (faults.finish, 60.0, None, {"number": 3, "done": True}),
        (faults.fail, 60.0, "ValueError: no such thing", {"number": 3}),
        (faults.hang, 0.0, "it exceeded its time by 0 s and was killed", None),
    ],
)
def test_records_sent_by_a_process_are_saved_at_once(work, grace, why, last, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", grace)
    kept = [None]
    assert gpu.run_in_process(work, (3,), perf_counter() + 0.5, kept.append) == why
    assert kept[-1] == last


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "this machine has no CUDA device; --config"),
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


def test_shapes_have_shares_of_the_time_and_the_first_a_minimum(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "perf_counter", lambda: 0.0)
    for minutes, ends in [(1, (60, 30)), (4, (160, 120)), (16, (576, 480))]:
        config = GpuConfig(shapes=("llama-3-8b", "tiny", "llama-2-7b"), minutes=minutes)
        run = gpu.Run(config, tmp_path / "gpu.json")
        assert (run.end_of(0), run.end_of(1)) == pytest.approx(ends)
