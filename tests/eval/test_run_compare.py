"""Comparisons of two runs, paired by question, with ratios that can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from eval.__main__ import main
from eval.answers import Turn, choice_of
from eval.comparison import compare, open_run
from eval.metrics import COMPARED, METRICS, Group, drawn, figures
from selfspec.decoding.stats import SpecStats

SIZES = {"plain": (1,) * 8, "adaptive": (3, 1, 3, 1)}
PACE = {"plain": 0.1, "adaptive": 0.12}  # seconds per step


def turn(method, seconds, first=5):
    stats = SpecStats()
    for size in SIZES[method]:
        stats.add_round(3 if method == "adaptive" else 0, size - 1, size)
    steps = [seconds * (1 + 0.1 * i) for i, _ in enumerate(SIZES[method])]
    tokens = [first, *range(sum(SIZES[method]) - 1)]
    known = {"prefill_seconds": 0.01, "layer_passes": 30, "stage_seconds": {"draft": 1.0}}
    return Turn(tokens, sum(steps) + 0.01, accept_lengths=list(SIZES[method]), step_seconds=steps, stats=stats, **known)


def row(question, method, seconds, category="math", **more):
    choice = choice_of([turn(method, seconds, **more)], ["text"], [9])
    return json.loads(json.dumps({"question_id": question, "category": category, "choices": [choice]}))


def rows(slower=1.0, questions=range(6)):
    """Answers of both methods; those of adaptive take `slower` times as long."""
    return {
        method: [
            row(q, method, pace * (1 + q / 10) * (slower if method == "adaptive" else 1), "math" if q % 2 else "qa")
            for q in questions
        ]
        for method, pace in PACE.items()
    }


@pytest.fixture
def save(tmp_path):
    """Write a run folder with given rows, as `python -m eval run` does."""

    def saved(name, answers, settings=(), about=(), summary=True):
        folder = tmp_path / name
        (folder / "answers").mkdir(parents=True)
        own = {"methods": list(answers), "temperature": 0.0, "seed": 0, "resamples": 50, "baseline": "plain"}
        (folder / "config.yaml").write_text(yaml.safe_dump({**own, **dict(settings)}))
        machine = {"cpu": "one", "torch": "2", "time": name, "load_average": len(name)}
        (folder / "environment.json").write_text(json.dumps({**machine, **dict(about)}))
        if summary:
            (folder / "summary.json").write_text(json.dumps({"complete": True, "baseline": "plain"}))
        for method, of_method in answers.items():
            lines = "".join(json.dumps(each) + "\n" for each in of_method)
            (folder / "answers" / f"{method}.jsonl").write_text(lines)
        return str(folder)

    return saved


@pytest.fixture
def go(capsys):
    """Run the command; returns exit code, standard output and standard error."""

    def command(*arguments):
        code = main(["compare", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def figure(document, method, metric):
    return next(each for each in document["methods"] if each["method"] == method)["metrics"][metric]


def test_ratios_follow_from_the_times_and_a_loss_above_the_limit_fails(save, go):
    before, after = save("a", rows()), save("b", rows(slower=1.25))
    code, out, _ = go(before, after, "--json", "--fail", "speedup=0.05", "seconds=30%")
    found = json.loads(out)
    seconds = [sum(sum(r["choices"][0]["wall_time"]) for r in rows(slower)["adaptive"]) for slower in (1, 1.25)]
    ratio = seconds[0] / seconds[1]
    assert code == 1 and found["has_failed"]
    speedup = figure(found, "adaptive", "speedup")
    assert (
        speedup["ratio"]
        == pytest.approx(ratio)
        == pytest.approx(figure(found, "adaptive", "paired_ratio")["ratio"], 0.01)
    )
    assert speedup["low"] <= speedup["ratio"] <= speedup["high"] < 1 and speedup["is_clear"]
    assert figure(found, "plain", "speedup")["ratio"] == 1 and not figure(found, "plain", "speedup")["is_clear"]
    assert figure(found, "adaptive", "seconds")["ratio"] == pytest.approx(1 / ratio)
    verdicts = {(each["method"], each["metric"]): each["has_failed"] for each in found["limits"]}
    assert verdicts == {
        ("plain", "speedup"): False,
        ("adaptive", "speedup"): True,
        ("plain", "seconds"): False,
        ("adaptive", "seconds"): False,
    }
    assert found["differs"] == {} and all(each["num_other_outputs"] == 0 for each in found["methods"])


@pytest.mark.parametrize(
    ("slower", "limit", "code"),
    [
        (1.25, "speedup=0.25", 0),
        (1.25, "tokens_per_second=5%", 1),
        (1.25, "per_token_latency_p50=0.2", 1),  # less is better: it rose
        (1.25, "time_to_first_token_p95=0.3", 0),
        (0.8, "seconds=0", 0),
        (0.8, "speedup=0", 0),
        (1.25, "mean_accepted_tokens=0", 0),
    ],
)
def test_the_exit_code_follows_the_direction_in_which_a_metric_is_better(slower, limit, code, save, go):
    found, out, _ = go(save("a", rows()), save("b", rows(slower)), "--fail", limit)
    assert found == code and ("**Failed**" in out) == bool(code) and "## Limits" in out


def test_without_limits_there_is_a_table_and_nothing_fails(save, go):
    code, out, _ = go(save("a", rows()), save("b", rows(slower=1.5)))
    assert code == 0 and "## Limits" not in out
    line = next(line for line in out.splitlines() if "| `adaptive` |" in line and "| speedup " in line)
    assert "| **0.6" in line
    assert "1.000 (1.000..1.000)" in next(
        line for line in out.splitlines() if "| `plain` " in line and "speedup" in line
    )
    assert "machine, versions and settings are the same" in out and "token for token" in out


def test_only_questions_answered_in_both_runs_are_compared(save, go):
    later = rows(slower=1.25)
    later["adaptive"] = [each for each in later["adaptive"] if each["question_id"] not in (0, 1)]
    later["plain"] = [each for each in later["plain"] if each["question_id"] != 2]
    later["adaptive"][1]["category"] = "other"  # question 3 is not what it was
    _, out, _ = go(save("a", rows()), save("b", later), "--json")
    found = json.loads(out)
    assert [(each["method"], each["num_questions"], each["num_lost"]) for each in found["methods"]] == [
        ("plain", 5, 1),
        ("adaptive", 3, 2),
    ]
    kept = [sum(sum(r["choices"][0]["wall_time"]) for r in rows()["adaptive"] if r["question_id"] in (2, 4, 5))]
    assert figure(found, "adaptive", "tokens_per_second")["before"] == pytest.approx(24 / kept[0])
    own, base = (
        {r["question_id"]: 8 / sum(r["choices"][0]["wall_time"]) for r in rows()[name]}
        for name in ("adaptive", "plain")
    )
    expected = (1 / own[4] + 1 / own[5]), (1 / base[4] + 1 / base[5])  # plain has lost question 2
    assert figure(found, "adaptive", "speedup")["before"] == pytest.approx(expected[1] / expected[0])
    assert "2 questions answered before have no answer now" in go(save("c", rows()), save("d", later))[1]


@pytest.mark.parametrize(
    ("kept", "options", "words"),
    [
        (
            {"plain": range(6), "adaptive": range(1, 6)},
            [],
            "`adaptive`: 1 questions answered before have no answer now",
        ),
        (
            {"plain": range(6), "adaptive": ()},
            [],
            "`adaptive` speedup: the runs share no answered question for 'adaptive'",
        ),
        ({"plain": (), "adaptive": range(6)}, [], "for both 'adaptive' and the baseline"),
        ({"plain": range(6), "adaptive": ()}, ["--methods", "adaptive"], "`adaptive`: 6 questions answered before"),
    ],
)
def test_a_method_that_lost_answers_fails_where_there_are_limits(kept, options, words, save, go):
    later = {name: [r for r in of if r["question_id"] in kept[name]] for name, of in rows().items()}
    before, after = save("a", rows()), save("b", later)
    code, out, _ = go(before, after, "--fail", "speedup=0.05", *options)
    (failed,) = [line for line in out.split("\n") if line.startswith("- **Failed**") and words in line]
    assert code == 1 and "have no answer now.**" in out and failed in out.split("## Outputs")[0]
    assert json.loads(go(before, after, "--fail", "speedup=0.05", "--json", *options)[1])["has_failed"]
    if not options:
        assert go(before, after)[0] == 0


def test_a_limit_on_unanswered_questions_is_an_error(save, go):
    before, after = save("a", {**rows(), "adaptive": []}), save("b", rows())
    code, out, said = go(before, after, "--fail", "speedup=0.05")
    assert code == 2 and not out and "the runs share no answered question for 'adaptive'" in said
    before = save("c", {**rows(), "plain": []})
    _, _, said = go(before, after, "--fail", "speedup=0.05", "--methods", "adaptive")
    assert "the runs share no answered question for both 'adaptive' and the baseline" in said


def test_differences_are_listed_by_key(save, go):
    later = rows()
    later["adaptive"][2]["choices"][0]["tokens"][0][0] = 99
    about = {"cpu": "two", "torch": "3", "threads": 4}
    after = save("b", later, {"max_new_tokens": 7, "questions_sha256": "x"}, about, summary=False)
    code, out, _ = go(save("a", rows()), after)
    assert code == 0
    for words in (
        "Absolute speeds do not compare (cpu, threads)",
        "Other questions or another model",
        "is not finished",
        "- `cpu`: 'one', then 'two'",
        "- `torch`: '2', then '3'",
        "- `max_new_tokens`: None, then 7",
        "**adaptive: other tokens in 1 of 6 questions, though both runs are greedy.**",
        "- `adaptive`: **other tokens in 1 of 6 questions** (greedy).",
    ):
        assert words in out
    assert "`time`" not in out and "load_average" not in out
    sampled = save("c", later, {"temperature": 1.0})
    told = go(save("d", rows(), {"temperature": 1.0}), sampled)[1]
    assert "(sampled)" in told and "are greedy" not in told
    assert go(save("e", rows()), after, "--fail", "speedup=0.05")[0] == 0  # other outputs are a warning


def test_one_category_and_chosen_methods_and_baseline(save, go):
    before, after = save("a", rows()), save("b", rows(slower=1.25))
    _, out, _ = go(before, after, "--json", "--category", "math", "--methods", "adaptive", "--baseline", "adaptive")
    found = json.loads(out)
    assert [(each["method"], each["num_questions"]) for each in found["methods"]] == [("adaptive", 3)]
    assert figure(found, "adaptive", "speedup")["before"] == 1


def test_different_baselines_give_a_warning(save, go):
    before, after = (
        save(name, rows(), summary=False, settings={"baseline": base})
        for name, base in (("a", "plain"), ("b", "adaptive"))
    )
    assert "over different methods: name one with --baseline" in go(before, after)[1]
    assert "over different methods" not in go(before, after, "--baseline", "plain")[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fail", "sped_up=0.05"], "did you mean 'speedup'"),
        (["--fail", "num_tokens=0.05"], "metric 'num_tokens' is unknown"),
        (["--fail", "speedup"], "METRIC=SHARE"),
        (["--fail", "speedup=5"], "in 0..1"),
        (["--fail", "speedup=nan"], "in 0..1"),
        (["--fail", "speedup=-1%"], "in 0..1"),
        (["--methods", "adaptve"], "did you mean 'adaptive'"),
        (["--baseline", "plan"], "did you mean 'plain'"),
        (["--category", "maths"], "did you mean 'math'"),
        (["--fail", "draft_acceptance_rate=0.05"], "'plain' has none in either run"),
    ],
)
def test_invalid_options_give_one_sentence(options, words, save, go):
    code, out, said = go(save("a", rows()), save("b", rows()), *options)
    assert code == 2 and not out and words in said and said.count("\n") == 1


def test_a_limit_on_a_method_of_one_run_only_is_refused(save, go):
    before, after = save("a", rows()), save("b", {"plain": rows()["plain"]})
    code, _, said = go(before, after, "--fail", "speedup=0.05")
    assert code == 2 and "only one of the runs has adaptive" in said
    assert go(before, after, "--fail", "speedup=0.05", "--methods", "plain")[0] == go(before, after)[0] == 0
    other = save("c", {"adaptive": rows()["adaptive"]})
    assert "share no method" in go(after, other)[2]


def test_a_skipped_method_is_not_compared(save, go):
    runs = [Path(save(name, {**rows(), "llama.cpp": []})) for name in "ab"]
    for run in runs:
        told = {"complete": True, "baseline": "plain", "skipped": {"llama.cpp": "no file"}}
        (run / "summary.json").write_text(json.dumps(told))
    code, out, _ = go(*map(str, runs), "--fail", "speedup=0.05")
    assert code == 0 and "llama.cpp" not in out


def test_other_folders_and_unrelated_runs_are_refused(save, go, tmp_path):
    before = save("a", rows())
    for path in (tmp_path / "nowhere", tmp_path):
        code, _, said = go(before, str(path))
        assert code == 2 and "is no run folder" in said and said.count("\n") == 1
    (tmp_path / "config.yaml").write_text("[")
    assert "is no run folder" in go(before, str(tmp_path))[2]
    code, _, said = go(before, save("b", rows(questions=range(10, 12))))
    assert code == 2 and "no question of 'overall' has been answered" in said


def test_every_figure_equals_its_resample_of_all_questions(save):
    """A resample with every question once has the values of the report."""
    answers = rows()
    answers["adaptive"].append(row(9, "adaptive", 0.3, first=1))
    answers["plain"].append(row(9, "plain", 0.05))
    run = open_run(Path(save("a", answers)))
    group = Group(list(run.items["adaptive"].values()), list(run.items["plain"].values()), 5)
    found, once = figures(group), np.arange(7)[None]
    rest = {"num_questions", "num_tokens", "prefill_share", "acceptance_by_position", "stage_shares"}
    assert set(COMPARED) | rest == set(METRICS)
    for metric in COMPARED:
        value = found[metric]["value"] if isinstance(found[metric], dict) else found[metric]
        value = value / 7 if metric == "seconds" else value  # a mean, whose ratio is that of the sums
        assert drawn(metric, group)[0](once)[0] == pytest.approx(value), metric


def test_a_run_compared_with_itself_has_not_changed(save):
    run = open_run(Path(save("a", rows())))
    found = compare(run, run, {"speedup": 0.0, "seconds": 0.0})
    assert not found["has_failed"]
    for method in found["methods"]:
        for metric, change in method["metrics"].items():
            assert change["ratio"] in (None, 1) and not change["is_clear"], metric


def test_rounding_is_no_loss(save):
    before, after = (open_run(Path(save(name, rows()))) for name in "ab")
    for items in after.items.values():  # a machine of a third of the speed
        items.update({key: item._replace(seconds=item.seconds * 3) for key, item in items.items()})
    found = compare(before, after, {"speedup": 0.0})
    assert not found["has_failed"] and not figure(found, "adaptive", "speedup")["is_clear"]
    assert figure(found, "adaptive", "tokens_per_second")["is_clear"]
