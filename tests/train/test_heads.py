"""Exit heads are trained for a model that stays as it is, go on where they stopped, and are refused bad input."""

from __future__ import annotations

import errno

import pytest
import torch
import yaml

from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import FILE, ExitHeads
from tests.gguf_files import source_model, write_gguf
from tests.helpers import tokens_of
from tests.models import build
from tests.slow import slow
from tests.target import load
from tests.tokenizers import word_tokenizer
from train import configuration, heads_run
from train.__main__ import main
from train.config import parse_config
from train.configuration import read_yaml
from train.heads_config import HeadsRun
from train.heads_files import CHECKPOINT, TEXTS
from train.heads_loss import draft_subset, exit_losses, measure
from train.heads_states import Batch, Stream, collect, run_texts, with_rest
from train.heads_text import gather_texts
from train.material import load_tokenizer
from train.models import load_base
from train.samples import Sample
from train.written import Task, Written


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
        "heads": {"model": str(tiny_folder), "exits": [1, 2], "inner_size": 8, "output": str(tmp_path / "out")},
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
        "heads": {"model": str(stories_folder), "exits": [3], "inner_size": 96, "output": str(out)},
        "text": {"num_texts": 40, "num_held_out": 10, "max_new_tokens": 64},
        "training": {"steps": 80, "tokens_per_batch": 256, "warmup_steps": 10, "lr": 3e-3},
    }
    before = load(stories_folder)
    assert run(tmp_path, settings) == 0
    after = load(stories_folder, exit_heads=out)
    assert after.exit_heads is not None and after.exit_heads.layers == (3,)
    assert same(before.model.state_dict(), after.model.state_dict())
    hidden = torch.randn(7, 64)
    with torch.inference_mode():
        assert torch.equal(before.split.logits(hidden), after.split.logits(hidden))
        assert not torch.equal(before.split.logits(hidden, 3), after.split.logits(hidden, 3))
    prompts = ["Once upon a time", "The dog was"]
    plain = before.generate(prompts, policy="plain", max_tokens=48)
    drafts = [t.generate(prompts, exit_layer=3, num_speculative_tokens=4, max_tokens=48) for t in (before, after)]
    for drafted in drafts:
        assert tokens_of(drafted) == tokens_of(plain)
    accepted = [sum(c.stats.num_accepted_draft_tokens for c in drafted) for drafted in drafts]
    assert accepted[1] > accepted[0]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 |"))
    was, now = (float(cell) for cell in row.split("|")[2:4])
    assert now > 1.5 * was
    card = (out / "exit_heads.md").read_text("utf-8")
    assert row in card and f"python -m train {tmp_path / 'heads.yaml'}" in card
    assert (out / "exit_heads.csv").read_text().startswith("step,learning_rate,loss_exit_3\n50,")


def test_the_model_trained_for_stays_as_it_is(settings, tmp_path, monkeypatch):
    family, dtype = "gpt2", "bfloat16"
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


def test_resuming_reaches_the_same_weights(settings, tmp_path, monkeypatch, capsys):
    settings["training"] |= {"kl_share": 0.5, "max_cached_tokens": 200}
    assert run(tmp_path, settings) == 0
    whole, curve = state_of(tmp_path / "out"), (tmp_path / "out" / "exit_heads.csv").read_text()
    assert not (tmp_path / "out" / CHECKPOINT).exists() and not (tmp_path / "out" / TEXTS).exists()

    def gather_again(target, config, written):
        with monkeypatch.context() as patch:
            patch.setattr("train.heads_text.LLMEngine", None)  # all texts are in their file
            return gather_texts(target, config, written)

    def write_and_stop(folder, state, write=heads_run.write_checkpoint):
        write(folder, state)
        raise KeyboardInterrupt

    settings["heads"]["output"] = str(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(heads_run, "write_checkpoint", write_and_stop)
        assert run(tmp_path, settings) == 130
        monkeypatch.setattr(heads_run, "gather_texts", gather_again)  # the texts are in their file
        assert run(tmp_path, settings, "--resume") == 130  # stopped once more, at step 10
    assert not (tmp_path / "stopped" / FILE).exists()
    assert run(tmp_path, settings, "--resume") == 0
    assert same(state_of(tmp_path / "stopped"), whole)
    assert (tmp_path / "stopped" / "exit_heads.csv").read_text() == curve
    assert "--resume" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(settings, tmp_path, monkeypatch, capsys):
    assert run(tmp_path, settings, "--resume") == 2
    assert "holds no exit_heads.checkpoint.pt or exit_heads.texts.jsonl" in capsys.readouterr().err
    monkeypatch.setattr(heads_run._Run, "finish", lambda self, command: None)
    assert run(tmp_path, settings) == 0
    settings["heads"]["inner_size"] = 4
    assert run(tmp_path, settings, "--resume") == 2
    assert "heads.inner_size must be as when the run" in capsys.readouterr().err
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


@pytest.mark.parametrize("writes", ["selfspec.model.exit_heads.as_bytes", "torch.save"])
def test_a_full_disk_leaves_the_file_before_intact(settings, tmp_path, monkeypatch, capsys, writes):
    assert run(tmp_path, settings) == 0
    good = (tmp_path / "out" / FILE).read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writes, full)
    assert run(tmp_path, settings) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "out" / FILE).read_bytes() == good
    assert not list((tmp_path / "out").glob(".exit_heads*")), "no half-written file stays behind"


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("heads", {"model": "/nowhere/model"}, "there is no folder /nowhere/model"),
        ("heads", {"exits": [1, 4]}, "heads.exits must be from 1 to 3"),
        ("heads", {"exits": [0]}, "heads.exits must be a list of layer counts from 1"),
        ("heads", {"inner": 8}, "heads: key 'inner' is unknown; did you mean 'inner_size'?"),
        ("training", {"kl_share": 1.5}, "training.kl_share must be between 0 and 1, got 1.5"),
        ("training", {"top_k": "all"}, "training.top_k must be a whole number, got 'all'"),
        ("training", {"max_cached_tokens": 8}, "training.max_cached_tokens must be at least 64"),
        ("training", {"tokens_per_batch": 4096}, "text gives "),
        ("text", {"max_new_tokens": 500}, "text.max_new_tokens must be short enough for the model's 128 positions"),
        ("text", {"prompt_tokens": 0}, "text.prompt_tokens must be at least 1"),
        ("data", {"path": "/nowhere.txt"}, "data.path must be a file or the id of a data set"),
        ("text", {"temperatures": []}, "text.temperatures must be a list of temperatures from 0"),
        ("heads", {"model": "demo", "output": ""}, "heads.output must name a folder"),
        ("heads", {"output": "/proc/nowhere"}, "heads.output must be a folder that can be written"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(settings, tmp_path, capsys, section, values, message):
    settings[section] = settings.get(section, {}) | values
    assert run(tmp_path, settings) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "Traceback" not in said


def test_texts_come_from_other_records_than_those_held_out(stories, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"question": "Tom has {n} red balls. He"}}\n' for n in range(20)))
    given = {"num_texts": 24, "num_held_out": 2, "max_new_tokens": 6, "temperatures": [0.0, 1.0]}
    data = {"path": str(file), "text_field": "question", "held_out_percent": 10.0}
    config = configuration.build(HeadsRun, {"text": given, "data": data})
    train, held_out = gather_texts(stories, config, Written(tmp_path / TEXTS, "weights"))
    assert len(train) == 21 and len(held_out) == 2, "of 18 prompts 6 came twice, 3 of them greedily"
    heads = [{tuple(text.tokens[: text.num_prompt]) for text in part} for part in (train, held_out)]
    assert len(heads[0]) == 18 and len(heads[1]) == 2 and not heads[0] & heads[1]
    again = gather_texts(stories, config, Written(tmp_path / "anew.jsonl", ""))
    assert again == (train, held_out), "the same texts from the same seed"
    greedy = stories.generate([train[0].tokens[: train[0].num_prompt]], policy="plain", max_tokens=6)
    assert train[0].tokens[train[0].num_prompt :] == greedy[0].token_ids


def test_every_position_is_seen_as_decoding_saw_it(stories):
    texts = [Sample(list(range(5, 5 + n)), prompt) for n, prompt in ((9, 3), (4, 3), (30, 1))]
    (seen,) = run_texts(stories.split, texts, (2, 4))
    alone = [next(run_texts(stories.split, [text], (2, 4))) for text in texts]
    torch.testing.assert_close(seen.hidden, torch.cat([one.hidden for one in alone], 1), atol=1e-4, rtol=1e-4)
    kept = collect(stories.split, texts, (2, 4), top_k=10)
    assert kept.ids.shape == (36, 10) and kept.log_probs.shape == (36, 11) and kept.hidden.shape == (2, 36, 64)
    with torch.inference_mode():
        logits = stories.split.logits(seen.final)
    assert torch.equal(kept.ids[:, 0].long(), logits.argmax(-1))
    torch.testing.assert_close(kept.log_probs.float().exp().sum(-1), torch.ones(36), atol=2e-3, rtol=0)


class Whole:
    """A model of 12 tokens whose hidden states are its logits."""

    dtype, vocab_size = torch.float32, 12

    def logits(self, hidden, layer=None):
        return hidden

    def subset_logits(self, hidden, layer, subset):
        return hidden[:, subset.tokens]


@pytest.mark.parametrize("by_kl", [True, False])
@pytest.mark.parametrize("drafted", [None, [0, 2, 3, 5, 7, 8, 11]])
def test_the_loss_is_the_plain_formula(by_kl, drafted):
    torch.manual_seed(0)
    p, logits, heads = torch.randn(5, 12).mul(2).softmax(-1), torch.randn(5, 12), ExitHeads([1], 12, 2)
    subset = None if drafted is None else Subset(torch.tensor(drafted), None, (0, 0))
    top, ids = p.topk(11)  # of 12: the bucket of the others is one token
    batch = Batch(logits[None], ids, with_rest(top.log()))
    (loss,) = exit_losses(Whole(), heads, batch, subset, by_kl)
    if drafted is None:
        q = logits.softmax(-1)
        kl, overlap, right = (p * (p / q).log()).sum(-1), torch.minimum(p, q).sum(-1), q.gather(1, ids[:, :1])[:, 0]
        cross_entropy = -right.log()
    else:  # the others, and tokens that are not drafted, are one token
        q = torch.zeros(5, 12)
        q[:, drafted] = logits[:, drafted].softmax(-1)
        apart = torch.zeros(5, 12).scatter(1, ids, 1.0) * (q > 0)
        rest_p, rest_q = 1 - (p * apart).sum(-1), (1 - (q * apart).sum(-1)).clamp(min=2e-9)
        ratio = torch.where(apart > 0, p / q.clamp(min=1e-9), 1.0)
        kl = (p * apart * ratio.log()).sum(-1) + rest_p * (rest_p / rest_q).log()
        overlap = (torch.minimum(p, q) * apart).sum(-1) + torch.minimum(rest_p, rest_q)
        greedy = q.gather(1, ids[:, :1])[:, 0]
        cross_entropy = -torch.where(greedy > 0, greedy, 1.0).log()
    expected = kl.mean() if by_kl else 0.9 * (1 - overlap.mean()) + 0.1 * cross_entropy.mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_shards_give_every_position_once_an_epoch_and_any_step_again(stories):
    texts = [Sample(list(range(3, 24)), 1) for _ in range(12)]
    given = {"training": {"tokens_per_batch": 20, "max_cached_tokens": 90}, "text": {"num_texts": 12}}
    parsed = configuration.build(HeadsRun, given)
    stream = Stream(stories.split, texts, (2,), parsed.training)
    assert len(stream.shards) == 3 and stream.num_positions == 240 and sum(stream.sizes) == 12
    taken = [next(stream.batches(step)).hidden for step in (0, 5, 13)]
    every = stream.batches(0)
    many = [next(every).hidden for _ in range(14)]
    assert all(torch.equal(one, many[step]) for one, step in zip(taken, (0, 5, 13), strict=True))


@pytest.mark.parametrize(("layers", "exits"), [(2, (1,)), (5, (1, 2)), (16, (2, 4, 6, 8)), (32, (4, 8, 12, 16))])
def test_default_exits(layers, exits):
    assert HeadsRun().exits_of(layers) == exits


def test_the_shipped_configuration_names_every_key():
    content = read_yaml("configs/train/exit_heads.yaml")
    config = configuration.build(HeadsRun, content)
    assert {section: set(values) for section, values in content.items()} == {
        section: set(type(getattr(config, section)).__dataclass_fields__) for section in ("heads", "text", "training")
    }


def test_measuring_without_heads_is_measuring_with_new_ones(stories):
    texts = [Sample(list(range(3, 40)), 2)]
    heads = ExitHeads([2, 3], 64, 4)
    assert measure(stories.split, None, texts, (2, 3), None) == measure(stories.split, heads, texts, (2, 3), None)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A random model of 4 layers that writes random words, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    build("llama").save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stopped_in", ["prompts", slow("texts"), slow("training")])
def test_a_chat_model_trains_from_nothing_and_a_killed_run_goes_on(
    settings, chat_folder, tmp_path, monkeypatch, capsys, stopped_in
):
    settings["heads"]["model"] = str(chat_folder)
    assert run(tmp_path, settings) == 0
    whole = state_of(tmp_path / "out")
    settings["heads"]["output"] = str(tmp_path / "stopped")
    calls = []

    def stop(*given):
        calls.append(given)
        if len(calls) == {"prompts": 5, "texts": 30, "training": 2}[stopped_in]:
            raise KeyboardInterrupt
        return original(*given)

    owner, name = (heads_run, "write_checkpoint") if stopped_in == "training" else (Written, "add")
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        assert run(tmp_path, settings) == 130
    with (tmp_path / "stopped" / TEXTS).open("a") as file:
        file.write("[[1, 2")  # a line that was being written
    assert run(tmp_path, settings, "--resume") == 0
    assert same(state_of(tmp_path / "stopped"), whole)


def test_prompts_of_a_chat_model_are_its_own_user_turns(chat_folder, tmp_path):
    target = load(chat_folder)
    given = {"num_texts": 6, "num_held_out": 2, "prompt_tokens": 5, "max_new_tokens": 8}
    config = configuration.build(HeadsRun, {"text": given})
    train, held_out = gather_texts(target, config, Written(tmp_path / TEXTS, ""))
    prompts = [target.tokenizer.decode(text.tokens[: text.num_prompt]) for text in (*train, *held_out)]
    assert all(prompt.startswith("w1 ") and prompt.endswith(" w2 w3") for prompt in prompts)
    assert len(set(prompts)) > 4 and all(3 < len(prompt.split()) <= 8 for prompt in prompts)
    target.tokenizer.chat_template = "w1 {{ messages[0]['content'] | length }} w2"
    with pytest.raises(ValueError, match="the user's text in one place, got 0 places"):
        gather_texts(target, config, Written(tmp_path / TEXTS, ""))


def test_texts_are_written_once_for_the_same_weights(tmp_path):
    file, task = tmp_path / TEXTS, Task((1, 2), 8, 0.7, 3)
    Written(file, "a").add(task, [4, 5])
    assert Written(file, "a").get(task) == [4, 5]
    assert Written(file, "a").missing([task, other := task._replace(seed=4), other]) == [other]
    other_model = Written(file, "b")
    assert other_model.get(task) == [] and Written(file, "a").get(task) == [4, 5]
    other_model.add(task, [6])
    assert Written(file, "b").get(task) == [6] and Written(file, "a").get(task) == []


def test_heads_are_trained_over_the_default_draft_vocabulary(monkeypatch):
    target = load(build("llama"))
    texts = [Sample([1, *[50, 51, 52] * 3], 1), Sample([2, 60], 1)]
    assert draft_subset(target.split, texts) is None
    monkeypatch.setattr(type(target.split), "default_draft_vocab", 8)
    subset = draft_subset(target.split, texts)
    assert subset.tokens.tolist() == [0, 1, 2, 3, 50, 51, 52, 60]
    batch = collect(target.split, texts, (2,), 4)
    batch = Batch(batch.hidden.float(), batch.ids.long(), batch.log_probs.float())
    (loss,) = exit_losses(target.split, ExitHeads([2], 32, 4), batch, subset, True)
    loss.backward()
    found = measure(target.split, None, texts, (2,), subset)[2]
    assert loss.isfinite() and 0 <= found.top1 <= 1 and 0 < found.accepted < 1


def test_a_gguf_file_is_a_model_to_train_for(settings, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", source_model(), "Q8_0")
    settings["heads"] |= {"model": str(file), "exits": [1]}
    settings["text"]["max_new_tokens"] = 12
    assert run(tmp_path, settings) == 0
    assert load(file, exit_heads=tmp_path / "out").exit_heads.layers == (1,)
    short = {"exits": {"period": 2}, "run": {"windows": [64]}, "eval": {"window": 64, "prompt_tokens": 16}}
    base = parse_config({"model": {"base": str(file)}, **short})
    assert torch.equal(load_base(base).lm_head.weight, load(file).model.lm_head.weight)
    assert load_tokenizer(file).eos_token_id is not None
