"""`selfspec generate` and `inspect` when all is well: what goes to stdout, what to stderr, and that it is right."""

from __future__ import annotations

import json
import sys

import pytest

import selfspec
from tests import cli_fixtures
from tests.cli_fixtures import Terminal

model_folder, chat_folder, run = cli_fixtures.model_folder, cli_fixtures.chat_folder, cli_fixtures.run
STATS = {"num_generated_tokens", "num_spec_steps", "num_draft_tokens", "mean_acceptance_length", "acceptance_histogram"}


@pytest.fixture
def generate(run, model_folder):
    def call(*arguments, stdin=None):
        return run("generate", "--model", model_folder, *arguments, stdin=stdin)

    return call


@pytest.fixture(scope="module")
def target(model_folder):
    return selfspec.load(model_folder)


def test_version_is_the_package_s(run):
    assert run("--version") == (0, f"selfspec {selfspec.__version__}\n", "")


def test_text_goes_to_stdout_and_nothing_else_anywhere(generate, target):
    done = generate("def f(x):", "--max-new-tokens", 30)
    [expected] = target.generate("def f(x):", max_new_tokens=30)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_streamed_and_whole_text_are_the_same(generate, target, stream):
    [expected] = target.generate("abc", max_new_tokens=40, temperature=0.9, seed=3)
    done = generate("abc", "--max-new-tokens", 40, "--temperature", 0.9, "--seed", 3, stream)
    assert done == (0, expected.text + "\n", "")


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_a_pipe_is_read_as_the_prompt_without_its_last_line_break(generate, prompt):
    assert generate(*prompt, stdin="é = 1\n".encode()) == generate("é = 1")


def test_json_is_one_document(generate, target):
    done = generate("abc", "--json", "--max-new-tokens", 20, "--temperature", 0.8, "--seed", 5)
    document = json.loads(done.out)
    [expected] = target.generate("abc", max_new_tokens=20, temperature=0.8, seed=5)
    assert (done.code, done.err) == (0, "")
    assert document["text"] == expected.text
    assert document["tokens"] == expected.tokens
    assert (document["finish_reason"], document["seed"]) == (expected.finish_reason, 5)
    assert document["stats"].keys() >= STATS
    assert document["seconds"] == pytest.approx(sum(document["seconds_by_stage"].values()))


def test_no_policy_changes_the_text(generate):
    plain = generate("abc", "--policy", "plain")
    assert plain.code == 0
    assert (
        plain == generate("abc", "--exit-layer", 2, "--num-draft-tokens", 6) == generate("abc", "--num-draft-tokens", 0)
    )


def test_compare_times_both_and_finds_the_same_tokens(generate):
    done = generate("abc", "--compare", "--json", "--max-new-tokens", 12)
    comparison = json.loads(done.out)["compare"]
    assert comparison["tokens_identical"] is True
    assert comparison["first_difference"] is None
    assert len(comparison["plain_seconds"]) == len(comparison["drafted_seconds"]) >= 2
    assert comparison["speedup"] > 0


def test_a_comparison_ends_with_one_line_on_stderr(generate):
    done = generate("abc", "--show-drafts", "--compare", "--max-new-tokens", 12)
    assert done.out == generate("abc", "--max-new-tokens", 12).out
    line = done.err.strip()
    assert "\n" not in line, line
    assert all(words in line for words in ("tokens/s", "acceptance length", "x plain decoding", "same 12 tokens")), line


def test_quiet_says_nothing(generate):
    done = generate("abc", "-q", "--compare", "--stats", "--max-new-tokens", 5)
    assert (done.code, done.err) == (0, "")


def test_stats_are_a_table_on_stderr(generate):
    done = generate("abc", "--stats", "--max-new-tokens", 12)
    assert done.out == generate("abc", "--max-new-tokens", 12).out
    assert all(words in done.err for words in ("drafted tokens", "position 1", "verify", "tokens/s"))


def test_stop_text_ends_the_output_and_is_no_part_of_it(generate, target):
    [whole] = target.generate("def f(x):", max_new_tokens=40)
    stop = "Y,"
    done = generate("def f(x):", "--max-new-tokens", 40, "--stop", "never there", "--stop", stop, "--json")
    document = json.loads(done.out)
    assert document["finish_reason"] == "stop"
    assert document["text"] == whole.text[: whole.text.index(stop)]


# ----------------------------------------------------------------------------------------------- file of prompts


def test_a_file_of_prompts_gives_a_line_each_in_their_order(generate, target, tmp_path):
    lines = [
        {"prompt": "one", "id": "first", "max_new_tokens": 25},
        {"prompt": "number two", "seed": 9},
        {"prompt": "3", "id": 3, "max_new_tokens": 1},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    done = generate("--prompts", tmp_path / "prompts.jsonl", "--temperature", 0.9, "--seed", 2, "--max-new-tokens", 10)
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
    done = generate("--prompts", "-", "--compare", "--max-new-tokens", 4, stdin=b'{"prompt": "a"}\n{"prompt": "b"}')
    assert len(done.out.splitlines()) == 2
    assert "same 8 tokens" in done.err


# ---------------------------------------------------------------------------------------------------------- chat


def test_a_chat_template_is_used_when_there_is_one(run, chat_folder, target):
    as_text = "system: brief\nuser: hi\nbot:"
    [expected] = target.generate(as_text, max_new_tokens=12)
    call = ("generate", "--model", chat_folder, "--max-new-tokens", 12)
    assert run(*call, "hi", "--system", "brief").out == expected.text + "\n"
    assert run(*call, "hi").out == run(*call, "user: hi\nbot:", "--no-chat").out


# ------------------------------------------------------------------------------------------------------- colours


def test_drafts_are_coloured_on_a_terminal(generate, monkeypatch):
    plain = generate("abc", "--max-new-tokens", 40).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    done = generate("abc", "--show-drafts", "--max-new-tokens", 40)
    assert done.code == 0
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in plain


@pytest.mark.parametrize(("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({}, False)])
@pytest.mark.parametrize("no_colour", [True, False])
def test_colours_follow_the_environment(generate, monkeypatch, variables, coloured, no_colour):
    call = ("abc", "--show-drafts", "--max-new-tokens", 8)
    generate(*call)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    done = generate(*call)
    assert ("\x1b[" in done.out) == ("\x1b[" in done.err) == (coloured and not no_colour)


def test_a_picture_can_be_saved(generate, tmp_path):
    done = generate("abc", "--svg", tmp_path / "drafts.svg", "--max-new-tokens", 20)
    assert done.code == 0
    drawn = (tmp_path / "drafts.svg").read_text(encoding="utf-8")
    assert drawn.lstrip().startswith("<svg")
    assert "acceptance" in drawn


# ------------------------------------------------------------------------------------------------------- inspect


def test_inspect_tells_what_a_model_is(run, model_folder):
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
        "exit_layer": 1,
        "num_draft_tokens": 4,
    }
    text = run("inspect", model_folder).out
    assert all(words in text for words in ("llama", "passes", "float32", "256"))


def test_inspect_says_why_a_model_cannot_draft(run, tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)).save_pretrained(tmp_path)
    done = run("inspect", tmp_path, "--json")
    report = json.loads(done.out)
    assert done.code == 1
    assert (report["family"], report["layers"], report["self_check"]) == ("mamba", 2, False)
    assert "rolled back" in report["reason"]
    assert "does not pass" in run("inspect", tmp_path).out
