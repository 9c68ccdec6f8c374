"""`selfspec generate --learn`: heads are kept in a folder, runs go on with them, and the text stays the same."""

from __future__ import annotations

import json

import pytest

from selfspec.calibrate.profile import STORED
from selfspec.cli import generate as command
from selfspec.learn import Learner
from selfspec.model.exit_heads import FILE, ExitHeads
from tests.cli_fixtures import assert_refused

FIXED = ("--exit-layer", 1, "--num-speculative-tokens", 4, "--max-tokens", 32)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    return file


def test_a_run_learns_and_the_next_goes_on(run, model_folder, prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(Learner.__init__.__kwdefaults__, "clock", lambda: 0.0)  # learning takes no time by this clock
    arguments = ("generate", "--model", model_folder, "--prompts", prompts, *FIXED)
    folder = tmp_path / "heads" / "new"
    plain = run(*arguments)
    learned = run(*arguments, "--learn", folder)
    texts = [[json.loads(line)["tokens"] for line in done.out.splitlines()] for done in (plain, learned)]
    assert learned.code == 0 and texts[0] == texts[1]
    assert learned.err.startswith("learned from ") and learned.err.count("\n") == 1
    assert str(folder) in learned.err and "% of decoding" in learned.err
    first = ExitHeads.load(folder)
    assert first.layers == (1,) and first.heads["1"].down.any()
    quiet = run(*arguments, "--learn", folder, "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    assert [json.loads(line)["tokens"] for line in quiet.out.splitlines()] == texts[0]
    assert not first.heads["1"].down.equal(ExitHeads.load(folder).heads["1"].down)
    assert [file.name for file in folder.iterdir()] == [FILE]
    written = sum(len(own) for own in texts[0])
    assert sum(first.counts.values()) == written, "of all answers, which drafts begin over"


def test_adaptive_keeps_how_often_its_heads_were_right(run, model_folder, prompts, tmp_path):
    folder = tmp_path / "heads"
    assert run("generate", "--model", model_folder, "--prompts", prompts, "--learn", folder).code == 0
    assert sorted(file.name for file in folder.iterdir()) == sorted([FILE, STORED])
    assert run("generate", "--model", model_folder, "--exit-heads", folder, "number 1").code == 0


def test_what_was_learned_is_kept_when_interrupted(run, model_folder, prompts, tmp_path, monkeypatch):
    def stops(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_write_json", stops)
    done = run("generate", "--model", model_folder, "--prompts", prompts, *FIXED, "--learn", tmp_path / "heads")
    assert done.code == 130
    ExitHeads.load(tmp_path / "heads")


def test_heads_of_another_model_are_refused(run, model_folder, tmp_path):
    ExitHeads([5], 16, 2).save(tmp_path)
    done = run("generate", "--model", model_folder, "--learn", tmp_path, "hello")
    assert_refused(done, 2, "width 16", "width 32")


def test_damaged_heads_are_refused(run, model_folder, tmp_path):
    (tmp_path / FILE).write_bytes(b"no")
    done = run("generate", "--model", model_folder, "--learn", tmp_path, "hello")
    assert_refused(done, 1, str(tmp_path), "damaged")


def test_wrong_usage_is_refused(run, model_folder, tmp_path):
    start = ("generate", "--model", model_folder, "hello", "--learn")
    (tmp_path / "file").write_text("")
    assert_refused(run(*start, tmp_path / "file"), 2, "--learn needs a folder")
    assert_refused(run(*start, tmp_path / "file" / "below"), 1, "--learn", "cannot be written to")
    assert_refused(run(*start, tmp_path, "--policy", "plain"), 2, "--learn", "plain")
    ExitHeads([1], 32, 2).save(tmp_path)
    assert_refused(run(*start, tmp_path, "--exit-heads", tmp_path), 2, "--learn", "--exit-heads")
