"""A device that is not here: costs by its bandwidth and FLOP/s, and outputs of a set acceptance."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eval.shapes import config_of
from eval.virtual import GPUS, acceptance_of, gpu_costs, synthetic_traces
from selfspec.control.costs import Costs


def test_computed_costs_follow_bandwidth_then_arithmetic_and_can_be_stored():
    config, gpu = config_of("llama-3-8b"), GPUS["h200"]
    costs = gpu_costs(config, gpu)
    weights = 2 * sum((32 * 218_103_808, 4096 * 128256))  # bytes of the layers' matrices and of the head
    lost = 33 * gpu.gap + gpu.round + gpu.row + gpu.pick
    assert costs.plain_round(1) == pytest.approx(weights / gpu.bandwidth + lost, rel=2e-3)
    assert costs.plain_round(64) < 1.25 * costs.plain_round(1)
    many = costs.verify(0, 1, 2048) - costs.head(2048) - 32 * gpu.gap - gpu.round
    assert many == pytest.approx(2 * 32 * 218_103_808 * 2048 / gpu.flops, rel=1e-3)
    one = 2 * 2 * 8 * 128 / gpu.bandwidth  # keys and values of a token in a layer
    assert costs.plain_round(3, 1064) - costs.plain_round(3, 64) == pytest.approx(32 * 3 * 1000 * one)
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


def test_synthetic_outputs_have_the_acceptance_asked_for():
    traces = synthetic_traces(32, 60, 40, 200, 0.7)
    found = np.mean([trace.hits.mean(1) for trace in traces], axis=0)
    assert found[7] == pytest.approx(0.7, abs=0.04) and np.all(np.diff(found) >= -0.01)
    assert np.allclose(found, acceptance_of(0.7, 32), atol=0.08)
    spread = np.std([trace.hits[7].mean() for trace in traces])
    sure = np.concatenate([trace.confidences[7] for trace in traces])
    right = np.concatenate([trace.hits[7] for trace in traces])
    assert spread > 0.05 and sure[right].mean() > sure[~right].mean() + 0.2
    again = synthetic_traces(32, 60, 40, 200, 0.7)
    assert all(np.array_equal(a.hits, b.hits) and a.tokens == b.tokens for a, b in zip(traces, again, strict=True))
