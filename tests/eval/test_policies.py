"""`python -m eval replay` on a tiny model: tables, JSON document, files, and errors in one sentence."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from eval.__main__ import main
from eval.config import FOLDER, config_of
from eval.models import open_llm
from eval.policies import BOUNDS, compare
from eval.replay import make, replay
from eval.tasks import Recorded, ReplayConfig, Task
from eval.traces import load, save
from selfspec.calibrate.profile import store_prior
from selfspec.control.acceptance import Tracker
from selfspec.control.costs import Costs
from selfspec.control.registry import POLICIES
from selfspec.core import Request, Sequence
from selfspec.drafting.lookup import RowLookup
from tests.control.rounds import settled
from tests.eval.models import save_model
from tests.eval.replays import made_up_costs, random_trace

QUESTIONS = ["def f(x):\n", "for name in names:\n    print("]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(folder, tmp_path):
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    path = tmp_path / "replay.yaml"
    keys = {"lengths": [6, 12], "repeats": 1}
    task = {"name": "code", "model": str(folder), "questions": "two.jsonl"}
    path.write_text(yaml.safe_dump({"tasks": [task], **keys}))
    return path


@pytest.fixture
def files(tmp_path):
    """Traces of two tasks and matching costs."""
    traces = [dataclasses.replace(random_trace(seed, 4, 20), task=task) for seed, task in enumerate(("a", "b", "a"))]
    save(traces, tmp_path / "traces.npz")
    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(4).as_dict()))
    return ["--traces", str(tmp_path / "traces.npz"), "--costs", str(tmp_path / "costs.json")]


def rows_of(capsys, *given):
    """The rows of the only section of the record, by name."""
    assert main(["replay", *map(str, given)]) == 0
    (section,) = json.loads(capsys.readouterr().out.splitlines()[-1])["sections"]
    return {row["name"]: row for row in section["rows"]}


def test_a_run_prints_tables_and_one_json_document_and_writes_files(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    assert main(["replay", str(config), "--output", str(out), "--record-traces", str(kept)]) == 0
    printed = capsys.readouterr()
    *tables, last = printed.out.splitlines()
    record = json.loads(last)
    assert json.loads((out / "replay.json").read_text()) == record
    assert [section["length"] for section in record["sections"]] == [6, 12]
    for section in record["sections"]:
        rows = {row["name"]: row for row in section["rows"]}
        assert list(rows) == [*POLICIES, *BOUNDS]
        assert rows["plain"]["speedup"]["code"] == rows["plain"]["mean"] == pytest.approx(1)
        static, by_exit, clairvoyant = (rows[name]["mean"] for name in BOUNDS)
        assert static <= by_exit <= clairvoyant
        assert all(rows[name]["tasks"]["code"]["num_tokens"] == 2 * section["length"] for name in POLICIES)
    assert all(any(name in line for line in tables) for name in (*POLICIES, *BOUNDS))
    assert record["tasks"][0]["model"]["num_layers"] == 4 and "commit" in record["environment"]
    assert Costs.from_dict(json.loads((out / "costs.json").read_text())["code"]).num_layers == 4
    assert [len(trace.tokens) for trace in load(kept / "code.npz")[0]] == [12, 12]
    assert "measuring costs" in printed.err


def test_written_traces_can_be_replayed_without_the_model(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    shown = ["--lengths", "12", "--exit-layer", "2", "--num-speculative-tokens", "3"]
    before = rows_of(capsys, config, "--output", out, "--record-traces", kept, *shown)
    after = rows_of(capsys, "--traces", kept / "code.npz", "--costs", out / "costs.json", *shown)
    assert list(before) == list(after)
    for name, row in before.items():
        assert row["mean"] == pytest.approx(after[name]["mean"], rel=1e-4)


def test_policies_are_named_as_methods_are(files, capsys):
    names = [
        "adaptive",
        "adaptive:exit",
        "adaptive:exit+copies",
        "adaptive:exit+copies+lookup",
        "fixed:2,3",
        "fixed",
    ]
    told = ["--exit-layer", "2", "--num-speculative-tokens", "3"]
    rows = rows_of(capsys, *files, "--lengths", "20", *told, "--policies", *names)
    assert list(rows) == [*names, *BOUNDS]
    assert rows["adaptive"]["speedup"] == rows["adaptive:exit+copies+lookup"]["speedup"]
    assert rows["fixed:2,3"]["speedup"] == rows["fixed"]["speedup"] != rows["adaptive"]["speedup"]
    states = [Sequence(0, Request([1]), [1, 2] * 10, 120, new_lookup=RowLookup)]
    policies = [make(name, made_up_costs(4)) for name in names[:4]]
    planned = [settled(policy, *states).plan(states) for policy in policies]
    assert [plan.lookups is not None for plan in planned] == [True, False, False, True]


# ----------------------------------------------------------------------------------------------- stored statistics


def sure_of(layer, num_layers=4):
    """Statistics where one layer always hits and the others never do."""
    tracker = Tracker(num_layers)
    for other in range(1, num_layers):
        tracker.add(other, [other == layer] * 300, [0.9] * 300)
    return tracker.state()


def test_adaptive_starts_every_prompt_with_the_given_statistics():
    trace, costs = random_trace(2, 4, 80), made_up_costs(4)

    def planned(prior):
        rounds = replay([trace], make("adaptive:exit", costs, prior=prior), costs).rounds
        return [round_.plan.exit_layer for round_ in rounds if round_.plan.exit_layer]

    assert planned(sure_of(2))[:1] == [2]
    assert planned(None)[0] == 1  # the cheapest draft is tried where nothing is known
    config = ReplayConfig(lengths=(40,), policies=("adaptive:exit",))
    task = Recorded("made up", [trace, trace], costs, prior=sure_of(2))
    (section,) = compare([task], config)
    one, other = section["rows"][0]["tasks"]["made up"]["seconds_by_prompt"]
    assert one == other  # the second prompt knows nothing of the first


def test_trace_files_include_statistics_and_replay_can_ignore_them(folder, config, tmp_path, capsys):
    kept = tmp_path / "kept"
    shown = [config, "--lengths", "12", "--policies", "adaptive:exit"]
    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(4).as_dict()))
    costs = ["--costs", tmp_path / "costs.json"]

    def mean(*given):
        return rows_of(capsys, *shown, *costs, *given)["adaptive:exit"]["mean"]

    before = mean()
    path = store_prior(folder, open_llm(str(folder)).target.split, sure_of(1))
    try:
        stored = mean("--record-traces", kept)
    finally:
        path.unlink()
    again = ["--traces", kept / "code.npz"]
    assert stored != before and mean(*again) == stored  # of the file: the folder has none any more
    assert mean(*again, "--prior", "none") == before


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--lengths", "0"], "lengths must be numbers of at least 1, got [0]"),
        (["--policies", "best"], "method 'best' is unknown"),
        (
            ["--policies", "transformers"],
            f"policies must be among {', '.join(POLICIES)}, or such as adaptive:exit+copies",
        ),
        (["--traces", "nowhere.npz"], "cannot read the traces 'nowhere.npz'"),
        (["--exit-layer", "9"], "exit_layer must lie in 1..3 for this model, got 9"),
    ],
)
def test_invalid_options_give_one_sentence_and_exit_code_2(config, given, sentence, capsys):
    assert main(["replay", str(config), *given]) == 2
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if not line.startswith("[")]  # but for progress
    assert printed.out == "" and len(said) == 1 and said[0].startswith(f"eval: {sentence}")


def test_inconsistent_files_are_named(files, tmp_path, capsys):
    def refused(*given):
        assert main(["replay", *given]) == 2
        return "".join(line for line in capsys.readouterr().err.splitlines(True) if not line.startswith("["))

    costs = tmp_path / "costs.json"
    assert refused(*files[:2]) == "eval: the task 'a' has no costs: give --costs FILE, or --task a MODEL QUESTIONS\n"
    costs.write_text(json.dumps({"a": made_up_costs(4).as_dict(), "b": made_up_costs(5).as_dict()}))
    assert refused(*files) == "eval: the costs of the task 'b' are of 5 layers, its traces of 4\n"
    for content in ("", "[]", "{}", '{"a": 1}', '{"num_layers": 4}'):
        costs.write_text(content)
        assert refused(*files).startswith("eval: cannot read the costs")
    (tmp_path / "none.yaml").write_text("tasks: []\n")
    assert refused(str(tmp_path / "none.yaml")).startswith("eval: there is nothing to replay")


def test_the_shipped_files_name_the_embedded_models_code():
    config = config_of(ReplayConfig, FOLDER / "replay.yaml")
    assert config.tasks == [Task("code", "demo", str(FOLDER / "prompts.jsonl"))]
    assert dataclasses.replace(config, tasks=[]) == ReplayConfig()
