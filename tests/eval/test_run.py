"""`python -m eval run` on a tiny model: methods, records, errors and resuming."""

from __future__ import annotations

import errno
import json

import pytest
import yaml

from eval import figures, records
from eval.__main__ import main
from eval.decoders import Ours
from eval.models import decode, open_llm, with_policy
from eval.records import RunFolder
from selfspec.control.registry import POLICIES
from tests.eval.models import save_model

QUESTIONS = [
    {"question_id": "a", "category": "writing", "turns": ["def f(x):\n", "and then"]},
    {"question_id": 7, "category": "loops", "turns": ["for name in names:\n    print("]},
    {"question_id": 8, "category": "loops", "turns": ["x"]},
]
SPEC_BENCH_KEYS = ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
CHOICE_KEYS = ["index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model, tmp_path):
    """A configuration with two methods."""
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    keys = {"questions": "three.jsonl", "max_new_tokens": 6, "resamples": 20, "warmups": 0}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), "methods": ["plain", "fixed:2,3"], **keys}))
    return path


@pytest.fixture
def run(config, tmp_path, monkeypatch):
    """Runs without a figure, which would take as long as the rest; see test_run_report."""
    monkeypatch.setattr(figures, "speedup_by_category", lambda summary: None)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))

    def command(*options):
        return main(["run", str(config), "--output", str(tmp_path / "out"), *options])

    return command


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def summary(out):
    return json.loads((out / "summary.json").read_text())


def method(out, name):
    return next(each for each in summary(out)["methods"] if each["method"] == name)


def test_every_method_gives_the_tokens_of_plain_decoding_in_spec_bench_format(run, out, model, capsys):
    ours = [*POLICIES, "fixed:2,3", "adaptive:exit", "adaptive:lookup"]
    theirs = ["", ":early_exit:2", ":prompt_lookup:3", f":assistant:{model}"]
    names = [*ours, *("transformers" + rest for rest in theirs)]
    assert run("--methods", *names, "--warmups", "1") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Run report") and "Every output compared is plain decoding's" in printed.out
    assert printed.out.rstrip("\n") == (out / "report.md").read_text("utf-8").rstrip("\n") and str(out) in printed.err
    found = summary(out)
    assert found["complete"] and found["num_questions"] == 3 and found["baseline"] in ("plain", "transformers")
    assert found["harness_share"] > 0
    assert [each["method"] for each in found["methods"]] == names
    for each in found["check"]:
        assert (each["num_compared"], each["num_different"], each["num_ties"]) == (3, 0, 0), each["method"]
    for each in found["methods"]:
        assert list(each["groups"]) == ["writing", "loops", "mt_bench", "overall"] and not each["errors"]
        assert each["groups"]["overall"]["num_tokens"] == 24
    files = sorted((out / "answers").iterdir())
    assert len(files) == len(names)
    for file in files:
        rows = lines(file)
        assert [row["question_id"] for row in rows] == ["a", 7, 8]
        for row in rows:
            (choice,) = row["choices"]
            assert list(row)[:6] == SPEC_BENCH_KEYS and list(choice)[:6] == CHOICE_KEYS
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) == 6 * len(choice["turns"])
            assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
            assert [len(tokens) for tokens in choice["tokens"]] == choice["new_tokens"]
            for steps, wall in zip(choice["step_seconds"], choice["wall_time"], strict=True):
                assert sum(steps) <= wall + 1e-6
    about = json.loads((out / "environment.json").read_text())
    assert (
        about["num_layers"] == about["costs"]["num_layers"] == 4
        and "commit" in about
        and yaml.safe_load((out / "config.yaml").read_text())["seed"] == 0
    )


def test_counts_of_layers_and_drafts_add_up(run, out):
    assert run("--methods", "plain", "fixed:2,3", "transformers") == 0
    plain, fixed, peer = (method(out, name)["groups"]["overall"] for name in ("plain", "fixed:2,3", "transformers"))
    assert plain["layer_passes_per_token"] == peer["layer_passes_per_token"] == 4
    choices = [row["choices"][0] for row in lines(out / "answers" / "fixed-2,3.jsonl")]
    rounds, tokens = (sum(map(sum, (choice[key] for choice in choices))) for key in ("decoding_steps", "new_tokens"))
    drafted = (24 * fixed["layer_passes_per_token"] - 4 * rounds) / 2
    assert tokens == 24 and fixed["draft_acceptance_rate"] == pytest.approx((tokens - rounds) / drafted)
    assert sum(fixed["stage_shares"].values()) == pytest.approx(1) and fixed["acceptance_by_position"][0]["joint"] > 0
    assert plain["acceptance_by_position"] is plain["draft_acceptance_rate"] is peer["stage_shares"] is None
    assert plain["acceptance_length"] == 1 and fixed["prefill_share"] > 0


def test_answers_help_later_questions_only_where_the_configuration_says_so(run, out, tmp_path):
    same = [{"question_id": i, "category": "c", "turns": ["x"]} for i in range(3)]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(question) + "\n" for question in same))
    options = ["--methods", "plain", "pld", "--questions", str(tmp_path / "same.jsonl"), "--max-new-tokens", "30"]
    options += ["--ignore-eos", "--warmups", "1"]
    steps = {}
    for name, more in (("apart", []), ("reused", ["--reuse-responses"])):
        folder = out.with_name(name)
        assert run(*options, *more, "--output", str(folder)) == 0
        assert all(each["num_different"] == 0 for each in summary(folder)["check"])
        answers = lines(folder / "answers" / "pld.jsonl")
        steps[name] = [answer["choices"][0]["decoding_steps"] for answer in answers]
    first, again, more = steps["reused"]
    assert steps["apart"] == [first] * 3  # the untimed answer before helps none, either
    assert again == more and again[0] < first[0]


def test_sampled_outputs_are_compared_only_across_selfspec_methods(run, out):
    names = ["plain", "fixed:2,3", "del", "transformers", "transformers:early_exit:2"]
    assert run("--methods", *names, "--temperature", "0.9", "--seed", "5") == 0
    check = {each["method"]: each for each in summary(out)["check"]}
    assert list(check) == ["fixed:2,3", "del"] and all(each["num_different"] == 0 for each in check.values())
    assert check["del"]["num_ties"] is None
    first = lines(out / "answers" / "plain.jsonl")[1]["choices"][0]["tokens"]
    assert run("--methods", *names, "--temperature", "0.9", "--seed", "6", "--output", str(out) + "2") == 0
    other = out.with_name("out2") / "answers" / "plain.jsonl"
    assert lines(other)[1]["choices"][0]["tokens"] != first


def test_output_ends_at_the_end_of_text_token_unless_ignored(run, out, model, monkeypatch):
    llm = open_llm(str(model))
    (done,) = decode(with_policy(llm, policy="plain"), [llm.tokenizer("x")["input_ids"]], 6)
    token = done.token_ids[2]
    monkeypatch.setattr("selfspec.loading.target.Target.eos_token_ids", property(lambda self: frozenset({token})))
    names = ["plain", "fixed:2,3", "transformers", "transformers:early_exit:2"]
    assert run("--methods", *names) == 0
    for name in ("plain", "fixed-2,3", "transformers", "transformers-early_exit-2"):
        tokens = lines(out / "answers" / f"{name}.jsonl")[2]["choices"][0]["tokens"][0]
        assert tokens[-1] == token and token not in tokens[:-1] and len(tokens) <= 3
    assert all(each["num_different"] == 0 for each in summary(out)["check"])
    assert run("--methods", *names, "--ignore-eos", "--output", str(out) + "2") == 0
    assert method(out.with_name("out2"), "transformers")["groups"]["overall"]["num_tokens"] == 24


def test_other_tokens_than_those_of_plain_decoding_are_reported(run, out, monkeypatch, capsys):
    own = Ours.__call__

    def wrong(self, prompt):
        turn = own(self, prompt)
        if self.name != "plain" and prompt.question_id == 7:
            turn.tokens[-1] = 3 + (turn.tokens[-1] - 2) % 250
        return turn

    monkeypatch.setattr(Ours, "__call__", wrong)
    assert run() == 0
    (check,) = summary(out)["check"]
    assert (check["num_compared"], check["num_different"]) == (3, 1)
    first = check["differences"][0]
    assert (first["turn"], first["position"]) == (0, 5) and first["gap"] > 0 and first["is_tie"] is False
    report = capsys.readouterr().out
    assert report.index("Outputs differ") < report.index("## Overall") and "logit gap" in report


def test_a_question_longer_than_the_context_is_an_error_row_for_every_method(run, out, config, tmp_path):
    long = {"question_id": "long", "category": "loops", "turns": ["x" * 3000]}
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(q) + "\n" for q in (long, *QUESTIONS)))
    assert run("--warmups", "1") == 0
    assert [(row["kind"], row["question_id"]) for row in lines(out / "errors.jsonl")] == [("too_long", "long")] * 2
    assert summary(out)["complete"] and summary(out)["methods"][0]["errors"] == {"too_long": 1}


def test_timeouts_and_exceptions_become_error_rows(run, out, monkeypatch):
    names = ["--methods", "plain", "transformers", "transformers:early_exit:2"]
    assert run(*names, "--time-limit", "1e-9", "--warmups", "1") == 0
    assert {row["kind"] for row in lines(out / "errors.jsonl")} == {"timeout"}
    assert summary(out)["baseline"] is None and "No baseline" in (out / "report.md").read_text("utf-8")

    def fail(self, prompt):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(Ours, "__call__", fail)
    assert run(*names, "--output", str(out) + "2", "--warmups", "1") == 0
    row = lines(out.with_name("out2") / "errors.jsonl")[0]
    assert (row["kind"], row["method"], row["sentence"]) == ("error", "plain", "RuntimeError: out of memory")


def test_ctrl_c_leaves_a_partial_report_and_the_same_command_resumes(run, out, monkeypatch, capsys):
    calls, own = [], Ours.__call__

    def interrupted(self, prompt):
        calls.append(prompt)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return own(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(Ours, "__call__", interrupted)
        assert run() == 130
    assert "Partial" in capsys.readouterr().out and not summary(out)["complete"]
    before = lines(out / "answers" / "plain.jsonl")
    assert run() == 0
    after = lines(out / "answers" / "plain.jsonl")
    assert after[: len(before)] == before and [row["question_id"] for row in after] == ["a", 7, 8]
    assert summary(out)["complete"] and len(json.loads((out / "environment.json").read_text())["resumed"]) == 1


def test_a_folder_with_another_configuration_is_refused_and_the_keys_are_named(run, out, config, tmp_path, capsys):
    assert run() == 0
    assert run("--max-new-tokens", "7", "--seed", "1") == 2
    said = capsys.readouterr().err
    assert "max_new_tokens 6, now 7" in said and "seed 0, now 1" in said
    (tmp_path / "three.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n")
    assert run() == 2
    assert "questions_sha256" in capsys.readouterr().err


def test_a_folder_that_is_in_use_or_cannot_be_written_is_refused(run, out, config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("--output", str(tmp_path / "file" / "below")) == 2
    assert "cannot write the run folder" in capsys.readouterr().err
    other = RunFolder(out, {}, [])
    assert run() == 2
    assert "another run is writing" in capsys.readouterr().err
    other.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "plain", "adaptve"], "did you mean 'adaptive'"),
        (["--methods", "plain", "adaptive:tree"], "did you mean 'adaptive:"),
        (["--methods", "plain", "plain"], "different names"),
        (["--methods", "fixed:2,3"], "add plain to methods"),
        (["--methods", "fixed:2,3", "--no-check"], "name a baseline"),
        (["--methods", "plain", "fixed:4,3"], "1..3 for this model"),
        (["--methods", "plain", "transformers:early_exit:9"], "1..3 for this model"),
        (["--baseline", "plan"], "did you mean 'plain'"),
        (["--metrics", "sped_up"], "did you mean 'speedup'"),
        (["--columns", "turn=text"], "did you mean 'turns'"),
        (["--questions", "gsm8k"], "questions_path"),
        (["--time-limit", "nan"], "above 0"),
    ],
)
def test_invalid_options_give_one_sentence(options, words, run, capsys):
    assert run(*options) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]  # but for progress
    assert len(said) == 1 and said[0].startswith("eval: ") and words in said[0]


def test_a_finished_run_is_reported_again_over_another_baseline(run, out):
    assert run() == 0
    before = summary(out)
    assert run("--baseline", "fixed:2,3", "--metrics", "speedup") == 0
    assert method(out, "fixed:2,3")["groups"]["overall"]["speedup"]["value"] == pytest.approx(1)
    assert summary(out)["check"] == before["check"]


def test_a_full_disk_gives_one_sentence_and_the_folder_can_be_resumed(run, out, monkeypatch, capsys):
    calls, own = [], records.append_line

    def full(path, row):
        calls.append(path)
        if len(calls) == 3:
            raise records.FullError(path, OSError(errno.ENOSPC, "No space left on device"))
        own(path, row)

    with monkeypatch.context() as patch:
        patch.setattr(records, "append_line", full)
        assert run() == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("eval: cannot write") and "No space left on device" in said and "resume" in said
    assert run() == 0 and summary(out)["complete"]
    for name in ("plain", "fixed-2,3"):
        assert [row["question_id"] for row in lines(out / "answers" / f"{name}.jsonl")] == ["a", 7, 8]


def test_a_run_that_fails_to_start_releases_its_folder(config, tmp_path, capsys):
    assert main(["run", str(config), "--model", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")]) == 2
    assert "nowhere" in capsys.readouterr().err
    RunFolder(tmp_path / "out", {"another": "configuration"}, []).close()


def test_a_method_that_cannot_run_is_skipped_with_one_sentence(run, out, capsys):
    assert run("--methods", "plain", "llama.cpp", "llama.cpp:/no/such.gguf") == 0
    said = capsys.readouterr()
    assert said.err.count("skipped: ") == 2 and "needs a GGUF file" in said.err
    assert "Skipped: llama.cpp needs a GGUF file" in said.out and summary(out)["complete"]
    assert [each["method"] for each in summary(out)["methods"]] == ["plain"]
