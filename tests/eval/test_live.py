"""`python -m eval live` on tiny models: records, equality with plain decoding, and invalid options."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from eval import live, live_timing
from eval.__main__ import main
from eval.live import LiveConfig, compare, fixed, method_of
from eval.live_timing import STAGES, workload_of
from eval.replay import Overhead, replay
from eval.traces import load
from tests.eval.models import save_model, tiny_llm
from tests.eval.replays import made_up_costs
from tests.slow import slow

QUESTIONS = ["def f(x):\n", "for name in names:\n    print(", "x"]


def ignore(text):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(folder, tmp_path):
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    keys = {"tokens": 9, "batch_sizes": [1, 2], "draft_lengths": [1, 3], "repeats": 2, "warmup_tokens": 2}
    task = {"name": "code", "model": str(folder), "questions": "three.jsonl"}
    few = {"cost_repeats": 1, "synthetic": False, "synthetic_batch_sizes": [2]}
    path = tmp_path / "live.yaml"
    path.write_text(yaml.safe_dump({"tasks": [task], **keys, **few}))
    return path


@pytest.fixture(scope="module")
def workload():
    """A tiny target with prompts of several lengths, and made-up costs."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
    return workload_of(tiny_llm(), prompts, 12, made_up_costs(4), "made up", ignore)


def test_a_run_prints_tables_and_one_json_document_and_writes_files(config, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "kept"
    given = ["--output", str(out), "--record-traces", str(kept), "--exact", "--policies", "fs", "plain", "fs"]
    assert main(["live", str(config), *given]) == 0
    printed = capsys.readouterr()
    *tables, last = printed.out.splitlines()
    record = json.loads(last)
    assert json.loads((out / "live.json").read_text()) == record
    assert record["benchmark"] == "live" and record["synthetic"] is None and "commit" in record["environment"]
    (task,) = record["tasks"]
    assert (task["name"], task["prompts"]["count"], task["num_tokens"]) == ("code", 3, 27)
    assert task["model"]["num_layers"] == 4 and task["costs"]["num_layers"] == 4
    assert [(b["batch_size"], b["num_prompts"]) for b in task["batches"]] == [(1, 3), (2, 4)]
    for batch in task["batches"]:
        methods = {method["method"]: method for method in batch["methods"]}
        kinds = [method["kind"] for method in methods.values()]
        assert kinds == ["plain", "adaptive", "fixed", "fixed", "other", "other", "other"]
        assert list(methods)[4:] == ["plain, exact", "adaptive, exact", "fs"]
        assert batch["adaptive"] == "adaptive"
        timed = [method for method in methods.values() if method["kind"] == "fixed"]
        assert batch["best_fixed"] == max(timed, key=lambda m: m["live"]["median"])["method"]
        best = methods[batch["best_fixed"]]
        ratios = [a / b for a, b in zip(methods["adaptive"]["live_by_repeat"], best["live_by_repeat"], strict=True)]
        assert batch["adaptive_over_best_fixed"]["median"] == pytest.approx(sum(ratios) / 2, 1e-4)
        for method in timed:
            assert method["settings"]["exit_layer"] in (1, 2) and method["settings"]["num_speculative_tokens"] in (1, 3)
            assert method["mean_exit_layer"] == method["settings"]["exit_layer"]
            assert method["num_rounds"] == method["predicted_rounds"]
        for method in methods.values():
            assert method["differing_prompts"] == 0
            assert method["live"]["num_values"] == method["whole_call"]["num_values"] == 2
            assert list(method["shares"]) == list(STAGES)
            assert sum(method["shares"].values()) == pytest.approx(1, 1e-4)
        plain = methods["plain"]
        assert (plain["predicted"], plain["live"]["low"], plain["live"]["high"]) == (1, 1, 1)
        rounds = {1: 27, 2: 18}[batch["batch_size"]]
        assert plain["num_rounds"] == plain["plain_rounds"] == plain["predicted_rounds"] == rounds
        assert plain["mean_exit_layer"] is None and plain["mean_drafted"] == 0 and plain["acceptance_length"] == 1
    assert any("live/predicted" in line for line in tables) and any("plain, exact" in line for line in tables)
    assert any("fixed:" in line for line in tables) and any(" fs " in line for line in tables)
    assert [len(trace.tokens) for trace in load(kept / "code.npz")[0]] == [9, 9, 9]
    assert "<svg" in (out / "live.svg").read_text()
    assert "batch size 2" in printed.err


@pytest.mark.parametrize("batch_size", [slow(1), 2])
def test_every_call_has_a_new_policy_and_gives_the_tokens_of_plain_decoding(workload, batch_size, monkeypatch):
    made, make = [], live.make
    monkeypatch.setattr(live, "make", lambda *given: made.append(make(*given)) or made[-1])
    config = LiveConfig(repeats=2, warmup_tokens=3)
    ways = [
        method_of(workload, "plain"),
        method_of(workload, "adaptive"),
        fixed(workload.costs, 2, 3),
        method_of(workload, "dsde"),
    ]
    methods = compare(workload, ways, batch_size, config, ignore)
    assert [method["differing_prompts"] for method in methods] == [0, 0, 0, 0]
    assert len({id(policy) for policy in made}) == len(made) == len(ways) * (1 + config.repeats + config.repeats)
    done = methods[2]
    assert done["num_rounds"] == done["predicted_rounds"]  # a fixed setting is decoded as it is replayed
    rounds = replay(workload.traces, make("fixed", workload.costs, 2, 3), workload.costs, batch_size).rounds
    drafted = [row.num_drafted for round_ in rounds if round_.plan.exit_layer is not None for row in round_.rows]
    assert done["mean_drafted"] == sum(drafted) / len(drafted)


@pytest.mark.slow
def test_predictions_use_the_costs_measured_before_each_call(workload, monkeypatch):
    """With the first cost table drafts never pay; with every later one they pay more."""
    seen, price, spent = [], made_up_costs(4), {}
    monkeypatch.setattr(live_timing, "_overheads", lambda rounds, between: dict(spent))
    monkeypatch.setattr(
        live_timing, "measured_costs", lambda *given, **options: seen.append(given) or faster(price, len(seen))
    )
    ways = [method_of(workload, "plain"), fixed(workload.costs, 1, 2)]
    plain, drafting = compare(workload, ways, 2, LiveConfig(repeats=3, warmup_tokens=1), ignore)
    assert len(seen) == 3 and all(given[1:] == ((2,), live_timing.COST_REPEATS) for given in seen)
    expected = [replay(workload.traces, ways[1].make(), faster(price, n), 2) for n in (1, 2, 3)]
    by = [done.plain_seconds / done.seconds for done in expected]
    assert plain["predicted"] == 1 and by == sorted(by) and by[2] > 1.05 * by[0]
    assert drafting["predicted"] == pytest.approx(by[1], 1e-6)
    spent |= {
        True: Overhead(price.plain_round(2), 1.0, 0.5),
        False: Overhead(2.0, 3.0, 0.25),
    }
    again = compare(workload, ways, 2, LiveConfig(repeats=1, warmup_tokens=1), ignore)
    for way, method in zip(ways, again, strict=True):
        alone = replay(workload.traces, way.make(), faster(price, 4), 2)
        kinds = [round_.plan.exit_layer is not None for round_ in alone.rounds]
        longer = sum(sum(spent[drafts]) - price.rest(2) for drafts in kinds)
        assert method["predicted_seconds"] == pytest.approx(alone.seconds + longer, 1e-6)


def faster(costs, times):
    """Costs with early passes that are `times` faster."""
    parts = {name: {r: t.scaled(1 / times) for r, t in getattr(costs, name).items()} for name in ("first", "early")}
    return dataclasses.replace(costs, **{name: part for name, part in parts.items() if part})


def test_outputs_that_differ_from_plain_decoding_are_counted(workload):
    wrong = dataclasses.replace(workload.traces[1], tokens=(*workload.traces[1].tokens[:-1], 1))
    other = workload._replace(traces=[workload.traces[0], wrong, workload.traces[2]])
    (method,) = compare(other, [method_of(other, "plain")], 2, LiveConfig(repeats=1), ignore)
    assert method["differing_prompts"] == 1


@pytest.mark.slow
def test_synthetic_targets_have_their_own_table_and_need_no_task(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(live, "ACCEPTANCES", (1.0, 0.5))
    (tmp_path / "live.yaml").write_text(
        "tokens: 6\nrepeats: 1\ncost_repeats: 1\nsynthetic_batch_sizes: [2]\nsynthetic_hidden_size: 64"
    )
    assert main(["live", str(tmp_path / "live.yaml"), "--output", str(tmp_path / "out")]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["tasks"] == [] and [level["wanted"] for level in record["synthetic"]["levels"]] == [1, 0.5]
    assert any("acceptance at layer 2 of 8" in line for line in tables)
    assert any(line.startswith("Lowest: ") for line in tables)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["live.json"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--batch-sizes", "2", "0"], "batch_sizes must be different numbers of at least 1, got [2, 0]"),
        (["--exit-layers", "4"], "exit_layers must be in 1..3 for this model, got [4]"),
        (["--policies", "best"], "method 'best' is unknown"),
        (["--task", "more", "no/such/model", "q.jsonl"], "there is no folder no/such/model"),
    ],
)
def test_invalid_options_give_one_sentence_and_exit_code_2(config, given, sentence, capsys, monkeypatch):
    monkeypatch.setattr(live, "time_batch", lambda *given: {})  # a task before the wrong one is well
    assert main(["live", str(config), "-q", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"eval: {sentence}")
    assert len(printed.err.splitlines()) == 1
