"""Exit heads are trained for a model that stays as it is, go on where they stopped, and are refused bad input."""

from __future__ import annotations

import errno

import pytest
import torch
import yaml

from selfspec.model.exit_heads import FILE, ExitHeads
from tests.models import build
from tests.target import load
from train import heads_run
from train.__main__ import main
from train.config_file import read_file
from train.heads_config import HeadsRun, parse_heads
from train.heads_files import CHECKPOINT
from train.heads_loss import exit_losses, measure, with_rest
from train.heads_states import Batch, Stream, collect, run_texts
from train.heads_text import Text, gather_texts


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random model of 4 layers without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tiny_folder, tmp_path):
    """What a YAML file for a run of a second would hold."""
    return {
        "heads": {"model": str(tiny_folder), "exits": [1, 2], "rank": 8, "output": str(tmp_path / "out")},
        "text": {"prompt_tokens": 4, "num_texts": 16, "num_held_out": 6, "max_new_tokens": 24, "batch_size": 8},
        "training": {"steps": 12, "tokens_per_batch": 64, "warmup_steps": 2, "save_steps": 5, "log_steps": 4},
    }


def run(tmp_path, settings, *options):
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(settings))
    return main([str(path), *options])


def state_of(folder):
    return ExitHeads.load(folder).state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_trained_heads_agree_more_and_change_no_token(stories_folder, tmp_path, capsys):
    out = tmp_path / "heads"
    settings = {
        "heads": {"model": str(stories_folder), "exits": [3], "rank": 64, "output": str(out)},
        "text": {"num_texts": 40, "num_held_out": 10, "max_new_tokens": 64},
        "training": {"steps": 80, "tokens_per_batch": 256, "warmup_steps": 10},
    }
    before = load(stories_folder)
    assert run(tmp_path, settings) == 0
    after = load(stories_folder, exit_heads=out)
    assert after.exit_heads is not None and after.exit_heads.layers == (3,)
    assert same(before.model.state_dict(), after.model.state_dict())
    hidden = torch.randn(7, 64)
    with torch.inference_mode():
        assert torch.equal(before.stack.logits(hidden), after.stack.logits(hidden))
        assert not torch.equal(before.stack.logits(hidden, 3), after.stack.logits(hidden, 3))
    prompts = ["Once upon a time", "The dog was"]
    plain = before.generate(prompts, policy="plain", max_new_tokens=48)
    drafts = [t.generate(prompts, exit_layer=3, num_draft_tokens=4, max_new_tokens=48) for t in (before, after)]
    for drafted in drafts:
        assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    accepted = [sum(c.stats.num_accepted_draft_tokens for c in drafted) for drafted in drafts]
    assert accepted[1] > accepted[0]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 |"))
    was, now = (float(cell) for cell in row.split("|")[2:4])
    assert now > 1.5 * was
    card = (out / "exit_heads.md").read_text("utf-8")
    assert row in card and f"python -m train {tmp_path / 'heads.yaml'}" in card
    assert (out / "exit_heads.csv").read_text().startswith("step,learning_rate,loss_exit_3\n50,")


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", "bfloat16"), ("gemma2", "float32")])
def test_the_model_trained_for_stays_as_it_is(settings, tmp_path, monkeypatch, family, dtype):
    build(family).save_pretrained(tmp_path / family)
    settings["heads"] |= {"model": str(tmp_path / family), "dtype": dtype}
    settings["training"] |= {"top_k": 8}
    seen = []

    def open_and_look(config, opened=heads_run.open_target):
        target = opened(config)
        seen.append((target, {name: value.clone() for name, value in target.model.state_dict().items()}))
        return target

    monkeypatch.setattr(heads_run, "open_target", open_and_look)
    assert run(tmp_path, settings) == 0
    ((target, before),) = seen
    assert same(target.model.state_dict(), before) and target.exit_heads is None
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(value.dtype == torch.float32 for value in state_of(tmp_path / "out").values())
    loaded = load(tmp_path / family, dtype=dtype, exit_heads=tmp_path / "out")
    assert loaded.exit_heads.layers == (1, 2)


@pytest.mark.parametrize("loss", [{}, {"top_k": 0, "max_cached_tokens": 200}])
def test_resuming_reaches_the_same_weights(settings, tmp_path, monkeypatch, capsys, loss):
    settings["training"] |= loss
    assert run(tmp_path, settings) == 0
    whole, curve = state_of(tmp_path / "out"), (tmp_path / "out" / "exit_heads.csv").read_text()
    assert not (tmp_path / "out" / CHECKPOINT).exists()

    def write_and_stop(folder, state, write=heads_run.write_checkpoint):
        write(folder, state)
        raise KeyboardInterrupt

    settings["heads"]["output"] = str(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(heads_run, "write_checkpoint", write_and_stop)
        assert run(tmp_path, settings) == 130
        monkeypatch.setattr(heads_run, "gather_texts", None)  # the texts are in the checkpoint
        assert run(tmp_path, settings, "--resume") == 130  # stopped once more, at step 10
    assert not (tmp_path / "stopped" / FILE).exists()
    assert run(tmp_path, settings, "--resume") == 0
    assert same(state_of(tmp_path / "stopped"), whole)
    assert (tmp_path / "stopped" / "exit_heads.csv").read_text() == curve
    assert "--resume" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(settings, tmp_path, monkeypatch, capsys):
    assert run(tmp_path, settings, "--resume") == 2
    assert "holds no exit_heads.checkpoint.pt" in capsys.readouterr().err
    monkeypatch.setattr(heads_run._Run, "finish", lambda self, command: None)
    assert run(tmp_path, settings) == 0
    settings["heads"]["rank"] = 4
    assert run(tmp_path, settings, "--resume") == 2
    assert "heads.rank must be as when the run" in capsys.readouterr().err
    (tmp_path / "out" / CHECKPOINT).write_bytes(b"PK")
    assert run(tmp_path, settings, "--resume") == 2
    assert "truncated or damaged" in capsys.readouterr().err


def test_a_loss_of_nan_stops_the_run_and_keeps_what_was_good(settings, tmp_path, monkeypatch, capsys):
    assert run(tmp_path, settings) == 0
    good = (tmp_path / "out" / FILE).read_bytes()

    steps = []

    def broken(*given):
        steps.append(len(steps))
        losses = exit_losses(*given)
        return losses if len(steps) <= 7 else [loss * torch.nan for loss in losses]

    monkeypatch.setattr(heads_run, "exit_losses", broken)
    assert run(tmp_path, settings) == 1
    assert "the loss is nan at step 8" in capsys.readouterr().err
    assert (tmp_path / "out" / FILE).read_bytes() == good and (tmp_path / "out" / CHECKPOINT).is_file()
    monkeypatch.undo()
    settings["training"]["lr"] = 1e-4
    assert run(tmp_path, settings, "--resume") == 0


@pytest.mark.parametrize(("module", "code"), [("selfspec.model.exit_heads.as_bytes", 1), ("torch.save", 1)])
def test_a_full_disk_leaves_the_file_before_intact(settings, tmp_path, monkeypatch, capsys, module, code):
    assert run(tmp_path, settings) == 0
    good = (tmp_path / "out" / FILE).read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, full)
    assert run(tmp_path, settings) == code
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out" / FILE).read_bytes() == good
    assert not list((tmp_path / "out").glob(".exit_heads*")), "no half-written file stays behind"


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("heads", {"model": "/nowhere/model"}, "there is no folder /nowhere/model"),
        ("heads", {"exits": [1, 4]}, "heads.exits must be from 1 to 3"),
        ("heads", {"exits": [0]}, "heads.exits must be a list of layer counts from 1"),
        ("heads", {"rang": 8}, "heads has no key 'rang'; did you mean 'rank'?"),
        ("training", {"top_k": "all"}, "training.top_k must be of type int, got 'all'"),
        ("training", {"max_cached_tokens": 8}, "training.max_cached_tokens must be at least 64"),
        ("training", {"tokens_per_batch": 4096}, "text gives "),
        ("text", {"max_new_tokens": 500}, "text.max_new_tokens must be short enough for the model's 128 positions"),
        ("text", {"prompt_tokens": 0}, "text.prompt_tokens must be above 0 where greedy texts have no text.prompts"),
        ("text", {"prompts": ["/nowhere.txt"]}, "text.prompts must be files of UTF-8 text"),
        ("text", {"temperatures": []}, "text.temperatures must be a list of temperatures from 0"),
        ("heads", {"model": "demo", "output": ""}, "heads.output must name a folder"),
        ("heads", {"output": "/proc/nowhere"}, "heads.output must be a folder that can be written"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(settings, tmp_path, capsys, section, values, message):
    settings[section] |= values
    assert run(tmp_path, settings) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "Traceback" not in said


def test_short_or_empty_prompts_are_refused(tmp_path, capsys):
    def says(prompts, **text):
        settings = {
            "heads": {"exits": [2], "output": str(tmp_path / "out")},
            "text": {"prompts": [str(prompts)], "num_texts": 4, "num_held_out": 2, "max_new_tokens": 8, **text},
        }
        assert run(tmp_path, settings) == 2
        return capsys.readouterr().err

    empty, short, lines = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "lines.jsonl"
    empty.write_text("")
    short.write_text("def f(x)")
    lines.write_text('{"turns": ["def f(x):", "more"]}\n{"other": 1}\n')
    assert "are empty or too short" in says(empty)
    assert "hold too little text for prompts of 16 tokens" in says(short)
    assert "text.field must name a field with a text, got 'turns' in record 2" in says(lines, field="turns")
    lines.write_text("def\n")
    assert "must be JSON, got 'def'" in says(lines)


def test_texts_come_from_other_records_than_those_held_out(stories, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"turns": ["Tom has {n} red balls. He"]}}\n' for n in range(20)))
    given = {"prompts": [str(file)], "field": "turns", "prompt_tokens": 0, "num_texts": 24, "num_held_out": 2}
    config = parse_heads({"text": {**given, "held_out_percent": 10.0, "max_new_tokens": 6}}).text
    train, held_out = gather_texts(stories, config)
    assert len(train) == 21 and len(held_out) == 2, "of 18 prompts 6 came twice, 3 of them greedily"
    heads = [{tuple(text.tokens[: text.num_prompt]) for text in part} for part in (train, held_out)]
    assert len(heads[0]) == 18 and len(heads[1]) == 2 and not heads[0] & heads[1]
    assert gather_texts(stories, config) == (train, held_out), "the same texts from the same seed"
    greedy = stories.generate([train[0].tokens[: train[0].num_prompt]], policy="plain", max_new_tokens=6)
    assert train[0].tokens[train[0].num_prompt :] == greedy[0].tokens


def test_every_position_is_seen_as_decoding_saw_it(stories):
    texts = [Text(list(range(5, 5 + n)), 3) for n in (9, 4, 30)]
    positions = [range(2, 8), range(2, 3), range(0, 29)]
    (seen,) = run_texts(stories.stack, texts, positions, (2, 4))
    alone = [
        next(run_texts(stories.stack, [text], [spot], (2, 4))) for text, spot in zip(texts, positions, strict=True)
    ]
    torch.testing.assert_close(seen.hidden, torch.cat([one.hidden for one in alone], 1), atol=1e-4, rtol=1e-4)
    kept = collect(stories.stack, texts, positions, (2, 4), top_k=10)
    assert kept.ids.shape == (36, 10) and kept.log_probs.shape == (36, 11) and kept.hidden.shape == (2, 36, 64)
    with torch.inference_mode():
        logits = stories.stack.logits(seen.final)
    assert torch.equal(kept.ids[:, 0].long(), logits.argmax(-1))
    torch.testing.assert_close(kept.log_probs.float().exp().sum(-1), torch.ones(36), atol=2e-3, rtol=0)


def test_losses_are_zero_where_the_exit_says_what_the_model_says():
    log_p = torch.randn(5, 12).log_softmax(-1)
    top, _ = log_p.topk(4)
    assert torch.allclose(with_rest(top).exp().sum(-1), torch.ones(5), atol=1e-5)

    class Whole:
        dtype = torch.float32

        def logits(self, hidden, layer=None):
            return hidden

    heads = ExitHeads([1], 12, 2)
    for batch in (Batch(log_p[None], log_p, None, None), Batch(log_p[None], None, log_p.topk(4)[1], with_rest(top))):
        (loss,) = exit_losses(Whole(), heads, batch)
        assert abs(loss.item()) < 1e-5
        (loss,) = exit_losses(Whole(), heads, batch._replace(hidden=torch.randn(1, 5, 12) * 3))
        assert loss.item() > 0.1


def test_shards_give_every_position_once_an_epoch_and_any_step_again(stories):
    texts = [Text(list(range(3, 24)), 1) for _ in range(12)]
    parsed = parse_heads({"training": {"tokens_per_batch": 20, "max_cached_tokens": 90}, "text": {"num_texts": 12}})
    stream = Stream(stories.stack, texts, (2,), parsed.text, parsed.training)
    assert len(stream.shards) == 3 and stream.num_positions == 240 and sum(stream.sizes) == 12
    taken = [next(stream.batches(step)).hidden for step in (0, 5, 13)]
    every = stream.batches(0)
    many = [next(every).hidden for _ in range(14)]
    assert all(torch.equal(one, many[step]) for one, step in zip(taken, (0, 5, 13), strict=True))


@pytest.mark.parametrize(("layers", "exits"), [(2, (1,)), (5, (1, 2)), (16, (2, 4, 6, 8)), (32, (4, 8, 12, 16))])
def test_default_exits(layers, exits):
    assert HeadsRun().exits_of(layers) == exits


def test_the_shipped_configuration_names_every_key():
    content = read_file("configs/train/exit_heads.yaml")
    config = parse_heads(content)
    assert {section: set(values) for section, values in content.items()} == {
        section: set(type(getattr(config, section)).__dataclass_fields__) for section in ("heads", "text", "training")
    }


def test_measuring_without_heads_is_measuring_with_new_ones(stories):
    texts = [Text(list(range(3, 40)), 2)]
    heads = ExitHeads([2, 3], 64, 4)
    config = HeadsRun().text
    assert measure(stories.stack, None, texts, (2, 3), config) == measure(stories.stack, heads, texts, (2, 3), config)
