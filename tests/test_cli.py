"""`selfspec generate` and `inspect` when all is well: what goes to stdout, what to stderr, and that it is right."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import shutil
import sys
from dataclasses import fields

import pytest

import selfspec
from selfspec import LLM, SamplingParams
from selfspec.cli import compare, session
from selfspec.cli.failure import Failure
from selfspec.cli.generate import _Text
from selfspec.cli.options import ModelOptions
from selfspec.control import ledger
from selfspec.control.registry import POLICIES
from selfspec.loading.target import Target
from selfspec.model.exit_heads import ExitHeads
from tests.cli_fixtures import Terminal, assert_refused

STATS = {"num_generated_tokens", "num_spec_steps", "num_draft_tokens", "mean_acceptance_length", "acceptance_histogram"}


@pytest.fixture
def generate(run, model_folder):
    def call(*arguments, stdin=None):
        return run("generate", "--model", model_folder, *arguments, stdin=stdin)

    return call


@pytest.fixture(autouse=True)
def two_pairs(monkeypatch):
    """Comparisons time two pairs of runs, however fast the machine is."""
    monkeypatch.setattr(compare, "PAIRS", (2, 2))
    monkeypatch.setattr(compare, "ENOUGH_SECONDS", math.inf)


def test_version_is_the_package_s(run):
    assert run("--version") == (0, f"selfspec {selfspec.__version__}\n", "")


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_text_goes_to_stdout_and_nothing_else_anywhere(generate, answer, stream):
    expected = answer("abc", max_tokens=40, temperature=0.9, seed=3)
    done = generate("abc", "--max-tokens", 40, "--temperature", 0.9, "--seed", 3, stream)
    assert done == (0, expected.text + "\n", "")


def test_exit_heads_change_no_token(generate, answer, tmp_path):
    heads = ExitHeads([1, 2], 32, 4).requires_grad_(False)
    heads.heads["2"].down.normal_()
    heads.save(tmp_path)
    expected = answer("abc", max_tokens=40)
    done = generate("abc", "--max-tokens", 40, "--exit-layer", 2, "--exit-heads", tmp_path)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_a_pipe_is_read_as_the_prompt_without_its_last_line_break(generate, prompt):
    assert generate(*prompt, stdin="é = 1\n".encode()) == generate("é = 1")


def test_json_is_one_document(generate, answer):
    done = generate("abc", "--json", "--max-tokens", 20, "--temperature", 0.8, "--seed", 5)
    document = json.loads(done.out)
    expected = answer("abc", max_tokens=20, temperature=0.8, seed=5)
    assert (done.code, done.err) == (0, "")
    assert document["text"] == expected.text
    assert document["tokens"] == expected.token_ids
    assert (document["finish_reason"], document["seed"]) == (expected.finish_reason, 5)
    assert document["stats"].keys() >= STATS
    assert document["seconds"] == pytest.approx(sum(document["seconds_by_stage"].values()))
    stages = {"prefill", "draft", "verify", "head", "pick", "shadow", "control", "rest"}
    assert document["seconds_by_stage"].keys() == stages


def test_options_of_the_model_are_arguments_of_the_library():
    known = inspect.signature(LLM).parameters
    own = {one.name: one.default for one in fields(ModelOptions) if one.name != "threads"}
    assert own == {name: known[name].default for name in own}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_writes_the_text_of_plain_decoding(generate, answer, policy):
    done = json.loads(generate("abc", "--max-tokens", 20, "--json", "--policy", policy).out)
    assert (done["policy"], done["tokens"]) == (policy, answer("abc", max_tokens=20).token_ids)
    assert sum(done["plans"].values()) == done["stats"]["num_spec_steps"] + done["stats"]["num_plain_steps"]


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
def test_the_policy_is_named_and_followed(generate, options, policy):
    document = json.loads(generate("abc", "--json", "--max-tokens", 8, *options).out)
    assert document["policy"] == policy
    if policy == "fixed":
        assert document["plans"].keys() <= {"1" if "--exit-layer" not in options else "2", "plain"}
    if policy == "plain":
        assert document["plans"] == {"plain": 8}


def test_every_run_of_a_comparison_knows_what_the_first_one_knew(generate, monkeypatch):
    known, saved, policy = [], [], Target.policy

    def watched(target, config, *arguments):
        if config.policy is None:
            known.append((target.prior, len(target.responses)))
        return policy(target, config, *arguments)

    monkeypatch.setattr(Target, "policy", watched)
    monkeypatch.setattr(Target, "save_prior", lambda target: saved.append(target.prior))
    assert generate("abc", "--compare", "--max-tokens", 12).code == 0
    assert len(known) == 4 and all(one == known[0] for one in known)
    assert len(saved) == 1 and saved[0] != known[0][0]


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", 1),
        ("--stop", "zz"),
        ("--presence-penalty", 1),
        ("--ignore-generation-config",),
        ("--repetition-penalty", 1.5, "--no-repeat-ngram-size", 2),
    ],
)
def test_generate_is_compared_only_where_it_is_asked_the_same(generate, options):
    done = generate("abc", "--compare", "--json", "--max-tokens", 20, *options)
    comparison = json.loads(done.out)["compare"]
    assert comparison["tokens_identical"] is True and comparison["first_difference"] is None
    assert len(comparison["plain_seconds"]) == len(comparison["drafted_seconds"]) == 2 and comparison["speedup"] > 0
    alike = options[0] == "--repetition-penalty"
    assert comparison["generate_first_difference"] is None
    assert (comparison["generate_speedup"] is not None) == (len(comparison["generate_seconds"]) > 0) == alike


def test_a_comparison_ends_with_its_figures_and_what_they_are_of(generate):
    done = generate("abc", "--show-drafts", "--compare", "--max-tokens", 12)
    assert done.out == generate("abc", "--max-tokens", 12).out
    line, drafted, about = done.err.strip().splitlines()
    assert re.fullmatch(r"Drafted: .*\. \d+\.\d\d times as fast as plain decoding\.", drafted)
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


# --------------------------------------------------------------------------------------------------------- plans


def test_plans_are_a_line_per_round_on_stderr(generate):
    call = ("abc", "--max-tokens", 15, "--exit-layer", 2, "--num-speculative-tokens", 3)
    done, document = generate(*call, "--show-plan"), json.loads(generate(*call, "--json").out)
    assert done.out == generate(*call).out
    lines = done.err.splitlines()
    assert len(lines) == sum(document["plans"].values())
    assert re.fullmatch(r"round    1  exit  2  up to  3  drafted  3  accepted  [0-3]", lines[0])
    assert sum(int(n) for n in re.findall(r"accepted +(\d+)", done.err)) == 15 - len(lines)
    assert generate(*call, "--show-plan", "--json").err == done.err


def test_plans_of_several_rows(generate):
    prompts = b'{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}'
    call = ("--prompts", "-", "--exit-layer", 2, "--num-speculative-tokens", 4, "--max-tokens", 9)
    done = generate(*call, "--show-plan", stdin=prompts)
    assert done.out == generate(*call, stdin=prompts).out
    assert re.match(r"round    1   2 rows  exit  2  up to  4  drafted  6  accepted  \d\n", done.err)


def test_a_length_in_a_file_of_prompts_below_min_tokens_is_refused(generate):
    done = generate("--prompts", "-", "--min-tokens", 4, stdin=b'{"prompt": "a", "max_tokens": 3}')
    assert_refused(done, 2, "--min-tokens must be at most max_tokens, 3, got 4")


def test_text_comes_after_the_plans(generate, monkeypatch):
    plain = generate("abc", "--max-tokens", 40).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(sys, "stderr", terminal)
    assert generate("abc", "--show-plan", "--max-tokens", 40).code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert shown.endswith("\n" + plain) and shown.rindex("round ") < len(shown) - len(plain)


def test_drafts_by_lookup_are_shown_and_counted_as_such(generate, answer):
    done = generate("abcabcabc", "--policy", "pld", "--show-plan", "--stats", "--max-tokens", 12)
    assert re.search(r"^round    1  lookup  drafted 10  accepted +\d+$", done.err, re.MULTILINE)
    assert re.search(r"^  lookup +\d+%$", done.err, re.MULTILINE)
    assert done.out == answer("abcabcabc", max_tokens=12).text + "\n"
    assert '"plans": {"lookup":' in generate("abcabcabc", "--policy", "pld", "--json", "--max-tokens", 12).out


@pytest.mark.parametrize("drafters", ["exit", "lookup, exit", "lookup,copies"])
def test_where_drafts_come_from_changes_no_text(generate, answer, drafters):
    done = generate("abcabcabc", "--drafters", drafters, "--show-plan", "--max-tokens", 30)
    assert done.out == answer("abcabcabc", max_tokens=30).text + "\n"
    assert all(("lookup" in drafters or "lookup" not in line) for line in done.err.splitlines())


# ------------------------------------------------------------------------------------------ several prompts or outputs


def test_a_file_of_prompts_gives_a_line_each_in_their_order(generate, answer, tmp_path):
    lines = [
        {"prompt": "one", "id": "first", "max_tokens": 25},
        {"prompt": "number two", "seed": 0},
        {"prompt": "3", "id": 3, "max_tokens": 1},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    done = generate("--prompts", tmp_path / "prompts.jsonl", "--temperature", 0.9, "--seed", 2, "--max-tokens", 10)
    assert (done.code, done.err) == (0, "")
    found = [json.loads(line) for line in done.out.splitlines()]
    expected = [
        answer(line["prompt"], temperature=0.9, seed=line.get("seed", 2), max_tokens=line.get("max_tokens", 10))
        for line in lines
    ]
    assert [line["id"] for line in found] == ["first", 1, 3]
    assert [line["seed"] for line in found] == [2, 0, 2]
    assert [line["tokens"] for line in found] == [output.token_ids for output in expected]
    assert [line["text"] for line in found] == [output.text for output in expected]
    assert all(line["stats"].keys() >= STATS for line in found)


def test_a_file_of_prompts_may_come_through_a_pipe(generate):
    done = generate("--prompts", "-", "--compare", "--max-tokens", 4, stdin=b'{"prompt": "a"}\n{"prompt": "b"}')
    assert len(done.out.splitlines()) == 2
    assert "same 8 tokens" in done.err


def test_several_outputs_of_a_prompt_are_lines_with_seeds_that_count_up(generate, answer):
    prompts = b'{"prompt": "abc", "seed": 6, "max_tokens": 4}\n{"prompt": "x"}'
    done = generate("--prompts", "-", "--n", 2, "--temperature", 0.9, "--max-tokens", 8, stdin=prompts)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["id"], line["index"], line["seed"]) for line in lines] == [(0, 0, 6), (0, 1, 7), (1, 0, 0), (1, 1, 1)]
    expected = [answer("abc", temperature=0.9, seed=seed, max_tokens=4).token_ids for seed in (6, 7)]
    assert [line["tokens"] for line in lines[:2]] == expected


# ---------------------------------------------------------------------------------------------------------- chat


def test_a_chat_template_is_used_when_there_is_one(run, chat_folder, answer):
    expected = answer("system: brief\nuser: hi\nbot:", max_tokens=12)
    call = ("generate", "--model", chat_folder, "--max-tokens", 12)
    assert run(*call, "hi", "--system", "brief") == (0, expected.text + "\n", "")
    assert run(*call, "hi") == run(*call, "user: hi\nbot:", "--no-chat")


# ------------------------------------------------------------------------------------------------------- colours


@pytest.mark.parametrize("policy", ["fixed", "plain"])
def test_drafts_are_coloured_on_a_terminal(generate, monkeypatch, policy):
    plain = generate("abc", "--max-tokens", 40).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    done = generate("abc", "--show-drafts", "--max-tokens", 40, "--policy", policy)
    assert done.code == 0 and "\x1b[" in terminal.getvalue() and "\x1b[" not in plain
    assert ("accepted draft  written by all 4 layers  rejected draft" in done.err) == (policy == "fixed")


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [((), False), (("FORCE_COLOR",), True), (("FORCE_COLOR", "NO_COLOR"), False)]
)
def test_colours_follow_the_environment(generate, monkeypatch, variables, is_coloured):
    for name in variables:
        monkeypatch.setenv(name, "1")
    done = generate("abc", "--show-drafts", "--max-tokens", 8)
    assert ("\x1b[" in done.out) == ("\x1b[" in done.err) == is_coloured


def test_a_picture_can_be_saved(generate, tmp_path):
    done = generate("abc", "--svg", tmp_path / "drafts.svg", "--max-tokens", 20)
    drawn = (tmp_path / "drafts.svg").read_text(encoding="utf-8")
    assert done.code == 0 and drawn.lstrip().startswith("<svg") and "acceptance" in drawn


# ------------------------------------------------------------------------------------------------------- inspect


def test_inspect_tells_what_a_model_is(run, model_folder, monkeypatch):
    monkeypatch.setattr(Target, "costs", lambda *arguments: pytest.fail("measured"))
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
        "num_speculative_tokens": None,
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
    assert_refused(run("generate", "abc", "--model", tmp_path), 1, "mamba", "rolled back")


# --------------------------------------------------------------------------------------------- the model's own settings


def with_settings(folder, model_folder, **settings):
    shutil.copytree(model_folder, folder)
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(stored | settings))
    return folder


def test_the_models_generation_config_is_applied_and_said_unless_told_otherwise(run, model_folder, tmp_path):
    settings = {"repetition_penalty": 1.4, "do_sample": True, "temperature": 0.9, "max_new_tokens": 20}
    folder = with_settings(tmp_path / "model", model_folder, **settings)
    params = [SamplingParams(), SamplingParams(temperature=0, max_tokens=9), SamplingParams(generation_config=False)]
    outputs = LLM(folder).generate(["abc"] * 3, params)
    sampled, greedy, neutral = [output.outputs[0].text + "\n" for output in outputs]
    assert len({sampled[:5], greedy[:5], neutral[:5]}) > 1
    done = run("generate", "--model", folder, "abc")
    assert (done.code, done.out) == (0, sampled)
    line = "applied: do_sample=True, temperature=0.9, top_k=50, repetition_penalty=1.4, max_new_tokens=20;"
    assert done.err.count(line) == 1 and "--ignore-generation-config" in done.err
    done = run("generate", "--model", folder, "abc", "--temperature", 0, "--max-tokens", 9, "--quiet")
    assert done == (0, greedy, "")
    assert run("generate", "--model", folder, "abc", "--ignore-generation-config") == (0, neutral, "")


def test_what_a_generation_config_asks_for_in_vain_is_one_sentence(run, model_folder, tmp_path):
    folder = with_settings(tmp_path / "model", model_folder, num_beams=4)
    assert_refused(run("generate", "--model", folder, "abc"), 2, "num_beams=4", "--ignore-generation-config")


# -------------------------------------------------------------------------------------------------- what is remembered


def test_a_run_goes_on_with_what_earlier_programs_learned(generate, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(ledger, "SECONDS", 1e6)  # probes are affordable, however busy the machine is
    known, policy = [], Target.policy
    monkeypatch.setattr(Target, "policy", lambda *given: known.append(given[0].prior) or policy(*given))
    for _ in range(3):
        assert generate("abc", "--max-tokens", 30).code == 0
        known.append(LLM(model_folder).target.prior)
    before, learned = known[::2], known[1::2]
    assert before[0] is None and before[1:] == learned[:2]
    judged = [sum(map(sum, prior["hits"] + prior["misses"])) for prior in learned]
    assert judged[2] > judged[0] > 0


def test_what_an_interrupted_run_has_learned_is_kept(generate, model_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(ledger, "SECONDS", 1e6)  # probes are affordable, however busy the machine is
    count, add = iter(range(99)), _Text.add

    def interrupted(display, round_):
        add(display, round_)
        if next(count) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Text, "add", interrupted)
    done = generate("abc", "--max-tokens", 200)
    assert (done.code, done.err) == (130, "") and done.out
    prior = LLM(model_folder).target.prior
    assert prior is not None and sum(map(sum, prior["hits"])) + sum(map(sum, prior["misses"])) > 0


# ------------------------------------------------------------------------------------------- penalties, stops, logprobs


def test_penalties_are_those_of_the_library(generate, answer):
    params = {"repetition_penalty": 1.4, "presence_penalty": 1.5, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2}
    options = [part for name, value in params.items() for part in ("--" + name.replace("_", "-"), value)]
    done = generate("abcabcabc", "--max-tokens", 30, *options, "--json")
    expected = answer("abcabcabc", max_tokens=30, **params)
    assert json.loads(done.out)["tokens"] == expected.token_ids


def test_stop_texts_and_tokens_end_the_output(generate, answer):
    whole = answer("def f(x):", max_tokens=40)
    call = ("def f(x):", "--max-tokens", 40, "--json")
    document = json.loads(generate(*call, "--stop", "never there", "--stop", "Y,").out)
    assert (document["finish_reason"], document["stop_reason"]) == ("stop", "Y,")
    assert document["text"] == whole.text[: whole.text.index("Y,")]
    stop = whole.token_ids[7]
    end = whole.token_ids.index(stop) + 1
    for given in ((f"{stop},256",), (256, "--stop-token-ids", stop)):
        document = json.loads(generate(*call, "--stop-token-ids", *given).out)
        assert (document["tokens"], document["finish_reason"]) == (whole.token_ids[:end], "stop")
        assert document["stop_reason"] == stop


def test_logprobs_are_in_the_document_and_in_lines(generate, answer):
    expected = answer("abc", max_tokens=5, logprobs=2)
    document = json.loads(generate("abc", "--max-tokens", 5, "--logprobs", 2, "--json").out)
    assert [one["token"] for one in document["logprobs"]] == expected.token_ids
    for one, by_token in zip(document["logprobs"], expected.logprobs, strict=True):
        assert one["rank"] == 1 and len(one["top"]) == 2
        assert {token: pytest.approx(logprob) for token, logprob in one["top"]} == {
            token: value.logprob for token, value in by_token.items()
        }
    line = json.loads(generate("--prompts", "-", "--max-tokens", 5, "--logprobs", 0, stdin=b'{"prompt": "abc"}').out)
    assert [one["token"] for one in line["logprobs"]] == expected.token_ids and line["logprobs"][0]["top"] == []
    assert "logprobs" not in json.loads(generate("abc", "--max-tokens", 5, "--json").out)


# ------------------------------------------------------------------------------------------------- backends, the demo


def test_every_backend_writes_the_same_text_and_is_named(generate):
    call = ("--json", "--max-tokens", 24, "--exit-layer", 1, "hello there", "--backend")
    documents = [json.loads(generate(*call, name).out) for name in ("views", "compiled")]
    assert [document["backend"] for document in documents] == ["views", "compiled"]
    assert documents[0]["tokens"] == documents[1]["tokens"]


def test_options_of_the_model_reach_it(generate, monkeypatch):
    given, init = {}, LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, *model, **own: given.update(own) or init(self, *model, **own))
    wanted = {"dtype": "bfloat16", "device": "cpu", "exit_heads": "none", "backend": "compiled"}
    options = [part for name, value in wanted.items() for part in ("--" + name.replace("_", "-"), value)]
    assert generate("abc", "--max-tokens", 2, "--exact", *options).code == 0
    assert {name: given[name] for name in wanted} == wanted and given["exact"] is True


@pytest.mark.parametrize(
    ("installed", "command", "model"),
    [(True, "generate", "smollm2"), (True, "chat", "smollm2"), (False, "generate", "demo"), (False, "chat", "smollm2")],
)
def test_without_a_model_it_is_smollm2_where_installed_and_the_line_says_so(
    run, monkeypatch, installed, command, model
):
    def opened(name, *arguments, **options):
        raise Failure(f"opened {name}")

    monkeypatch.setattr(session, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(importlib.import_module(f"selfspec.cli.{command}"), "opened", opened)
    done = run(command, *(["def"] if command == "generate" else []))
    assert f"opened {model}" in done.err and f"({model})" in done.err
    asked = run(command, *(["def"] if command == "generate" else []), "--model", "demo")
    assert "opened demo" in asked.err and "no --model" not in asked.err


def test_the_demo_can_be_inspected_and_asked_for_by_name(run, monkeypatch):
    report = json.loads(run("inspect", "demo", "--json").out)
    assert report["self_check"] and report["exit_layer"] >= 1 and report["num_speculative_tokens"] >= 1
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    done = run("generate", "def", "--max-tokens", 4)
    assert done.code == 0 and done.out == run("generate", "def", "-m", "demo", "--max-tokens", 4).out


def test_the_tokenizer_is_saved_where_asked(run, model_folder, tmp_path):
    assert run("inspect", model_folder, "--json", "--save-tokenizer", tmp_path / "made").code == 0
    assert (tmp_path / "made" / "tokenizer.json").is_file()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_help_cuts_no_name_in_a_narrow_terminal(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = run(command, "--help").out
    assert f"selfspec {command}" in shown and "--" in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
