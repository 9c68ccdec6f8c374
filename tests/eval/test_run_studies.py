"""Studies of a run on a tiny model: what they hold, that a kill or an impossible one costs nothing, what is refused."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eval.compare import BOUNDS
from eval.config import LiveConfig
from eval.live import fixed, way_of
from eval.live_timing import Scene, call
from eval.methods import Endless
from eval.replay import replay
from eval.run import drawing
from eval.run.__main__ import main
from eval.run.config import RUN, STUDY_SIZES, load_run_config
from eval.run.lines import FullError
from eval.run.studies import NAMES, batch, grid, runner
from eval.run.studies.acceptance import MOST, acceptance
from eval.run.studies.material import Material, choose
from eval.run.studies.runner import STUDIES, missing, run_studies, study_path
from eval.run.turns import Prompt
from selfspec import load
from selfspec.control.registry import POLICIES
from selfspec.legacy import LoadedTarget as Target
from tests.eval.models import save_model
from tests.eval.replays import made_up_costs, trace_of
from tests.models import build

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["def f(x):\n", "and then"]},
    {"question_id": 2, "category": "loops", "turns": ["for name in names:\n    print("]},
    {"question_id": 3, "category": "loops", "turns": ["xy"]},
]
SMALL = ["--study-questions", "2", "--study-tokens", "5"]
SIZES = {"study_questions": 2, "study_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run(model, tmp_path, out, monkeypatch):
    """`run(...)` of a tiny configuration takes further options; it draws no figures, which `finished` has."""
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    config = write(model, tmp_path)
    return lambda *options: main([str(config), "--output", str(out), *SMALL, *options])


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """The folder of a run that has made all studies."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SIZES", (1, 2))
        assert main([str(write(model, folder)), "--output", str(folder / "out"), *SMALL, "--studies", *NAMES]) == 0
    return folder / "out"


def write(model, folder):
    """A tiny configuration and its questions."""
    (folder / "three.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    keys = {"questions": "three.jsonl", "max_new_tokens": 7, "resamples": 20, "warmups": 0, "cost_repeats": 1}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), "methods": ["plain"], **keys}))
    return path


def material_at(temperature):
    """Two prompts of a tiny target, with made-up costs."""
    prompts = [Prompt(i, 0, "", ids, 9, seed=i) for i, ids in enumerate(([5, 6, 7], [8, 9, 10, 11, 12]))]
    target = Endless(Target(build("llama")))
    return Material(target, prompts, temperature, 6, 9, lambda: made_up_costs(4), cost_repeats=1, say=lambda text: None)


@pytest.fixture
def material():
    return material_at(0.0)


def study(out, name):
    return json.loads(study_path(out, name).read_text())


def made(out):
    return sorted(file.name for file in (out / "studies").iterdir()) if (out / "studies").exists() else []


def fails(problem):
    def study(material):
        raise problem

    return study


def test_a_run_makes_all_studies(finished):
    assert made(finished) == sorted(f"{name}.json" for name in NAMES)
    assert json.loads((finished / "summary.json").read_text())["complete"]
    about = json.loads((finished / "environment.json").read_text())
    assert about["costs"]["num_layers"] == 4  # no method needed them, the studies did
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert not {"study_questions", "study_tokens", "studies"} & set(config)
    assert all(SIZES.items() <= study(finished, name).items() for name in NAMES)
    assert {file.stem for file in (finished / "figures").iterdir()} >= set(NAMES)


def test_studies_come_after_the_questions(run, capsys):
    assert run("--studies", "acceptance") == 0
    said = capsys.readouterr().err
    assert said.index("3 of 3 answers") < said.index("study: acceptance") < said.index("question 2 of 2")


def test_acceptance_of_a_run_is_that_of_its_layers(finished, model):
    found = study(finished, "acceptance")
    assert list(found) == ["study", "num_layers", "num_questions", "num_tokens", "exits", *SIZES]
    assert (found["num_layers"], found["num_questions"], found["num_tokens"]) == (4, 2, 14)
    assert [each["exit_layer"] for each in found["exits"]] == [1, 2, 3]
    target = Endless(load(str(model)))
    for each in found["exits"]:
        assert len(each["joint"]) == len(each["conditional"]) == 8 and each["joint"][7:] == [None]
        for drafted in (1, 3):
            wanted, places = 0, 0
            for question in (QUESTIONS[0], QUESTIONS[1]):
                prompt = target_ids(model, question["turns"][0])
                tokens = target.generate([prompt], policy="plain", max_new_tokens=7)[0].tokens
                for at in range(7 - drafted + 1):
                    drafts = draft(target, [*prompt, *tokens[:at]], each["exit_layer"], drafted)
                    wanted, places = wanted + (drafts == tokens[at : at + drafted]), places + 1
            assert each["joint"][drafted - 1] == wanted / places


def target_ids(model, text):
    return [int(i) for i in load(str(model)).tokenizer(text)["input_ids"]]


def draft(target, content, exit_layer, count):
    """What the first layers write by themselves, one token after another, with the model's own norm and head."""
    drafted = []
    for _ in range(count):
        rounds = target.stream(
            [[*content, *drafted]], policy="fixed", exit_layer=exit_layer, num_draft_tokens=1, max_new_tokens=2
        )
        first = next(r for r in rounds if r.rows and r.rows[0].drafted)
        drafted.append(first.rows[0].drafted[0])
    return drafted


def by_hand(hits, drafted):
    """Joint acceptance, window by window."""
    windows = [each[i : i + drafted] for each in hits for i in range(len(each) - drafted + 1)]
    return sum(all(window) for window in windows) / len(windows) if windows else None


def traces(hits):
    """Traces of two layers, the first of which is right where told."""
    rng = np.random.default_rng(0)
    return [trace_of(np.array([each]), rng.random((1, len(each)), np.float32), rng) for each in hits]


def test_acceptance_by_hand():
    found = acceptance(traces([[True, True, False, True], [False, True, True]]), 1)
    assert found["joint"] == [5 / 7, 2 / 5, 0, 0, *[None] * 4]
    assert found["conditional"] == [5 / 7, 2 / 3, 0, None, *[None] * 4]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4))
def test_acceptance_counts_windows(hits):
    found = acceptance(traces(hits), 1)
    assert found["joint"] == [by_hand(hits, i) for i in range(1, MOST + 1)]
    for i, conditional in enumerate(found["conditional"], 1):
        windows = [each[at : at + i] for each in hits for at in range(len(each) - i + 1)]
        begun = [all(window) for window in windows if all(window[:-1])]
        assert conditional == (sum(begun) / len(begun) if begun else None)


@given(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=1, max_size=4))
def test_acceptance_falls_along_drafts_of_outputs_of_one_length(hits):
    joint = acceptance(traces(hits), 1)["joint"]
    assert joint == sorted(joint, reverse=True) and all(0 <= share <= 1 for share in joint)


def test_the_grid_has_a_figure_for_every_setting(finished):
    found = study(finished, "grid")
    assert found["exit_layers"] == list(LiveConfig().exits_of(4)) == [1, 2]
    assert found["draft_lengths"] == [1, 2, 3, 4, 6, 8] and (found["num_questions"], found["tokens"]) == (2, 5)
    for name in ("tokens_per_second", "predicted_speedup"):
        assert [len(row) for row in found[name]] == [6, 6] and all(cell > 0 for row in found[name] for cell in row)
    speedups = np.array(found["tokens_per_second"]) / found["plain_tokens_per_second"]
    for best, cells in (("best", speedups), ("predicted_best", np.array(found["predicted_speedup"]))):
        at = np.unravel_index(cells.argmax(), cells.shape)
        told = found[best]
        assert told["exit_layer"] == found["exit_layers"][at[0]]
        assert told["draft_length"] == found["draft_lengths"][at[1]]
        assert told["speedup"] == pytest.approx(speedups[at])
    assert found["predicted_best"]["predicted_speedup"] == np.max(found["predicted_speedup"])


def test_the_grid_is_predicted_by_replay(material):
    costs = made_up_costs(4)
    scene = material.scene(6, costs)
    ways = [[fixed(costs, 1, 2), fixed(costs, 3, 4)]]
    ratios = []
    for way in ways[0]:
        plain, own = (
            [replay([t], w.make(), costs).seconds for t in scene.traces] for w in (way_of(scene, "plain"), way)
        )
        ratios.append(sum(a / b for a, b in zip(plain, own, strict=True)) / 2)  # of two, the median is the mean
    assert grid.predicted(scene, ways) == [pytest.approx(ratios)]


def test_batches_are_timed_over_plain_decoding(finished):
    found = study(finished, "batch")
    assert found["batch_sizes"] == [1, 2] and found["tokens"] == 5
    adaptive, best = found["methods"]
    assert (adaptive["method"], best["method"]) == ("adaptive", "best fixed") and "settings" not in adaptive
    for each in (adaptive, best):
        assert [list(speedup) for speedup in each["speedup"]] == [["median", "low", "high"]] * 2
        assert all(0 < s["low"] <= s["median"] <= s["high"] for s in each["speedup"])
    assert all(tuple(map(int, setting.split(","))) for setting in best["settings"]) and len(best["settings"]) == 2


def test_batches_that_memory_does_not_hold_are_left_out(material, monkeypatch):
    monkeypatch.setattr(batch, "free_bytes", lambda device: 0.0)
    assert batch.affordable((1, 2, 4), material, 20) == [1]
    monkeypatch.setattr(batch, "free_bytes", lambda device: float("inf"))
    assert batch.affordable((1, 2, 4), material, 20) == [1, 2, 4]


def test_policies_and_bounds_are_replayed(finished):
    found = study(finished, "policies")
    assert (found["length"], found["num_questions"]) == (7, 2)  # max_new_tokens, not study_tokens
    kinds = Counter(row["kind"] for row in found["rows"])
    assert kinds == {"policy": len(POLICIES), "bound": len(BOUNDS)}
    assert [row["name"] for row in found["rows"]][: len(POLICIES)] == list(POLICIES)
    speedups = {row["name"]: row["speedup"] for row in found["rows"]}
    assert speedups["plain"] == pytest.approx(1)
    assert speedups["clairvoyant"] >= speedups["best static (E, D, stop)"] >= speedups["best static (E, D)"] >= 1


def test_answers_end_at_the_end_of_text_and_what_is_timed_does_not(material):
    whole = material.answers()
    assert [len(trace.tokens) for trace in whole] == [9, 9]
    material.eos = frozenset(whole[0].tokens[:1])
    cut = material.answers()
    assert cut[0].tokens == whole[0].tokens[:1] and cut[0].hits.shape[1] == 1
    scene = material.scene(6, made_up_costs(4))
    assert [trace.tokens for trace in scene.traces] == [trace.tokens[:6] for trace in whole]
    assert [len(tokens) for tokens in call(scene, way_of(scene, "plain"), 2).tokens] == [6, 6]
    material.eos = frozenset(trace.tokens[0] for trace in whole)
    assert STUDIES["policies"](material)["length"] == 1 and STUDIES["acceptance"](material)["num_tokens"] == 2


def test_a_run_that_stops_at_the_end_of_text_studies_its_answers(run, out, monkeypatch):
    assert run() == 0
    answers = (out / "answers" / "plain.jsonl").read_text().splitlines()
    end = json.loads(answers[0])["choices"][0]["tokens"][0][2]
    monkeypatch.setattr(Target, "eos_token_ids", property(lambda target: frozenset({end})))
    lengths = {}
    for name, options in (("ended", []), ("endless", ["--ignore-eos"])):
        folder = out.with_name(name)
        assert run("--studies", "acceptance", "--output", str(folder), *options) == 0
        rows = [json.loads(line) for line in (folder / "answers" / "plain.jsonl").read_text().splitlines()]
        lengths[name] = sum(row["choices"][0]["new_tokens"][0] for row in rows[:2])
        assert study(folder, "acceptance")["num_tokens"] == lengths[name]
    assert lengths["ended"] < lengths["endless"] == 14


def test_sampled_output_is_studied_as_sampled(material):
    scene = material_at(1.0).scene(6, made_up_costs(4))
    for other in (scene, scene.filled(2), scene.only(1)):
        done = call(other, fixed(scene.costs, 2, 3), 2)
        assert done.tokens == [list(trace.tokens) for trace in other.traces]
    greedy = material.scene(6, made_up_costs(4))
    assert [t.tokens for t in greedy.traces] != [t.tokens for t in scene.traces]
    assert isinstance(greedy, Scene) and call(greedy, way_of(greedy, "plain"), 2).tokens[0] == list(
        greedy.traces[0].tokens
    )


def test_a_study_that_is_there_is_not_made_again_and_one_that_is_killed_is(run, out, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(STUDIES, "grid", fails(KeyboardInterrupt()))
        assert run("--studies", "acceptance", "grid") == 130
    printed = capsys.readouterr()
    assert printed.out.startswith("# Run report") and "same command" in printed.err
    assert made(out) == ["acceptance.json"] and json.loads((out / "summary.json").read_text())["complete"]
    with monkeypatch.context() as patch:
        patch.setitem(STUDIES, "acceptance", fails(AssertionError("made again")))
        assert run("--studies", "acceptance", "grid") == 0
    assert made(out) == ["acceptance.json", "grid.json"] and "error" not in study(out, "acceptance")
    assert study(out, "grid")["tokens"] == 5


def test_a_kill_while_a_file_is_written_leaves_none(run, out, monkeypatch):
    def killed(path, text):
        path.parent.mkdir(exist_ok=True)
        path.with_name(path.name + ".new").write_text(text[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "replace_text", killed)
        assert run("--studies", "acceptance") == 130
    assert missing(out, ["acceptance"], SIZES) == ["acceptance"]
    assert run("--studies", "acceptance") == 0
    assert made(out) == ["acceptance.json"] and study(out, "acceptance")["num_tokens"] == 14


def test_a_finished_run_may_be_given_another_study(run, out):
    assert run() == 0 and made(out) == []
    answers = (out / "answers" / "plain.jsonl").read_bytes()
    assert run("--studies", "acceptance") == 0 and made(out) == ["acceptance.json"]
    assert run() == 0 and made(out) == ["acceptance.json"]
    assert (out / "answers" / "plain.jsonl").read_bytes() == answers


def test_a_study_of_another_size_is_measured_anew(run, out, capsys):
    assert run("--studies", "acceptance") == 0 and "measured anew" not in capsys.readouterr().err
    answers = (out / "answers" / "plain.jsonl").read_bytes()
    assert run("--study-questions", "1") == 0 and study(out, "acceptance")["num_questions"] == 2  # it was not asked for
    assert run("--studies", "acceptance", "--study-questions", "1") == 0
    said = [line for line in capsys.readouterr().err.split("\n") if "measured anew" in line]
    assert len(said) == 1 and "not of study_questions 1 and study_tokens 5" in said[0]
    assert study(out, "acceptance")["num_questions"] == 1
    assert (out / "answers" / "plain.jsonl").read_bytes() == answers


def test_sizes_that_a_file_of_an_older_version_lacks_are_the_defaults(tmp_path):
    (tmp_path / "studies").mkdir()
    study_path(tmp_path, "grid").write_text('{"study": "grid"}')
    assert missing(tmp_path, ["grid"], STUDY_SIZES) == [] and missing(tmp_path, ["grid"], SIZES) == ["grid"]
    study_path(tmp_path, "grid").write_text('{"stu')
    assert missing(tmp_path, ["grid"], STUDY_SIZES) == ["grid"]


def test_a_disk_that_is_full_is_no_result_of_a_study(run, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(STUDIES, "grid", fails(FullError("no room left")))
        assert run("--studies", "acceptance", "grid") == 1
    assert made(out) == ["acceptance.json"] and missing(out, ["grid"], SIZES) == ["grid"]


def test_a_study_that_cannot_be_done_says_why_and_the_others_go_on(run, out, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(STUDIES, "grid", fails(RuntimeError("out of\nmemory")))
        assert run("--studies", "grid", "acceptance") == 0
    assert study(out, "grid") == {"study": "grid", "error": "RuntimeError: out of memory", **SIZES}
    assert "study grid: RuntimeError: out of memory" in capsys.readouterr().err
    assert study(out, "acceptance")["num_tokens"] == 14


def test_what_cannot_be_gathered_is_said_in_every_study(tmp_path):
    gather = fails(ValueError("there is\nnothing to study"))
    run_studies(tmp_path, ["grid", "policies"], SIZES, lambda: gather(None), lambda text: None)
    for name in ("grid", "policies"):
        assert study(tmp_path, name) == {"study": name, "error": "there is nothing to study", **SIZES}


def test_a_model_of_two_layers_has_a_single_exit(material, monkeypatch):
    monkeypatch.setattr(batch, "SIZES", (1, 2))
    material.target, material.costs = Endless(Target(build("llama", num_hidden_layers=2))), lambda: made_up_costs(2)
    found = {name: STUDIES[name](material) for name in NAMES}
    assert [each["exit_layer"] for each in found["acceptance"]["exits"]] == found["grid"]["exit_layers"] == [1]
    assert all(setting.startswith("1,") for setting in found["batch"]["methods"][1]["settings"])
    assert len(found["policies"]["rows"]) == len(POLICIES) + len(BOUNDS)


def test_questions_beyond_the_context_are_left_out_and_when_all_are_it_is_said(run, out, tmp_path):
    long = {"question_id": "long", "category": "writing", "turns": ["x" * 3000]}
    (tmp_path / "three.jsonl").write_text(json.dumps(long) + "\n" + json.dumps(QUESTIONS[2]) + "\n")
    assert run("--studies", "acceptance") == 0 and study(out, "acceptance")["num_questions"] == 1
    (tmp_path / "three.jsonl").write_text(json.dumps(long) + "\n")
    other = out.with_name("other")
    assert run("--studies", "acceptance", "--output", str(other)) == 0
    assert "no question leaves room" in study(other, "acceptance")["error"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--studies", "acceptence"], "study 'acceptence' is unknown; did you mean 'acceptance'"),
        (["--studies", "grid", "grid"], "studies must be different names"),
        (["--study-questions", "0"], "study_questions must be at least 1"),
        (["--study-tokens", "0"], "study_tokens must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(options, words, run, capsys):
    assert run(*options) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_default_run_makes_every_study():
    assert load_run_config(RUN).studies == tuple(STUDIES) == NAMES


def test_questions_of_a_study_come_evenly_from_all_categories():
    assert choose([c for c in "abcdef" for _ in range(8)], 6) == [0, 8, 16, 24, 32, 40]
    assert choose(list("aaaab"), 3) == [0, 2, 4]
    assert choose(list("abab"), 10) == [0, 1, 2, 3]
    assert choose(list("abcdef"), 3) == [0, 2, 4]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20), st.integers(1, 24))
def test_as_many_questions_as_asked_for_from_as_many_categories_as_can_be(categories, count):
    chosen = choose(categories, count)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(count, len(categories))
    shares = Counter(categories[i] for i in chosen)
    assert len(shares) == min(count, len(set(categories)))
