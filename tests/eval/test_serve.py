"""`python -m eval serve`: a server in virtual time, loads of a running server, and a folder that resumes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml

from eval.__main__ import main
from eval.config import FOLDER
from eval.replay import make, replay
from eval.serve import ServeConfig
from eval.serve_client import command_of
from eval.serve_load import arrival_times, output_lengths
from eval.serve_report import summarise
from eval.serve_simulate import SimulatedServer
from eval.serve_synthetic import GPUS, acceptance_of, gpu_costs, synthetic_traces
from eval.shapes import config_of
from eval.traces import save
from selfspec.control.costs import Costs
from tests.eval.openai_server import serving
from tests.eval.replays import made_up_costs, random_trace
from train.configuration import read_config

LAYERS = 8


@pytest.fixture(scope="module")
def costs():
    return made_up_costs(LAYERS, rows=(1, 4, 8))


@pytest.fixture(scope="module")
def traces():
    pool = synthetic_traces(LAYERS, 8, 24, 24, 0.8, seed=1)
    return [pool[i % 8].cut(n) for i, n in enumerate(output_lengths(200, (2, 24)))]


def serve(policy, costs, traces, rate, **options):
    one = SimulatedServer(make(policy, costs), costs, options.pop("max_batch_size", 4), **options)
    return one.serve(traces, arrival_times(len(traces), rate))


@pytest.mark.parametrize("policy", ["plain", "fixed", "synergy", "smartspec", "dsde", "adaptive"])
def test_every_request_gets_all_its_tokens_and_a_run_repeats(costs, traces, policy):
    served = serve(policy, costs, traces, 20.0)
    assert [(one.num_prompt, one.num_output, one.error) for one in served] == [(24, len(t.tokens), "") for t in traces]
    assert [one.sent for one in served] == arrival_times(200, 20.0)
    assert all(one.sent < one.deliveries[0] and [*one.deliveries] == sorted(one.deliveries) for one in served)
    if policy in ("plain", "adaptive"):
        assert serve(policy, costs, traces, 20.0) == served


def test_an_idle_server_takes_the_seconds_of_replay(costs, traces):
    """Requests far apart are served one by one: prefill, and the rounds of `replay` with the same policy."""
    few = traces[:6]
    served = serve("fixed:2,3", costs, few, 1e-3)
    for one, trace in zip(served, few, strict=True):
        alone = replay([trace], make("fixed:2,3", costs), costs)
        num_read = trace.prompt_length - 1
        reading = costs.verify(0, 1, num_read, num_read / 2) - costs.head(num_read)
        assert one.e2el == pytest.approx(alone.round_seconds + reading)


def test_rows_wait_for_a_place_and_for_cached_tokens(costs, traces):
    same = [traces[0].cut(10)] * 12
    wide, narrow = (serve("plain", costs, same, np.inf, max_batch_size=n) for n in (12, 2))
    tight = serve("plain", costs, same, np.inf, max_batch_size=12, max_cached_tokens=2 * (24 + 10 - 1))
    assert [one.deliveries for one in narrow] == [one.deliveries for one in tight]
    assert len({one.deliveries[-1] for one in narrow}) == 6 and len({one.deliveries[-1] for one in wide}) == 1
    with pytest.raises(ValueError, match="the largest needs 33"):
        serve("plain", costs, same, np.inf, max_cached_tokens=32)


def test_a_long_prompt_is_read_in_chunks_beside_running_rows(costs):
    short, long = (synthetic_traces(LAYERS, 1, n, 30, 0.8)[0] for n in (8, 200))
    served = SimulatedServer(make("plain", costs), costs, 4, prefill_chunk=20).serve([short, long], [0.0, 0.01])
    between = [at for at in served[0].deliveries if at < served[1].deliveries[0]]
    assert len(between) >= 200 // 20  # the short one goes on between two chunks


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


def test_policies_are_compared_with_the_first_at_the_same_rates():
    def cell(policy, rate, tpot, good):
        requests = [{"ttft": 1.0, "tpot": tpot, "e2el": 9.0, "error": "" if i < good else "gone"} for i in range(10)]
        figures = {"p50_tpot_ms": tpot, "p50_ttft_ms": 1.0, "failed": 10 - good, "duration": 10 / rate}
        return {"policy": policy, "rate": rate, "burstiness": 1.0, "figures": figures, "requests": requests}

    cells = [cell("plain", 1.0, 4.0, 10), cell("plain", 5.0, 9.0, 8), cell("fixed", 1.0, 3.0, 9)]
    cells += [cell("fixed", 5.0, 7.0, 10), {**cell("plain", 9.0, 1.0, 1), "rate": None}]
    found = summarise(cells, ["tpot:2x"])
    assert found["limits"] == {"tpot": 8.0}
    assert [(r["policy"], r["rate"], r["request_goodput"]) for r in found["loads"]] == [
        ("plain", 1.0, 1.0),
        ("fixed", 1.0, 0.9),
        ("plain", 5.0, 0.0),
        ("fixed", 5.0, 5.0),
    ]
    plain, fixed = found["policies"]
    assert (fixed["mean_request_goodput"], fixed["failed"]) == (pytest.approx(2.95), 1)
    assert fixed["tpot_over_base_at_lowest_rate"] == 0.75
    assert fixed["lowest_goodput_over_base"] == 0.9  # where plain has none, there is no ratio
    assert plain["lowest_goodput_over_base"] == 1.0


@pytest.fixture
def simulated(tmp_path):
    """Flags of a small simulated run on recorded outputs."""
    outputs = [dataclasses.replace(random_trace(seed, 4, 20, prompt_length=9), task="a") for seed in range(3)]
    save(outputs, tmp_path / "traces.npz")
    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(4).as_dict()))
    keys = {"simulate": True, "traces": "traces.npz", "costs": "costs.json", "num_requests": 12}
    keys |= {"output_tokens": [3, 9], "loads": [0.1, 1], "policies": ["plain", "fixed"]}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(keys))
    return [str(path), "--output", str(tmp_path / "run")]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "run" / "loads.jsonl").read_text().splitlines()]


def test_a_run_writes_loads_record_tables_and_figure_and_resumes(simulated, tmp_path, capsys):
    assert main(["serve", *simulated]) == 0
    first, shown = rows_of(tmp_path), capsys.readouterr().out
    by_rate = [(row["policy"], row["burstiness"]) for row in first[1:]]  # the first has all requests at once
    assert by_rate == [("plain", 1), ("fixed", 1)] * 2 + [("plain", 0.25), ("fixed", 0.25)] * 2
    assert first[0]["rate"] is None and len({row["rate"] for row in first[1:]}) == 2
    record = json.loads((tmp_path / "run" / "serve.json").read_text())
    assert len(record["summary"]["loads"]) == 8 and {p["failed"] for p in record["summary"]["policies"]} == {0}
    assert "Poisson arrivals" in shown and "coefficient of variation 2" in shown
    assert (tmp_path / "run" / "serve.md").read_text() == shown
    assert "requests per second" in (tmp_path / "run" / "serve.svg").read_text()

    whole = (tmp_path / "run" / "loads.jsonl").read_bytes()
    (tmp_path / "run" / "loads.jsonl").write_bytes(whole[: len(whole) * 3 // 4])  # stopped within a line
    assert main(["serve", *simulated, "--policies", "plain", "fixed", "dsde"]) == 0
    again = rows_of(tmp_path)
    assert [row for row in again if row["policy"] != "dsde"] == first and len(again) == len(first) + 4

    assert main(["serve", *simulated, "--seed", "5"]) == 2
    assert "a folder of a run with the same seed" in capsys.readouterr().err


def test_a_running_server_is_measured(tmp_path, capsys):
    flags = ["--num-requests", "4", "--output-tokens", "2", "5", "--prompt-tokens", "3", "6", "--warmups", "1"]
    with serving() as (url, asked):
        flags += ["--server", url, "--rates", "200", "--burstiness", "1", "--output", str(tmp_path / "run")]
        assert main(["serve", *flags, "--policies", "theirs"]) == 0
        assert len(asked) == 5 and {body["model"] for _, body in asked} == {"tiny"}
        assert {len(body["prompt"]) for _, body in asked} <= {3, 4, 5, 6}
        assert main(["serve", *flags]) == 2
        assert "one name for the running server" in capsys.readouterr().err
    (row,) = rows_of(tmp_path)
    assert (row["policy"], row["figures"]["completed"]) == ("theirs", 4)


def test_a_server_that_fails_the_first_request_ends_the_run(tmp_path, capsys):
    flags = ["--policies", "theirs", "--rates", "5", "--output", str(tmp_path / "run")]
    with serving(status=500) as (url, _):
        assert main(["serve", *flags, "--server", url]) == 2
    assert "failed the first request: 500" in capsys.readouterr().err and not rows_of_or_none(tmp_path)


def rows_of_or_none(folder):
    return rows_of(folder) if (folder / "run" / "loads.jsonl").exists() else []


def test_the_command_of_a_server_has_the_flags_of_its_policy():
    config = ServeConfig(model="a model", command="{python} -m selfspec serve {model} --port {port} {speculation}")
    program = command_of(config, "fixed:4,2")[1:]
    assert program[:5] == ["-m", "selfspec", "serve", "a model", "--port"] and program[5] == "{port}"
    assert program[6:] == ["--policy", "fixed", "--exit-layer", "4", "--num-speculative-tokens", "2"]
    assert command_of(config, "adaptive:exit+copies")[-2:] == ["--drafters", "exit,copies"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policies": ("plain", "fast")}, "method 'fast' is unknown"),
        ({"prompt_tokens": (9, 3)}, "prompt_tokens must be two numbers"),
        ({"rates": (2.0, 2.0)}, "rates must be different values"),
        ({"burstiness": (0.0,)}, "burstiness must be numbers above 0"),
        ({"gpu": "h20"}, "gpu 'h20' is unknown; did you mean 'h200'"),
        ({"goodput": ("ttft:fast",)}, "goodput: ttft must be milliseconds"),
        ({"simulate": True, "server": "http://x", "policies": ("x",)}, "server must be left out"),
    ],
)
def test_a_wrong_configuration_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServeConfig(**given)


def test_stored_configurations_are_valid():
    assert read_config(ServeConfig, FOLDER / "serve_h200.yaml").simulate
    assert not read_config(ServeConfig, FOLDER / "serve.yaml").simulate
    assert read_config(ServeConfig, FOLDER / "serve_live.yaml").policies == ("plain", "adaptive")


def test_costs_and_traces_of_different_models_are_refused(simulated, tmp_path, capsys):
    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(5).as_dict()))
    assert main(["serve", *simulated]) == 2
    assert "the costs are of 5 layers" in capsys.readouterr().err
