"""`python -m eval.shift`: three runs over one workload, told apart, with the same tokens in all."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from eval import shift
from tests import cli_fixtures

model_folder = cli_fixtures.model_folder


def test_every_run_is_recorded_and_drawn(model_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "def f(x):", "xyz")))
    given = ["--model", model_folder, "--prompts", prompts, "--exit-layer", 2, "--num-requests", 6]
    given += ["--max-new-tokens", 12, "--passes", 1, "--window", 2, "--output", tmp_path / "out"]
    assert shift.main([str(each) for each in given]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "shift.json").read_text()) == record
    assert set(record["acceptance"]) == set(shift.COLOURS) and record["tokens_identical"]
    for rates in record["acceptance"].values():
        assert len(rates) == 6 and all(0 <= rate <= 1 for rate in rates)
    assert "<svg" in (tmp_path / "out" / "shift.svg").read_text()


def test_a_file_without_a_text_is_refused(model_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    assert shift.main(["--model", str(model_folder), "--prompts", str(prompts), "--exit-layer", "2"]) == 2
    assert "prompts.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['{"turns": ["ab", "cd"]}', '{"question": "ab"}', '{"prompt": "ab"}', '{"turns": [], "prompt": "ab"}']
)
def test_a_prompt_is_the_first_turn_or_the_question_or_the_prompt(line, model_folder, tmp_path):
    (tmp_path / "some.jsonl").write_text(line + "\n")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    [one, again] = shift.read_prompts(str(tmp_path / "some.jsonl"), 2, 64, tokenizer)
    assert one == again == tokenizer("ab")["input_ids"]
