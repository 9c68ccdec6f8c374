"""`python -m eval serve`: loads of a running server, and a folder that resumes."""

from __future__ import annotations

import json

import pytest

from eval.__main__ import main
from eval.config import FOLDER
from eval.serve import ServeConfig
from eval.serve_client import command_of
from eval.serve_report import summarise
from tests.eval.openai_server import serving
from train.configuration import read_config


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


def rows_of(folder):
    return [json.loads(line) for line in (folder / "run" / "loads.jsonl").read_text().splitlines()]


def test_a_run_writes_loads_record_and_tables_and_resumes(tmp_path, capsys):
    flags = ["--num-requests", "4", "--output-tokens", "2", "5", "--prompt-tokens", "3", "6", "--warmups", "0"]
    flags += ["--policies", "theirs", "--loads", "1", "2", "--output", str(tmp_path / "run")]
    with serving() as (url, _):
        flags += ["--server", url]
        assert main(["serve", *flags]) == 0
        first, shown = rows_of(tmp_path), capsys.readouterr().out
        assert [row["burstiness"] for row in first] == [1, 1, 1, 0.25, 0.25]
        assert first[0]["rate"] is None and len({row["rate"] for row in first[1:]}) == 2  # all at once, and two shares
        record = json.loads((tmp_path / "run" / "serve.json").read_text())
        assert len(record["summary"]["loads"]) == 4 and {p["failed"] for p in record["summary"]["policies"]} == {0}
        assert "Poisson arrivals" in shown and "coefficient of variation 2" in shown
        assert (tmp_path / "run" / "serve.md").read_text() == shown

        whole = (tmp_path / "run" / "loads.jsonl").read_bytes()
        (tmp_path / "run" / "loads.jsonl").write_bytes(whole[:-20])  # stopped within a line
        assert main(["serve", *flags]) == 0
        again = rows_of(tmp_path)
        assert again[:-1] == first[:-1] and again[-1]["rate"] == first[-1]["rate"]

        assert main(["serve", *flags, "--seed", "5"]) == 2
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
        ({"goodput": ("ttft:fast",)}, "goodput: ttft must be milliseconds"),
    ],
)
def test_a_wrong_configuration_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServeConfig(**given)


def test_stored_configurations_are_valid():
    assert read_config(ServeConfig, FOLDER / "serve.yaml").model == "smollm2"
    assert read_config(ServeConfig, FOLDER / "serve_live.yaml").policies == ("plain", "adaptive")
