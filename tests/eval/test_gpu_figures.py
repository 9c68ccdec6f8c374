"""`python -m eval gpu`: its figures, what it measures and how, and the order of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from eval import gpu_layers, gpu_rates
from eval.config import FOLDER
from eval.gpu_clock import counted
from eval.gpu_figures import TARGETS, figures
from eval.gpu_layers import Layers
from eval.gpu_plan import TEMPERATURE, Cell, GpuConfig, cells_of
from eval.gpu_rates import WARM_ROUNDS, busy_rounds, pauses, prefill_seconds, rate_of, ready_engine
from eval.gpu_shape import sizes_of
from eval.models import decode
from eval.synthetic import synthetic_target
from selfspec.model.kv_cache import PackedRows, Span
from tests.cuda.standin import with_runner

LARGE_VOCABULARY = {"vocab_size": 32768, "num_hidden_layers": 8}  # `fixed` drafts over an eighth of it


def record_of(cells, missing=(), **config):
    """A record of one shape, llama-3-8b, on a device that copies 4 TB/s."""
    shape = {
        "target": {"exit_layer": 4, "num_layers": 32, "wanted": 0.8},
        "sizes": {"read_bytes": 15e9, "head_bytes": 1e9, "draft_head_bytes": 0.25e9, "kv_bytes_per_token": 131072},
        "speed": {"copy_bytes_per_second": 4e12},
        "not_measured": [{"what": what, "why": why} for what, why in missing],
        "cells": cells,
    }
    about = {"contexts": [1024], "batch_sizes": [1, 64], "peer_batch_sizes": [1], "peer": [], **config}
    return {"shapes": {"llama-3-8b": shape}, "config": about}


def rate(method, batch, rate, **more):
    cell = {"context": 1024, "batch": batch, "method": method, "tokens_per_second": rate, "mean_context": 1024}
    return {**cell, "rounds": rate / batch, "seconds": 1.0, **more}


def cell(method, batch, **more):
    return {"context": 1024, "batch": batch, "method": method, **more}


def test_figures_follow_from_the_cells():
    bodies = {
        "views": {"seconds": 2e-4, "kernels": 33.0, "why": None},
        "fused body": {"seconds": 1e-4, "kernels": 10.0, "why": None},
    }
    cells = [
        rate("plain", 1, 200.0),
        rate("fixed", 1, 300.0, rounds=100, acceptance=0.85),
        rate("fixed:2", 1, 310.0),
        rate("adaptive", 1, 320.0),
        rate("plain", 64, 4e3),
        rate("adaptive", 64, 3800.0),
        rate("plain, exact", 1, 160.0),
        rate("hf", 1, 40.0),
        cell("busy:plain", 1, busy_seconds=0.0048, kernels=330, launches=3),
        cell("costs", 1, plain=0.005, fixed=0.0125),
        cell("layers", 1, bodies=bodies, chosen="fused body"),
        cell("prefill", 1, seconds=0.05, steps_seconds=0.06, peer_seconds=0.04),
        cell("pause", 1, longest_seconds=0.02, round_seconds=0.005),
        cell("attention", 1, seconds=1e-5),
    ]
    found = figures(record_of(cells, [("busy:fixed, batch 1, context 1024", "out of memory")]))
    values = {f.name.split(": ", 1)[1]: round(f.value, 3) for f in found if f.value is not None}
    # A round reads all weights but the embedding, and 1,024 tokens' keys and values: 15.134 GB at 4 TB/s.
    assert values["plain, batch 1: wall ms"] == 5 and values["plain, batch 1: floor ms"] == 3.784
    assert values["plain, batch 1: busy / floor"] == 1.269 and values["plain, batch 1: wall / floor"] == 1.322
    assert values["plain, batch 1: host share"] == 0.04 and values["plain, batch 1: kernels"] == 330
    # Layers 1.5 times (4 of 32 for each of 4 drafts), the head once, and a quarter of it for each of 4 drafts.
    assert values["fixed, batch 1: floor ms"] == 5.8 and values["fixed, batch 1: wall / predicted"] == 0.8
    assert values["fixed, batch 1: speedup over plain"] == 1.5
    assert values["adaptive, batch 1: over the best fixed"] == 1.032
    assert values["adaptive: lowest speedup over plain"] == 0.95
    assert values["batch 1: kernels a layer"] == 10
    assert values["batch 1, fused body, chosen: ms a layer"] == 0.1 and values["batch 1, views: ms a layer"] == 0.2
    assert values["exact mode, batch 1: seconds over the ordinary mode's"] == 1.25
    assert values["prefill, 1024 tokens: seconds over those of generate"] == 1.25
    assert values["longest pause of a running row while 1024 tokens are read, ms"] == 20
    assert values["attention, batch 1, context 1024: ms a layer"] == 0.01
    assert values["attention, batch 1, context 1024: over floor"] == 9.537
    assert values["batch 1: fastest over generate"] == 8 and values["plain, batch 1: over hf"] == 5
    whys = {f.name.split(": ", 1)[1]: f.why for f in found if f.value is None}
    assert whys["fixed, batch 1: host share"] == "busy:fixed, batch 1, context 1024: out of memory"
    assert whys["plain, batch 64: busy ms"] == "busy:plain, batch 64, context 1024: the configuration leaves it out"


def test_the_lowest_speedup_is_of_all_batch_sizes():
    found = {f.name: f for f in figures(record_of([rate("plain", 1, 200.0), rate("adaptive", 1, 200.0)]))}
    lowest = found["llama-3-8b: adaptive: lowest speedup over plain"]
    assert (lowest.value, lowest.why) == (None, "measured at 1 of 2 batch sizes only")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ({"acceptance": 0.15}, "acceptance 0.15 seen, 0.8 wanted"),
        ({"acceptance": 0.95}, "acceptance 0.95 seen, 0.8 wanted"),
        ({}, "no acceptance seen, 0.8 wanted"),
    ],
)
def test_a_speedup_of_fixed_is_judged_only_where_the_acceptance_is_the_wanted_one(seen, why):
    cells = [rate("plain", 1, 200.0), rate("fixed", 1, 300.0, **seen)]
    found = {f.name: f for f in figures(record_of(cells))}["llama-3-8b: fixed, batch 1: speedup over plain"]
    assert (found.value, found.why) == (None, why)


def test_every_target_has_a_figure_and_a_row_in_the_docs():
    text = (FOLDER.parents[1] / "docs" / "measurements.md").read_text()
    config = {"contexts": [1024, 8192], "batch_sizes": [1, 32, 8], "peer_batch_sizes": [1, 8, 32]}
    names = {f.name: f.target for f in figures(record_of([], **config))}
    for name, target in TARGETS["llama-3-8b"].items():
        assert names[f"llama-3-8b: {name}"] == target
        assert f"| {name} | {target} |" in text
    for name, target in TARGETS["smollm2-135m"].items():
        assert f"llama-3-8b: {name}" in names and f"| {name} | {target} |" in text


def test_the_first_cells_are_those_of_rounds_and_bodies():
    cells = [*cells_of(GpuConfig())]
    assert len(cells) == len({*cells})
    first = [c for c in cells if c.kind in ("plain", "busy", "fixed", "adaptive") and c.batch in (1, 32)][:10]
    assert {c.context for c in first} == {1024} and max(cells.index(c) for c in first) < 15
    bodies = cells.index(Cell(1024, 32, "layers"))
    assert bodies < cells.index(Cell(1024, 8, "adaptive")) < cells.index(Cell(1024, 1, "plain, exact"))
    assert cells[-1] == Cell(1024, 1, "hf static")


def test_copied_kv_caches_equal_those_of_a_prefill():
    target = synthetic_target("tiny", acceptance=None)
    engine = ready_engine(target, 3, 40, 24, policy="plain")
    prompts = [row.content[:] for row in engine.rows]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    texts = {row.request_id: [] for row in engine.rows}
    for round_ in engine.run():
        for row in round_.rows:
            texts[row.request_id] += row.tokens
    assert [texts[done.request_id] == done.tokens for done in decode(target, prompts, 24)] == [True] * 3


def test_a_rate_counts_the_tokens_of_the_measurement():
    target = synthetic_target("tiny", acceptance=None)
    rate = rate_of(ready_engine(target, 2, 20, 60, policy="plain", burst=0.0), warm=0.0, window=1e9)
    rounds = 60 - WARM_ROUNDS
    assert rate.rounds == rounds and rate.plans == {"plain": rounds} and rate.acceptance is None
    assert rate.tokens_per_second == pytest.approx(2 * rounds / rate.seconds)
    assert rate.mean_context == (20 + WARM_ROUNDS + 80) / 2


@pytest.mark.parametrize("shape", [{}, LARGE_VOCABULARY], ids=["tiny", "large vocabulary"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rate_has_the_acceptance_that_its_target_promises(shape, seed):
    target = synthetic_target("tiny", seed=seed, temperature=TEMPERATURE, **shape)
    assert target.stack.default_draft_vocab == (4096 if shape else None)
    options = {"policy": "fixed", "exit_layer": 1, "num_draft_tokens": 4, "burst": 0.0}
    rate = rate_of(ready_engine(target, 8, 1024, 120, **options), warm=0.0, window=1e9)
    assert rate.acceptance == pytest.approx(0.8, abs=0.05)
    assert abs(target.made.acceptance - 0.8) < 0.01


@pytest.mark.parametrize("opened", [lambda target: target, with_runner], ids=["without graphs", "stand-in"])
def test_layers_in_static_rows_are_those_of_the_stack(opened):
    """What is timed as a layer is one: layers over static rows give the hidden states of packed rows."""
    target = opened(synthetic_target("tiny", acceptance=None))
    engine, before = ready_engine(target, 2, 20, 24, policy="plain"), target.stack.compiled
    with torch.inference_mode(), gpu_layers.views(target.stack) as run:
        layers = Layers(engine)
        found = run(layers.rows(), 1, 5, layers.inputs.given)
        spans = [Span(row.pages, len(row.content) - 1, 1) for row in engine.rows]
        rows = PackedRows(engine.cache, spans, target.stack.device)
        wanted = target.stack.run_here(rows, 1, 5, layers.inputs.given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        assert layers.measure(run)["why"] == "graphs are recorded only on a CUDA device"
    assert target.stack.compiled is before


def test_the_fused_body_is_measured_where_the_load_did_not_choose_it():
    stack = synthetic_target("tiny", acceptance=None).stack
    layers = Layers(ready_engine(synthetic_target("tiny", acceptance=None), 2, 20, 24, policy="plain"))
    with torch.inference_mode():
        with gpu_layers.fused_body(stack, layers.kernels) as run:
            found = run(layers.rows(), 1, 5, layers.inputs.given)
        with gpu_layers.views(stack) as run:
            wanted = run(layers.rows(), 1, 5, layers.inputs.given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert stack.recorded is None


def test_a_layer_is_the_difference_between_many_and_fewer(monkeypatch):
    ran = []

    def run(rows, start, stop, given):
        ran.append((start, stop))
        return given

    monkeypatch.setattr(gpu_layers, "seconds_of", lambda replay, device: replay() or 0.5 + ran[-1][1])
    monkeypatch.setattr(gpu_layers, "_count", lambda recorded, device: recorded.replay() or 7 + 10 * ran[-1][1])
    layers = Layers(ready_engine(synthetic_target("tiny", acceptance=None), 1, 20, 24, policy="plain"))
    assert layers.measure(run) == {"seconds": 1, "kernels": 10, "why": None}
    assert {*ran} == {(1, 4), (1, 7)}  # neither the embedding nor the final norm


def test_a_profile_is_counted_without_the_hosts_time():
    def event(key, device, count, micros):
        return SimpleNamespace(key=key, device_type=device, count=count, self_device_time_total=micros)

    events = [
        event("gemm", DeviceType.CUDA, 4, 3000),
        event("Memcpy DtoH (Device -> Pinned)", DeviceType.CUDA, 1, 500),
        event("cudaGraphLaunch", DeviceType.CPU, 2, 3500),
        event("aten::mm", DeviceType.CPU, 4, 3000),
    ]
    assert counted(events) == (0.0035, 4, 2)


@pytest.mark.slow
def test_busy_time_is_that_of_replays_where_the_profiler_is_refused(monkeypatch):
    def refused(call, device):
        call()
        raise ValueError("no kernels")

    monkeypatch.setattr(gpu_rates, "kernels_of", refused)
    monkeypatch.setattr(gpu_rates, "Recorded", lambda body, device: SimpleNamespace(num_nodes=len(body())))
    target = with_runner(synthetic_target("tiny", acceptance=None))
    found = busy_rounds(ready_engine(target, 1, 20, 200, policy="plain", burst=0.0))
    assert found["way"] == "replays of the graph" and found["busy_seconds"] > 0 and found["kernels"] == 1
    with pytest.raises(ValueError, match="no kernels"):  # nothing is recorded
        busy_rounds(ready_engine(synthetic_target("tiny", acceptance=None), 1, 20, 200, policy="plain", burst=0.0))


def test_prefill_and_pauses_are_measured_over_whole_prompts():
    target = synthetic_target("tiny", acceptance=None)
    read = []
    counted = gpu_rates.prefill

    def prefill(stack, cache, picker, rows, budget, policy):
        before = sum(row.num_cached for row in rows)
        counted(stack, cache, picker, rows, budget, policy)
        read.append(sum(row.num_cached for row in rows) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rates, "prefill", prefill)
        found = prefill_seconds(target, 60)
    assert {*read} == {60} and min(found.values()) > 0
    assert pauses(target, 60)["longest_seconds"] > 0


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_those_of_the_weights(tied):
    target = synthetic_target("tiny", acceptance=None, tie_word_embeddings=tied)
    sizes = sizes_of(target)
    weights = sum(p.nbytes for p in target.model.parameters())
    assert sizes["weight_bytes"] == weights and sizes["head_bytes"] == 1024 * 64 * 4
    assert weights - sizes["read_bytes"] == (0 if tied else 1024 * 64 * 4)
    assert sizes["kv_bytes_per_token"] == 2 * 2 * 16 * 8 * 4
    assert sizes["draft_head_bytes"] == sizes["head_bytes"]


def test_drafts_read_the_heads_rows_of_the_draft_vocabulary():
    sizes = sizes_of(synthetic_target("tiny", acceptance=None, **LARGE_VOCABULARY))
    assert sizes["draft_head_bytes"] == sizes["head_bytes"] / 8
