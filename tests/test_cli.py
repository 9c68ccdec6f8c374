"""`selfspec generate` and `inspect` when all is well: what goes to stdout, what to stderr, and that it is right."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import get_args

import pytest

import selfspec
from selfspec.cli.options import DRAFTERS, PolicyName
from selfspec.cli.screen import Screen
from selfspec.control.plan import DRAFTS
from selfspec.control.registry import POLICIES
from selfspec.model.exit_heads import ExitHeads
from selfspec.target import Target
from tests import cli_fixtures
from tests.cli_fixtures import Terminal, assert_refused
from tests.target import load

model_folder, chat_folder, run = cli_fixtures.model_folder, cli_fixtures.chat_folder, cli_fixtures.run
STATS = {"num_generated_tokens", "num_spec_steps", "num_draft_tokens", "mean_acceptance_length", "acceptance_histogram"}


@pytest.fixture
def generate(run, model_folder):
    def call(*arguments, stdin=None):
        return run("generate", "--model", model_folder, *arguments, stdin=stdin)

    return call


@pytest.fixture(scope="module")
def target(model_folder):
    return load(model_folder)


def test_version_is_the_package_s(run):
    assert run("--version") == (0, f"selfspec {selfspec.__version__}\n", "")


def test_text_goes_to_stdout_and_nothing_else_anywhere(generate, target):
    done = generate("def f(x):", "--max-tokens", 30)
    [expected] = target.generate("def f(x):", max_new_tokens=30)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_streamed_and_whole_text_are_the_same(generate, target, stream):
    [expected] = target.generate("abc", max_new_tokens=40, temperature=0.9, seed=3)
    done = generate("abc", "--max-tokens", 40, "--temperature", 0.9, "--seed", 3, stream)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_exit_heads_change_no_token(generate, target, tmp_path, exit_layer):
    heads = ExitHeads([1, 2], 32, 4).requires_grad_(False)
    heads.heads["2"].down.normal_()
    heads.save(tmp_path)
    [expected] = target.generate("abc", max_new_tokens=40)
    done = generate("abc", "--max-tokens", 40, "--exit-layer", exit_layer, "--exit-heads", tmp_path)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_a_pipe_is_read_as_the_prompt_without_its_last_line_break(generate, prompt):
    assert generate(*prompt, stdin="é = 1\n".encode()) == generate("é = 1")


def test_json_is_one_document(generate, target):
    done = generate("abc", "--json", "--max-tokens", 20, "--temperature", 0.8, "--seed", 5)
    document = json.loads(done.out)
    [expected] = target.generate("abc", max_new_tokens=20, temperature=0.8, seed=5)
    assert (done.code, done.err) == (0, "")
    assert document["text"] == expected.text
    assert document["tokens"] == expected.tokens
    assert (document["finish_reason"], document["seed"]) == (expected.finish_reason, 5)
    assert document["stats"].keys() >= STATS
    assert document["seconds"] == pytest.approx(sum(document["seconds_by_stage"].values()))
    stages = {"prefill", "draft", "verify", "head", "pick", "shadow", "control", "rest"}
    assert document["seconds_by_stage"].keys() == stages


def test_no_policy_changes_the_text(generate):
    plain = generate("abc", "--policy", "plain")
    assert plain.code == 0
    length = "--num-speculative-tokens"
    assert plain == generate("abc", "--exit-layer", 2, length, 6) == generate("abc", length, 0)


def test_the_policies_are_those_of_the_library():
    assert get_args(PolicyName) == tuple(POLICIES) and DRAFTERS == DRAFTS


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_writes_the_text_of_plain_decoding(generate, policy):
    call = ("abc", "--max-tokens", 20, "--json")
    done, plain = (json.loads(generate(*call, "--policy", name).out) for name in (policy, "plain"))
    assert (done["policy"], done["tokens"]) == (policy, plain["tokens"])
    assert sum(done["plans"].values()) == done["stats"]["num_spec_steps"] + done["stats"]["num_plain_steps"]
    assert plain["plans"] == {"plain": 20}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ([], "adaptive"),
        (["--exit-layer", 2], "fixed"),
        (["--num-speculative-tokens", 3], "fixed"),
        (["--num-speculative-tokens", 0], "plain"),
        (["--exit-layer", 2, "--policy", "adaptive"], "adaptive"),
    ],
    ids=str,
)
def test_the_policy_that_is_told_is_the_one_that_was_followed(generate, options, policy):
    followed = []
    with pytest.MonkeyPatch.context() as patch:
        rounds = Target.rounds
        patch.setattr(Target, "rounds", lambda *a, **k: followed.append(k["policy"]) or rounds(*a, **k))
        document = json.loads(generate("abc", "--json", "--max-tokens", 8, *options).out)
    assert document["policy"] == policy == followed[0]
    if policy == "fixed":
        assert document["plans"].keys() <= {"1" if "--exit-layer" not in options else "2", "plain"}


def test_every_run_of_a_comparison_knows_what_the_first_one_knew(generate, monkeypatch):
    known, saved = [], []
    rounds = Target.rounds

    def watched(target, *arguments, **options):
        if options["policy"] == "adaptive":
            known.append(target.prior)
        return rounds(target, *arguments, **options)

    monkeypatch.setattr(Target, "rounds", watched)
    monkeypatch.setattr(Target, "save_prior", lambda target: saved.append(target.prior))
    assert generate("abc", "--compare", "--max-tokens", 12).code == 0
    assert len(known) >= 4 and all(prior == known[0] for prior in known)
    assert len(saved) == 1 and saved[0] != known[0]


def test_plain_decoding_has_nothing_to_save(generate, monkeypatch):
    monkeypatch.setattr(Target, "save_prior", lambda target: pytest.fail("saved"))
    assert generate("abc", "--policy", "plain", "--max-tokens", 4).code == 0


def test_what_a_run_has_seen_is_kept_for_the_next(generate, model_folder):
    generate("abc", "--max-tokens", 30)
    assert load(model_folder).prior is not None


def test_compare_times_both_and_finds_the_same_tokens(generate):
    done = generate("abc", "--compare", "--json", "--max-tokens", 12)
    comparison = json.loads(done.out)["compare"]
    assert comparison["tokens_identical"] is True
    assert comparison["first_difference"] is None
    assert len(comparison["plain_seconds"]) == len(comparison["drafted_seconds"]) >= 2
    assert comparison["speedup"] > 0
    assert len(comparison["generate_seconds"]) == 2
    assert comparison["generate_first_difference"] is None
    assert comparison["generate_speedup"] > 0


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", 1),
        ("--stop", "zz"),
        ("--presence-penalty", 1),
        ("--frequency-penalty", 1),
        ("--ignore-generation-config",),
        ("--num-speculative-tokens", 2),
        ("--repetition-penalty", 1.5),
        ("--no-repeat-ngram-size", 2),
    ],
)
def test_generate_is_compared_only_where_it_is_asked_the_same(generate, options):
    done = generate("abc", "--compare", "--json", "--max-tokens", 20, *options)
    comparison = json.loads(done.out)["compare"]
    assert comparison["tokens_identical"] is True
    alike = options[0] in ("--num-speculative-tokens", "--repetition-penalty", "--no-repeat-ngram-size")
    assert comparison["generate_first_difference"] is None
    assert (comparison["generate_speedup"] is not None) == (len(comparison["generate_seconds"]) > 0) == alike


def test_a_comparison_ends_with_its_figures_and_what_they_are_of(generate):
    done = generate("abc", "--show-drafts", "--compare", "--max-tokens", 12)
    assert done.out == generate("abc", "--max-tokens", 12).out
    line, about = done.err.strip().splitlines()
    assert all(words in line for words in ("tokens/s", "acceptance length", "x plain decoding", "same 12 tokens")), line
    assert "x transformers' generate" in line
    assert re.fullmatch(r"medians of (\d+) runs with drafts and \1 without, in turns; .* from before this call", about)


def test_quiet_says_nothing(generate):
    done = generate("abc", "-q", "--compare", "--stats", "--max-tokens", 5)
    assert (done.code, done.err) == (0, "")


def test_stats_are_a_table_on_stderr(generate):
    done = generate("abc", "--stats", "--max-tokens", 12)
    assert done.out == generate("abc", "--max-tokens", 12).out
    stages = ("prefill", "draft", "verify", "head", "pick", "shadow", "control", "rest")
    assert all(words in done.err for words in ("drafted tokens", *stages, "tokens/s"))
    assert re.search(r"^  (lookup|exit \d+|plain) +\d+%$", done.err, re.MULTILINE), "rounds by exit layer"
    fixed = generate("abc", "--stats", "--max-tokens", 12, "--exit-layer", 2)
    assert all(words in fixed.err for words in ("position 1", "  exit 2 "))


def test_stop_text_ends_the_output_and_is_no_part_of_it(generate, target):
    [whole] = target.generate("def f(x):", max_new_tokens=40)
    stop = "Y,"
    done = generate("def f(x):", "--max-tokens", 40, "--stop", "never there", "--stop", stop, "--json")
    document = json.loads(done.out)
    assert document["finish_reason"] == "stop"
    assert document["text"] == whole.text[: whole.text.index(stop)]


# --------------------------------------------------------------------------------------------------------- plans


def test_plans_are_a_line_per_round_on_stderr(generate):
    call = ("abc", "--max-tokens", 15, "--exit-layer", 2, "--num-speculative-tokens", 3)
    done, document = generate(*call, "--show-plan"), json.loads(generate(*call, "--json").out)
    assert done.out == generate(*call).out
    lines = done.err.splitlines()
    assert len(lines) == sum(document["plans"].values())
    assert re.fullmatch(r"round    1  exit  2  up to  3  drafted  3  accepted  [0-3]", lines[0])
    assert sum(int(n) for n in re.findall(r"accepted +(\d+)", done.err)) == 15 - len(lines)
    quiet = generate(*call, "--show-plan", "--json")
    assert json.loads(quiet.out)["plans"] == document["plans"]
    assert quiet.err == done.err


def test_plans_of_the_default_and_of_several_rows(generate):
    assert re.match(r"round    1  (plain|lookup|exit  \d)", generate("abc", "--show-plan", "--max-tokens", 5).err)
    prompts = b'{"prompt": "a", "max_new_tokens": 3}\n{"prompt": "b"}'
    call = ("--prompts", "-", "--exit-layer", 2, "--num-speculative-tokens", 4, "--max-tokens", 9)
    done = generate(*call, "--show-plan", stdin=prompts)
    assert done.out == generate(*call, stdin=prompts).out
    assert re.match(r"round    1   2 rows  exit  2  up to  4  drafted  6  accepted  \d\n", done.err)


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]])
def test_plans_do_not_tear_the_text_of_one_terminal(generate, monkeypatch, drafts):
    plain = generate("abc", "--max-tokens", 40).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(sys, "stderr", terminal)
    assert generate("abc", "--show-plan", "--max-tokens", 40, *drafts).code == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    lines = [line for line in shown.splitlines() if line.startswith("round ")]
    after = shown[shown.index(lines[-1]) + len(lines[-1]) :]
    assert len(lines) == shown.count("round ") and all(
        re.match(r"round +\d+  (plain|lookup|exit)", line) for line in lines
    )
    if drafts:
        assert "abc" in after
    else:
        assert after == "\n" + plain


# ----------------------------------------------------------------------------------------------- file of prompts


def test_a_file_of_prompts_gives_a_line_each_in_their_order(generate, target, tmp_path):
    lines = [
        {"prompt": "one", "id": "first", "max_new_tokens": 25},
        {"prompt": "number two", "seed": 9},
        {"prompt": "3", "id": 3, "max_new_tokens": 1},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    done = generate("--prompts", tmp_path / "prompts.jsonl", "--temperature", 0.9, "--seed", 2, "--max-tokens", 10)
    assert (done.code, done.err) == (0, "")
    found = [json.loads(line) for line in done.out.splitlines()]
    expected = target.generate(
        ["one", "number two", "3"], temperature=0.9, seed=[2, 9, 2], max_new_tokens=[25, 10, 1], max_batch_size=3
    )
    assert [line["id"] for line in found] == ["first", 1, 3]
    assert [line["seed"] for line in found] == [2, 9, 2]
    assert [line["tokens"] for line in found] == [completion.tokens for completion in expected]
    assert [line["text"] for line in found] == [completion.text for completion in expected]
    assert all(line["stats"].keys() >= STATS for line in found)


def test_a_file_of_prompts_may_come_through_a_pipe(generate):
    done = generate("--prompts", "-", "--compare", "--max-tokens", 4, stdin=b'{"prompt": "a"}\n{"prompt": "b"}')
    assert len(done.out.splitlines()) == 2
    assert "same 8 tokens" in done.err


# ---------------------------------------------------------------------------------------------------------- chat


def test_a_chat_template_is_used_when_there_is_one(run, chat_folder, target):
    as_text = "system: brief\nuser: hi\nbot:"
    [expected] = target.generate(as_text, max_new_tokens=12)
    call = ("generate", "--model", chat_folder, "--max-tokens", 12)
    assert run(*call, "hi", "--system", "brief").out == expected.text + "\n"
    assert run(*call, "hi").out == run(*call, "user: hi\nbot:", "--no-chat").out


# ------------------------------------------------------------------------------------------------------- colours


def test_drafts_are_coloured_on_a_terminal(generate, monkeypatch):
    plain = generate("abc", "--max-tokens", 40).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    done = generate("abc", "--show-drafts", "--max-tokens", 40)
    assert done.code == 0
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in plain


@pytest.mark.parametrize(("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({}, False)])
@pytest.mark.parametrize("no_colour", [True, False])
def test_colours_follow_the_environment(generate, monkeypatch, variables, coloured, no_colour):
    call = ("abc", "--show-drafts", "--max-tokens", 8)
    generate(*call)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    done = generate(*call)
    assert ("\x1b[" in done.out) == ("\x1b[" in done.err) == (coloured and not no_colour)


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ([], "early layers or lookup"),
        (["--drafters", "exit"], "early layers"),
        (["--drafters", "lookup,tree"], "lookup"),
        (["--policy", "pld"], "lookup"),
        (["--policy", "del", "--exit-layer", 2], "early layers"),
        (["--policy", "adaptive", "--exit-layer", 2], "layers 1-2 or lookup"),
        (["--exit-layer", 3], "layers 1-3"),
        (["--policy", "dsde"], "layer 1"),
        (["--policy", "plain"], None),
    ],
    ids=str,
)
def test_the_legend_says_who_drafts(generate, monkeypatch, options, early):
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = generate("abc", "--show-drafts", "--max-tokens", 4, *options).err
    assert (f"drafted by {early}, accepted" if early else "tokens/s") in said
    assert ("drafted by" in said) == (early is not None)


def test_drafts_by_lookup_are_shown_and_counted_as_such(generate):
    done = generate("abcabcabc", "--policy", "pld", "--show-plan", "--stats", "--max-tokens", 12)
    assert re.search(r"^round    1  lookup  drafted 10  accepted +\d+$", done.err, re.MULTILINE)
    assert re.search(r"^  lookup +\d+%$", done.err, re.MULTILINE)
    assert done.out == generate("abcabcabc", "--policy", "plain", "--max-tokens", 12).out
    assert '"plans": {"lookup":' in generate("abcabcabc", "--policy", "pld", "--json", "--max-tokens", 12).out


@pytest.mark.parametrize("drafts", ["exit", "lookup", "exit,lookup", "lookup, exit", "exit,tree", "lookup,tree,exit"])
def test_where_drafts_come_from_changes_no_text(generate, drafts):
    done = generate("abcabcabc", "--drafters", drafts, "--show-plan", "--max-tokens", 30)
    assert done.out == generate("abcabcabc", "--policy", "plain", "--max-tokens", 30).out
    assert all(("lookup" in drafts or "lookup" not in line) for line in done.err.splitlines())


def test_a_picture_can_be_saved(generate, tmp_path):
    done = generate("abc", "--svg", tmp_path / "drafts.svg", "--max-tokens", 20)
    assert done.code == 0
    drawn = (tmp_path / "drafts.svg").read_text(encoding="utf-8")
    assert drawn.lstrip().startswith("<svg")
    assert "acceptance" in drawn


# ------------------------------------------------------------------------------------------------------- inspect


def test_inspect_tells_what_a_model_is(run, model_folder, monkeypatch):
    monkeypatch.setattr(Target, "costs", lambda target, batch_size=1: pytest.fail("measured"))
    done = run("inspect", model_folder, "--json")
    report = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert report.pop("split_error") < 1e-3
    assert report.pop("parameters") > 0
    assert report == {
        "model": str(model_folder),
        "family": "llama",
        "layers": 4,
        "dtype": "float32",
        "device": "cpu",
        "tokenizer": True,
        "chat_template": False,
        "self_check": True,
        "reason": None,
        "context_limit": 256,
        "policy": "adaptive",
        "exit_layer": None,
        "num_draft_tokens": None,
    }
    text = run("inspect", model_folder).out
    assert all(words in text for words in ("llama", "passes", "float32", "256", "adaptive"))


def test_inspect_says_why_a_model_cannot_draft(run, tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)).save_pretrained(tmp_path)
    done = run("inspect", tmp_path, "--json")
    report = json.loads(done.out)
    assert done.code == 1
    assert (report["family"], report["layers"], report["self_check"]) == ("mamba", 2, False)
    assert "rolled back" in report["reason"]
    assert "does not pass" in run("inspect", tmp_path).out


def test_the_models_generation_config_is_applied_and_said_unless_told_otherwise(run, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    stored = json.loads((folder / "generation_config.json").read_text())
    stored |= {"repetition_penalty": 1.4, "do_sample": True, "temperature": 0.9, "max_new_tokens": 20}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    target = load(folder)
    [sampled], [greedy] = target.generate("abc"), target.generate("abc", temperature=0, max_new_tokens=9)
    [neutral] = target.generate("abc", generation_config=False)
    assert len(sampled.tokens) == 20 and len({sampled.text[:5], greedy.text[:5], neutral.text[:5]}) > 1
    done = run("generate", "--model", folder, "abc")
    assert (done.code, done.out) == (0, sampled.text + "\n")
    line = "applied: do_sample=True, temperature=0.9, top_k=50, repetition_penalty=1.4, max_new_tokens=20;"
    assert done.err.count(line) == 1 and "--ignore-generation-config" in done.err
    done = run("generate", "--model", folder, "abc", "--temperature", 0, "--max-tokens", 9, "--quiet")
    assert done == (0, greedy.text + "\n", "")
    assert run("generate", "--model", folder, "abc", "--ignore-generation-config") == (0, neutral.text + "\n", "")


def test_lines_of_a_file_name_lengths_of_their_own_beside_the_models(run, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    stored = json.loads((folder / "generation_config.json").read_text()) | {"max_new_tokens": 11}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    lines = b'{"prompt": "abc", "max_new_tokens": 3}\n{"prompt": "xyz"}\n'
    done = run("generate", "--model", folder, "--prompts", "-", stdin=lines)
    assert [len(json.loads(line)["tokens"]) for line in done.out.splitlines()] == [3, 11]


def test_what_a_generation_config_asks_for_in_vain_is_one_sentence(run, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    stored = json.loads((folder / "generation_config.json").read_text()) | {"num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    assert_refused(run("generate", "--model", folder, "abc"), 2, "num_beams=4", "--ignore-generation-config")


@pytest.mark.parametrize("chat", [[], ["--no-chat"]])
def test_a_chat_model_brings_no_notice_where_the_command_line_says_how(run, chat_folder, chat):
    assert run("generate", "--model", chat_folder, "abc", "--max-tokens", 4, *chat).err == ""


# ------------------------------------------------------------------------------------------ several, and older names


def test_several_completions_of_a_prompt_are_lines_with_seeds_that_count_up(generate, target):
    done = generate("abc", "--n", 3, "--temperature", 0.9, "--seed", 5, "--max-tokens", 8)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["id"], line["index"], line["seed"]) for line in lines] == [(0, 0, 5), (0, 1, 6), (0, 2, 7)]
    expected = target.generate(["abc"] * 3, temperature=0.9, seed=[5, 6, 7], max_new_tokens=8)
    assert [line["tokens"] for line in lines] == [completion.tokens for completion in expected]
    prompts = b'{"prompt": "abc", "seed": 6, "max_tokens": 4}\n{"prompt": "x"}'
    done = generate("--prompts", "-", "--n", 2, "--temperature", 0.9, "--max-tokens", 8, stdin=prompts)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["id"], line["index"], line["seed"]) for line in lines] == [(0, 0, 6), (0, 1, 7), (1, 0, 0), (1, 1, 1)]
    assert [line["tokens"] for line in lines[:2]] == [completion.tokens[:4] for completion in expected[1:]]


def test_several_greedy_outputs_are_refused(generate):
    done = generate("abc", "--n", 2)
    assert (done.code, done.out) == (2, "") and "--n must be 1 with greedy decoding" in done.err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--max-new-tokens", 6), ("--max-tokens", 6)),
        (("--num-draft-tokens", 3, "--exit-layer", 2), ("--num-speculative-tokens", 3, "--exit-layer", 2)),
        (("--drafts", "lookup,tree", "--max-tokens", 9), ("--drafters", "lookup,tree", "--max-tokens", 9)),
        (("--engine", "views"), ("--backend", "views")),
    ],
    ids=str,
)
def test_options_may_be_called_as_before_until_0_3(generate, old, new):
    def found(*options):
        document = json.loads(generate("abcabc", "--json", *options).out)
        return document["tokens"], document["policy"], document["engine"]

    assert found(*old) == found(*new) != found()
    if old[0] != "--engine":  # whose choices typer refuses by the name that was given
        assert generate("abc", old[0], "-1").err == generate("abc", new[0], "-1").err != ""


def test_a_run_goes_on_with_what_earlier_programs_learned(generate, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    known, rounds = [], Target.rounds
    monkeypatch.setattr(Target, "rounds", lambda *a, **k: known.append(a[0].prior) or rounds(*a, **k))
    for _ in range(3):
        assert generate("abc", "--max-tokens", 30).code == 0
        known.append(load(model_folder).prior)
    before, learned = known[::2], known[1::2]
    assert before[0] is None and before[1:] == learned[:2]
    assert sum(map(sum, learned[2]["hits"])) > sum(map(sum, learned[0]["hits"]))


def test_what_an_interrupted_run_has_learned_is_kept(generate, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    count, show = iter(range(99)), Screen.show

    def interrupted(screen, round_):
        show(screen, round_)
        if next(count) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "show", interrupted)
    done = generate("abc", "--max-tokens", 200)
    assert (done.code, done.err) == (130, "") and done.out
    prior = load(model_folder).prior
    assert prior is not None and sum(map(sum, prior["hits"])) + sum(map(sum, prior["misses"])) > 0


# ------------------------------------------------------------------------------------------- penalties, stops, logprobs


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (("--repetition-penalty", 1.4), {"repetition_penalty": 1.4}),
        (("--presence-penalty", 1.5, "--frequency-penalty", 0.5), {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        (("--no-repeat-ngram-size", 2), {"no_repeat_ngram_size": 2}),
    ],
    ids=str,
)
def test_penalties_are_those_of_the_library(generate, target, options, asked):
    done = generate("abcabcabc", "--max-tokens", 30, *options, "--json")
    [expected], [without] = (target.generate("abcabcabc", max_new_tokens=30, **more) for more in (asked, {}))
    assert json.loads(done.out)["tokens"] == expected.tokens != without.tokens


def test_stop_tokens_end_the_output(generate, target):
    [whole] = target.generate("abc", max_new_tokens=30)
    stop = whole.tokens[7]
    end = whole.tokens.index(stop) + 1
    for given in ((f"{stop},256",), (256, "--stop-token-ids", stop)):
        document = json.loads(generate("abc", "--max-tokens", 30, "--json", "--stop-token-ids", *given).out)
        assert (document["tokens"], document["finish_reason"]) == (whole.tokens[:end], "stop")


def test_logprobs_are_in_the_document_and_in_lines(generate, target):
    [expected] = target.generate("abc", max_new_tokens=5, logprobs=2)
    document = json.loads(generate("abc", "--max-tokens", 5, "--logprobs", 2, "--json").out)
    assert [one["token"] for one in document["logprobs"]] == expected.tokens
    for told, one in zip(document["logprobs"], expected.logprobs, strict=True):
        assert told["rank"] == 1 and told["logprob"] == pytest.approx(one.logprob)
        assert told["top"] == [[token, pytest.approx(logprob)] for token, logprob in one.top] and len(told["top"]) == 2
    line = json.loads(generate("--prompts", "-", "--max-tokens", 5, "--logprobs", 0, stdin=b'{"prompt": "abc"}').out)
    assert [one["token"] for one in line["logprobs"]] == expected.tokens and line["logprobs"][0]["top"] == []
    assert "logprobs" not in json.loads(generate("abc", "--max-tokens", 5, "--json").out)
