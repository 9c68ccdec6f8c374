"""`python -m eval replay` end to end on a tiny model: tables, a JSON document, files, one sentence for an error."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from eval import compare
from eval.__main__ import main
from eval.compare import BOUNDS
from eval.config import MEASURED, REPLAY, ReplayConfig, Task, load_replay_config
from eval.questions import read_questions
from eval.traces import load, save
from selfspec import load as load_model
from selfspec.calibrate.profile import store_prior
from selfspec.control.acceptance import Tracker
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.registry import POLICIES
from selfspec.control.rows import RowState
from selfspec.drafting.row_lookup import RowLookup
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
    keys = {"lengths": [6, 12], "head_layers": [MEASURED, 2], "repeats": 1}
    task = {"name": "code", "model": str(folder), "questions": "two.jsonl"}
    path.write_text(yaml.safe_dump({"tasks": [task], **keys}))
    return path


@pytest.fixture
def files(tmp_path):
    """Traces of two tasks, and costs that fit them."""
    traces = [dataclasses.replace(random_trace(seed, 4, 20), task=task) for seed, task in enumerate(("a", "b", "a"))]
    save(traces, tmp_path / "traces.npz")
    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(4).as_dict()))
    return ["--traces", str(tmp_path / "traces.npz"), "--costs", str(tmp_path / "costs.json")]


def test_a_run_prints_tables_and_then_one_json_document_and_writes_files(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    assert main(["replay", "--config", str(config), "--output", str(out), "--record-traces", str(kept)]) == 0
    printed = capsys.readouterr()
    *tables, last = printed.out.splitlines()
    record = json.loads(last)
    assert json.loads((out / "replay.json").read_text()) == record
    found = [(section["length"], section["head_layers"]) for section in record["sections"]]
    assert found == [(6, MEASURED), (6, 2), (12, MEASURED), (12, 2)]
    for section in record["sections"]:
        rows = {row["name"]: row for row in section["rows"]}
        assert list(rows) == [*POLICIES, *BOUNDS]
        assert rows["plain"]["speedup"]["code"] == rows["plain"]["mean"] == pytest.approx(1)
        static, stopped, by_exit, clairvoyant = (rows[name]["mean"] for name in BOUNDS)
        assert static <= stopped <= by_exit <= clairvoyant
        assert all(rows[name]["tasks"]["code"]["num_tokens"] == 2 * section["length"] for name in POLICIES)
    assert all(any(name in line for line in tables) for name in (*POLICIES, *BOUNDS))
    assert record["tasks"][0]["model"]["num_layers"] == 4 and "commit" in record["environment"]
    assert Costs.from_dict(json.loads((out / "costs.json").read_text())["code"]).num_layers == 4
    assert [len(trace.tokens) for trace in load(kept / "code.npz")] == [12, 12]
    assert "<svg" in (out / "policies.svg").read_text()
    assert "measuring costs" in printed.err


def test_what_a_run_wrote_can_be_replayed_without_its_model(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    first = ["replay", "--config", str(config), "-q", "--output", str(out), "--record-traces", str(kept)]
    assert main([*first, "--exit-layer", "2", "--num-draft-tokens", "3"]) == 0
    before = json.loads(capsys.readouterr().out)
    again = ["--traces", str(kept / "code.npz"), "--costs", str(out / "costs.json"), "-q"]
    (tmp_path / "other.yaml").write_text(
        "lengths: [6, 12]\nhead_layers: [measured, 2]\nexit_layer: 2\nnum_draft_tokens: 3"
    )
    assert main(["replay", "--config", str(tmp_path / "other.yaml"), *again]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["tasks"][0]["model"] is None
    for here, there in zip(before["sections"], after["sections"], strict=True):
        for a, b in zip(here["rows"], there["rows"], strict=True):
            assert (a["name"], a["mean"]) == (b["name"], pytest.approx(b["mean"], rel=1e-4))


def sure_of(layer, num_layers=4):
    """Statistics of a model whose layer is always right, and the others never."""
    tracker = Tracker(num_layers)
    for other in range(1, num_layers):
        tracker.add(other, [other == layer] * 300, [0.9] * 300)
    return tracker.state()


def planned(trace, costs, prior):
    (done,) = compare.play("adaptive:exit", [trace], costs, prior=prior)
    return [round_.plan.exit_layer for round_ in done.rounds]


def test_another_head_is_counted_in_layers_and_changes_nothing_else():
    costs = made_up_costs(8)
    other = compare.with_head(costs, 2.0)
    assert other.head(1) == pytest.approx(2 * costs.plain(1) / 8)
    assert other.head(8) / other.head(1) == pytest.approx(costs.late[1](8) / costs.late[1](1))
    assert other.early_pass(3, 2) == costs.early_pass(3, 2) and other.plain_round(1) > costs.plain_round(1)
    assert compare.with_head(costs, 0.0).head(16) == 0


def test_a_fresh_adaptive_begins_with_the_statistics_it_is_given():
    trace, costs = random_trace(0, 4, 40), made_up_costs(4)
    assert planned(trace, costs, sure_of(2))[:3] == [2] * 3
    assert planned(trace, costs, None)[0] == 1  # the cheapest draft is tried where nothing is known


def test_traces_bring_the_statistics_stored_with_their_model_and_replay_may_leave_them_out(
    folder, config, tmp_path, capsys
):
    kept = tmp_path / "kept"
    shown = ["--config", str(config), "-q", "--lengths", "12", "--head-layers", "0", "--policies", "adaptive:exit"]

    def mean(*given):
        assert main(["replay", *shown, *given]) == 0
        record = json.loads(capsys.readouterr().out)
        return record["sections"][0]["rows"][0]["mean"], record["tasks"][0]["has_prior"]

    (tmp_path / "costs.json").write_text(json.dumps(made_up_costs(4).as_dict()))
    costs = ["--costs", str(tmp_path / "costs.json")]
    before = mean(*costs)
    path = store_prior(folder, load_model(folder).stack, sure_of(1))
    try:
        stored = mean(*costs, "--record-traces", str(kept))
    finally:
        path.unlink()
    again = ["--traces", str(kept / "code.npz"), *costs]
    assert before[1] is False and stored[1] is True and before[0] != stored[0]
    assert mean(*again) == stored  # of the file: the folder has none any more
    assert mean(*again, "--prior", "none") == (before[0], True)


def test_statistics_of_another_model_beside_traces_are_refused(files, tmp_path, capsys):
    save([random_trace(0, 4, 20)], tmp_path / "traces.npz", sure_of(1, num_layers=5))
    assert main(["replay", "-q", *files]) == 2
    assert capsys.readouterr().err.startswith("eval: the statistics beside the traces of the task 'made up' are of")


def test_files_alone_give_every_task_a_column_and_every_start_a_row(files, capsys):
    shown = ["--lengths", "8", "--head-layers", "0", "--starts", "fresh", "warm"]
    assert main(["replay", *files, *shown]) == 0
    printed = capsys.readouterr()
    *tables, last = printed.out.splitlines()
    (section,) = json.loads(last)["sections"]
    names = [(row["name"], row["start"]) for row in section["rows"]]
    assert names == [(n, "fresh") for n in POLICIES] + [("adaptive", "warm")] + [(n, None) for n in BOUNDS]
    for row in section["rows"]:
        assert list(row["speedup"]) == ["a", "b"]
        assert row["mean"] == pytest.approx(sum(row["speedup"].values()) / 2, rel=1e-4)
    assert [line.split("|")[2:5] for line in tables if line.startswith("|  ")] == [["     a ", "     b ", "  mean "]]
    assert any("adaptive, warm" in line for line in tables)
    assert "loading" not in printed.err


def test_a_task_of_the_command_line_joins_those_of_the_file_and_sampling_is_recorded(config, folder, tmp_path, capsys):
    given = ["--task", "more", str(folder), str(tmp_path / "two.jsonl"), "--temperature", "0.7", "--seed", "5"]
    few = ["--lengths", "6", "--head-layers", MEASURED, "--policies", "plain", "--num-questions", "1", "-q"]
    assert main(["replay", "--config", str(config), *given, *few]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(task["name"], task["num_prompts"]) for task in record["tasks"]] == [("code", 1), ("more", 1)]
    assert [row["name"] for row in record["sections"][0]["rows"]] == ["plain", *BOUNDS]


def test_sources_of_drafts_are_compared_by_name(files, capsys):
    names = ["adaptive", "adaptive:exit", "adaptive:exit+tree", "adaptive:exit+copies+lookup+tree"]
    shown = ["--lengths", "20", "--head-layers", MEASURED, "--starts", "fresh", "warm", "--policies", *names]
    assert main(["replay", *files, "-q", *shown]) == 0
    rows = json.loads(capsys.readouterr().out)["sections"][0]["rows"]
    assert [row["name"] for row in rows] == [*names, *names, *BOUNDS]
    speedups = {(row["name"], row["start"]): row["speedup"] for row in rows}
    for start in ("fresh", "warm"):
        assert speedups["adaptive", start] == speedups["adaptive:exit+copies+lookup+tree", start]
    policies = [compare.make(name, made_up_costs(4)) for name in names]
    rows = [RowState(0, 20, 100, RowLookup([1, 2] * 10))]
    assert [policy.plan(rows).lookups is not None for policy in policies] == [True, False, False, True]


@pytest.mark.parametrize("kind", ["new", "random"])
def test_renumbered_all_sources_are_set_beside_the_exit_chain(files, kind, capsys):
    shown = ["--lengths", "20", "--head-layers", MEASURED, "--starts", "fresh", "warm", "--renumbered", kind]
    assert main(["replay", *files, *shown]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["sections"][0]["rows"]
    assert [row["name"] for row in rows] == ["adaptive:exit", "adaptive"] * 2 + [*BOUNDS]
    chain, own = rows[0]["tasks"], rows[1]["tasks"]
    mean = (chain["a"]["seconds"] / own["a"]["seconds"] + chain["b"]["seconds"] / own["b"]["seconds"]) / 2
    pairs = [zip(chain[task]["seconds_by_prompt"], own[task]["seconds_by_prompt"], strict=True) for task in "ab"]
    least = min(a / b for each in pairs for a, b in each)
    assert f"| adaptive, fresh | {mean:.3f}, {least:.3f} |" in tables
    assert sum(line.startswith("| adaptive, fresh") for line in tables) == 3  # by task, of the chain, of the bounds
    assert sum(line.endswith(f"every token replaced by a {kind} one") for line in tables) == 2


def test_every_prompt_has_a_new_policy_and_warm_one_goes_on_for_other_rows(monkeypatch):
    made, make, forgot = [], compare.make, []

    def counting(name, costs, *rest):
        made.append((make(name, costs, *rest), rest[-1]))
        return made[-1][0]

    forget = Adaptive.forget_rows
    monkeypatch.setattr(Adaptive, "forget_rows", lambda policy: forgot.append(policy) or forget(policy))
    monkeypatch.setattr(compare, "make", counting)
    traces, costs = [random_trace(seed, 4, 40) for seed in range(3)], made_up_costs(4)
    stored = sure_of(1)
    for is_warm in (False, True):
        played = list(compare.play("adaptive", traces, costs, is_warm, prior=stored))
        assert [done.num_tokens for done in played] == [40] * 3
    assert [prior for _, prior in made] == [stored] * 4
    assert len({id(policy) for policy, _ in made}) == 4 and forgot == [made[3][0]] * 2


def test_a_policy_that_chooses_its_exit_is_not_told_one(files, capsys):
    results = []
    for told in ([], ["--exit-layer", "3", "--num-draft-tokens", "1"]):
        shown = ["--lengths", "20", "--head-layers", MEASURED, "--policies", "adaptive", "del", "fixed"]
        assert main(["replay", *files, *shown, "-q", *told]) == 0
        (section,) = json.loads(capsys.readouterr().out)["sections"]
        results.append([row["mean"] for row in section["rows"][:3]])
    first, second = results
    assert first[:2] == second[:2] and first[2] != second[2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--lengths", "0"], "lengths must be numbers of at least 1, got [0]"),
        (["--head-layers", "none"], "head_layers must be numbers of at least 0 or 'measured', got ['none']"),
        (["--renumbered", "old"], "renumbered must be among ('no', 'new', 'random'), got 'old'"),
        (["--prior", "mine"], "prior must be among ('stored', 'none'), got 'mine'"),
        (["--starts", "hot"], "starts must be among ('fresh', 'warm'), got ['hot']"),
        (["--policies", "best"], f"policies must be among {', '.join(POLICIES)}, or such as adaptive:exit or"),
        (["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        (["--costs", "nowhere.json"], "cannot read the costs 'nowhere.json'"),
        (["--traces", "nowhere.npz"], "cannot read the traces 'nowhere.npz'"),
        (["--task", "more", "no/such/model", "q.jsonl"], "there is no folder no/such/model"),
        (["--exit-layer", "9"], "exit_layer must lie in 1..3 for this model, got 9"),
    ],
)
def test_what_is_not_possible_is_one_sentence_and_exit_code_two(config, given, sentence, capsys):
    assert main(["replay", "--config", str(config), "-q", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"eval: {sentence}")
    assert len(printed.err.splitlines()) == 1


def test_files_that_do_not_fit_are_named(files, config, tmp_path, capsys):
    traces, costs = files[:2], tmp_path / "costs.json"
    assert main(["replay", "-q", *traces]) == 2
    told = capsys.readouterr().err
    assert told == "eval: the task 'a' has no costs: give --costs FILE, or --task a MODEL QUESTIONS\n"
    costs.write_text(json.dumps({"a": made_up_costs(4).as_dict(), "b": made_up_costs(5).as_dict()}))
    assert main(["replay", "-q", *files]) == 2
    assert capsys.readouterr().err == "eval: the costs of the task 'b' are of 5 layers, its traces of 4\n"
    for content in ("", "[]", "{}", '{"a": 1}', '{"num_layers": 4}'):
        costs.write_text(content)
        assert main(["replay", "-q", *files]) == 2
        assert capsys.readouterr().err.startswith("eval: cannot read the costs")
    (tmp_path / "empty.yaml").write_text("")
    assert main(["replay", "-q", "--config", str(tmp_path / "empty.yaml")]) == 2
    assert capsys.readouterr().err.startswith("eval: there is nothing to replay")


def test_the_shipped_file_holds_every_key_with_a_sentence_and_the_dataclass_defaults():
    text = REPLAY.read_text()
    assert list(yaml.safe_load(text)) == [key.name for key in dataclasses.fields(ReplayConfig)]
    lines = text.splitlines()
    keys = [i for i, line in enumerate(lines) if line and line[0] not in "# "]
    assert all(lines[i - 1].startswith("# ") for i in keys)
    shipped = load_replay_config(REPLAY)
    assert dataclasses.replace(shipped, tasks=()) == ReplayConfig()
    (task,) = shipped.tasks
    assert (task.name, task.model, len(read_questions(task.questions))) == ("code", "demo", 12)
    stories = read_questions(REPLAY.parent / "stories.jsonl")
    assert len({question.turns for question in stories}) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length: 3", "no key 'length'; known keys: tasks"),
        ("lengths: 3", "lengths must be a list, got 3"),
        ("head_layers: [true]", "head_layers must be of type float, got True"),
        ("head_layers: [.nan]", "head_layers must be numbers of at least 0 or 'measured', got [nan]"),
        ("head_layers: []", "head_layers must be numbers of at least 0 or 'measured', got []"),
        ("tasks: [code]", "tasks must be mappings of name, model, questions, got 'code'"),
        ("tasks: [{name: code}]", "tasks must be mappings of name, model, questions, got {'name': 'code'}"),
        ("tasks: [{name: a, model: b, questions: 3}]", "tasks: questions must be of type str, got 3"),
        ("repeats: 0", "repeats must be at least 1, got 0"),
        ("temperature: .inf", "temperature must be at least 0, got inf"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "replay.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_replay_config(tmp_path / "replay.yaml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_given_tasks_replace_those_of_the_same_name_and_no_name_is_there_twice(config, tmp_path):
    own = Task("code", "demo", "other.jsonl")
    assert load_replay_config(config, (own,)).tasks == (own,)
    assert load_replay_config(config).tasks[0].questions == str(tmp_path / "two.jsonl")
    with pytest.raises(ValueError, match="tasks must be of different names"):
        load_replay_config(config, (own, own))


def test_means_stand_beside_those_of_the_bounds(files, capsys):
    names = ["adaptive", "adaptive:exit", "fixed", "pld"]
    assert main(["replay", *files, "--lengths", "20", "--head-layers", MEASURED, "2", "--policies", *names]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    shown = {name: line for name in names for line in lines if line.startswith(f"| {name} ") and line.count(",") == 4}
    for at, section in enumerate(json.loads(last)["sections"]):
        means = {row["name"]: row["mean"] for row in section["rows"]}
        for name in names:
            told = [f"{means[name] / means[bound]:.3f}" for bound in BOUNDS[1:]]
            assert shown[name].split("|")[2 + at].strip() == ", ".join(told)
