"""Exit heads are trained for prompts: within the time, on the model as it is, and no token changes."""

from __future__ import annotations

import errno

import pytest
import torch

from selfspec.calibrate import profile
from selfspec.control.acceptance import Tracker
from selfspec.learning import tune as tuning
from selfspec.learning.agreement import agreement, exit_loss, with_own_states
from selfspec.learning.answering import answer_and_collect
from selfspec.learning.card import CARD, WITH, WITHOUT
from selfspec.learning.rounds import LENGTHS, expected_gain, measure_rounds
from selfspec.learning.states import Positions, collect, run_texts, with_rest
from selfspec.learning.trainer import ExitTrainer
from selfspec.learning.tune import ANSWERS, CHECKPOINT, exits_of
from selfspec.learning.workload import answer, rounds_of, split_prompts
from selfspec.learning.written import Sample, Task, Written
from selfspec.llm import LLM
from selfspec.loading import hub
from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import FILE, ExitHeads
from selfspec.params import SamplingParams, SpeculativeConfig
from tests.gguf_files import source_model, write_gguf
from tests.models import build, some_heads
from tests.target import load
from tests.tokenizers import word_tokenizer

PROMPTS = [[1, 5 + n, 7 + n, 9] for n in range(12)]
QUICK = {"minutes": 0.01, "max_tokens": 12, "exits": [1, 2]}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random model of 4 layers without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return folder


def outputs_of(llm, prompts, **params):
    return [one.outputs[0].token_ids for one in llm.generate(prompts, SamplingParams(max_tokens=24, **params))]


def test_a_run_writes_heads_that_change_no_token(tiny_folder, tmp_path):
    llm, out, lines = LLM(tiny_folder), tmp_path / "out", []
    before = {name: value.clone() for name, value in llm.target.model.state_dict().items()}
    tuned = llm.tune(PROMPTS, out, keep=True, report=lines.append, **QUICK)
    assert tuned.folder == out and len(tuned.exits) == 1 and set(tuned.agreement) == {1, 2}
    assert tuned.num_different == 0 and tuned.num_held_out >= 1 and set(tuned.speeds) > {WITH, WITHOUT}
    assert tuned.gains == (tuned.speeds[WITH] >= tuning.LEAST_GAIN * tuned.speeds[WITHOUT])
    assert sorted(file.name for file in out.iterdir()) == sorted([FILE, CARD, profile.STORED])
    assert "held-out prompts" in (out / CARD).read_text("utf-8") and any("training" in line for line in lines)
    after = llm.target.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(one.requires_grad and one.grad is None for one in llm.target.model.parameters())
    assert llm.target.exit_heads.layers == tuned.exits, "it drafts with them from now on"

    later, plain = LLM(tiny_folder, exit_heads=out), SpeculativeConfig(policy="plain")
    assert later.target.exit_heads.counts == tuned.heads.counts
    assert later.target.prior is not None, "adaptive knows from the first answer on how often the heads are right"
    Tracker(4, later.target.prior)
    fixed = SpeculativeConfig(exit_layer=tuned.exits[0], num_speculative_tokens=3)
    for params in ({}, {"temperature": 0.8, "seed": 3}):
        wanted = outputs_of(later.with_speculative(plain), PROMPTS[:3], **params)
        for own in (SpeculativeConfig(), fixed):
            assert outputs_of(later.with_speculative(own), PROMPTS[:3], **params) == wanted


def test_nothing_is_written_where_nothing_is_gained(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_GAIN", 1e9)
    llm = LLM(tiny_folder)
    tuned = llm.tune(PROMPTS, tmp_path / "out", **QUICK)
    assert not tuned.gains and "agrees with the model at" in tuned.reason
    assert tuned.folder is None and not (tmp_path / "out").exists() and llm.target.exit_heads is None


def test_a_stopped_run_keeps_the_best_heads_and_goes_on(tiny_folder, tmp_path, monkeypatch):
    llm, out = LLM(tiny_folder), tmp_path / "out"

    def stop(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measure_speeds", stop)
        with pytest.raises(KeyboardInterrupt):
            llm.tune(PROMPTS, out, **QUICK)
    assert llm.target.exit_heads is None and (out / CHECKPOINT).is_file() and (out / ANSWERS).is_file()
    assert "stopped before it measured" in (out / CARD).read_text("utf-8")
    [layer] = ExitHeads.load(out).layers
    lines = []
    monkeypatch.setattr("selfspec.learning.workload.Plain", stop)  # no answer is written again

    def alone(target, tasks, written, answered=answer):
        return [] if written.missing(tasks) else answered(target, tasks, written)

    monkeypatch.setattr(tuning, "answer", alone)
    tuned = llm.tune(PROMPTS, out, keep=True, report=lines.append, **QUICK)
    [steps] = [int(line.split()[4].rstrip(",")) for line in lines if line.startswith("goes on at step")]
    assert 0 < steps <= tuned.steps and any(f"goes on at step {steps}, exit {layer}" in line for line in lines)
    assert tuned.exits == (layer,) and not (out / CHECKPOINT).exists() and not (out / ANSWERS).exists()


def test_a_stop_while_answering_keeps_the_answers(tiny_folder, tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []

    def stop(*given, kept=answer_and_collect):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return kept(*given)

    monkeypatch.setattr(tuning, "answer_and_collect", stop)
    with pytest.raises(KeyboardInterrupt):
        LLM(tiny_folder).tune(PROMPTS, out, **QUICK)
    assert [file.name for file in out.iterdir()] == [ANSWERS]


def test_heads_of_other_weights_are_refused(tiny_folder, tmp_path):
    heads = ExitHeads([1], 32, 4, "0123")
    heads.save(tmp_path / "heads")
    with pytest.raises(ValueError, match="are of the weights 0123, and this model has"):
        LLM(tiny_folder, exit_heads=tmp_path / "heads")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (PROMPTS[:4] * 3, {}, "prompts must be at least 8 different ones, got 4"),
        ([*PROMPTS, 5], {}, "prompt 13 must be a text, token ids, messages, or a body"),
        ([*PROMPTS, "text"], {}, "the model has no tokenizer"),
        ([*PROMPTS, [1] * 300], {}, "prompt 13 has 300 tokens, and the model's context holds 128"),
        ([*PROMPTS, {"prompt": [1, 2], "max_tokens": 0.5}], {}, "prompt 13: max_tokens"),
        (PROMPTS, {"exits": [4]}, "exits must be from 1 to 3"),
        (PROMPTS, {"minutes": 0.0}, "minutes must be a number above 0"),
    ],
)
def test_bad_input_is_one_sentence(tiny_folder, tmp_path, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_folder).tune(prompts, tmp_path / "out", **QUICK | options)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_heads_before_intact(tiny_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    LLM(tiny_folder).tune(PROMPTS, out, keep=True, **QUICK)
    good = (out / FILE).read_bytes()

    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("selfspec.model.exit_heads.as_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        LLM(tiny_folder).tune(PROMPTS, out, keep=True, **QUICK)
    assert (out / FILE).read_bytes() == good


def test_a_gguf_file_is_a_model_to_tune(tmp_path):
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "tiny.gguf", source_model(), "Q8_0")
    tuned = LLM(file).tune(PROMPTS, tmp_path / "out", keep=True, **QUICK | {"exits": [1]})
    llm = LLM(file, exit_heads=tmp_path / "out")
    assert llm.target.exit_heads.layers == tuned.exits == (1,) and tuned.num_different == 0


def test_training_raises_agreement(stories):
    prompts = ["Once upon a time", "The dog was", "Tom has a red ball", "A girl named Lily", "The sun", "One day"]
    tasks = [Task(tuple(stories.tokenizer(text)["input_ids"]), 64, 0.0, 0) for text in prompts]
    answers = answer(stories, [task for some in rounds_of(tasks, 0) for task in some], Written(None, ""))
    seen, held_out = (collect(stories.split, part, (3,), 16) for part in (answers[2:], answers[:2]))
    stories.split.model.requires_grad_(False)
    trainer = ExitTrainer(stories.split, 3, 0, None, "", 0)
    before = agreement(stories.split, None, 3, 0, held_out, None)
    assert agreement(stories.split, trainer.heads, 3, 0, held_out, None) == before, "new heads are the identity"
    for step in range(100):
        trainer.step(seen, step / 100)
    assert trainer.measure(held_out) > before + 0.1
    other = ExitTrainer(stories.split, 3, 0, None, "", 1)
    other.load(trainer.state())
    assert other.best_agreement == trainer.best_agreement
    assert all(torch.equal(a, b) for a, b in zip(other.heads.parameters(), trainer.heads.parameters(), strict=True))


def test_a_loss_of_nan_leaves_the_head_as_it_was():
    target = load(build("llama"))
    target.split.model.requires_grad_(False)
    seen = collect(target.split, [Sample(list(range(20)), 4)], (2,), 4)
    trainer = ExitTrainer(target.split, 2, 0, None, "", 0)
    before = [each.clone() for each in trainer.heads.parameters()]
    with pytest.raises(FloatingPointError, match="the loss of exit 2 is nan at step 1"):
        trainer.step(seen._replace(log_probs=seen.log_probs * torch.nan), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.heads.parameters(), strict=True))


def test_the_exit_is_chosen_by_what_it_gains_here():
    rounds = {(2, 1): 1.25, (2, 2): 1.6, (3, 1): 1.3}
    assert expected_gain(rounds, 2, 0.5) == (pytest.approx(1.5 / 1.25), 1)
    assert expected_gain(rounds, 2, 0.9) == (pytest.approx(2.71 / 1.6), 2)
    assert expected_gain(rounds, 2, 0.2)[0] < 1 and expected_gain(rounds, 4, 0.9)[0] == 0


def test_rounds_are_measured_in_turns_and_relatively(tiny_folder):
    llm, asked = LLM(tiny_folder), []
    heads = ExitHeads([1, 2], 32, 64)
    turns = iter([True, False])
    rounds = measure_rounds(llm, heads, PROMPTS[0], lambda: asked.append(1) or next(turns))
    assert set(rounds) == {(layer, length) for layer in (1, 2) for length in LENGTHS} and len(asked) == 2
    assert all(ratio > 0 for ratio in rounds.values()) and llm.target.split.exit_heads is None


@pytest.mark.parametrize(("ratio", "words"), [(1.9, "above 0.90 is needed"), (0.5, "alone, with 1 drafted tokens")])
def test_the_reason_fits_the_figures(tiny_folder, tmp_path, monkeypatch, ratio, words):
    monkeypatch.setattr(tuning, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(tuning, "measure_rounds", lambda llm, heads, *rest: {(one, 1): ratio for one in heads.layers})
    monkeypatch.setattr(ExitTrainer, "measure", lambda self, seen: setattr(self, "best_agreement", 0.4) or 0.4)
    tuned = LLM(tiny_folder).tune(PROMPTS, tmp_path / "out", **QUICK)
    assert not tuned.gains and words in tuned.reason and "at 0.40 of the positions" in tuned.reason


def test_prompts_are_split_by_content_and_answered_at_every_temperature(tiny_folder):
    llm = LLM(tiny_folder)
    bodies = [{"prompt": prompt, "max_tokens": 5} for prompt in PROMPTS]
    train, held_out = split_prompts(llm, [*bodies, *bodies], 12, 0)
    assert len(train) == 9 and len(held_out) == 3 and not set(train) & set(held_out)
    assert {task.limit for task in train} == {5} and (train, held_out) == split_prompts(llm, bodies, 12, 0)
    apart, named = split_prompts(llm, bodies, 12, 0, bodies[:2])
    assert [list(task.prompt) for task in named] == PROMPTS[:2] and len(apart) == 10 and not set(apart) & set(named)
    tasks = [task for some in rounds_of(train, 0) for task in some]
    assert [task.temperature for task in tasks] == [0.0] * 9 + [0.7] * 9 + [1.0] * 9
    greedy = outputs_of(llm.with_speculative(SpeculativeConfig(policy="plain")), [list(train[0].prompt)])
    [sample, *_] = answer(llm.target, train[:3], Written(None, ""))
    assert sample.tokens == [*train[0].prompt, *greedy[0][:5]]


def test_texts_are_user_turns_where_there_is_a_template(tmp_path):
    build("llama").save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    texts = [f"w{n} w{n + 1}" for n in range(4, 12)]
    tasks = [task for part in split_prompts(llm, texts, 12, 0) for task in part]
    assert {llm.tokenizer.decode(task.prompt) for task in tasks} == {f"w1 {text} w2 w3" for text in texts}
    said = [[{"role": "user", "content": text}] for text in texts]
    assert split_prompts(llm, said, 12, 0) == split_prompts(llm, texts, 12, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_and_states_are_made_in_one_pass(stories, temperature):
    texts = ["Once upon a time", "The dog", "Tom has a red ball. One day", "The sun was"]
    limits = [9, 1, 20, 14]
    prompts = [tuple(stories.tokenizer(text)["input_ids"]) for text in texts]
    tasks = [Task(prompt, limit, temperature, 3) for prompt, limit in zip(prompts, limits, strict=True)]
    samples, seen = answer_and_collect(stories.split, tasks, frozenset(), (2, 4), 10)
    assert [len(sample.positions) for sample in samples] == limits
    if not temperature:
        assert samples == answer(stories, tasks, Written(None, "")), "as the engine decodes"
    end = samples[2].tokens[samples[2].num_prompt + 4]
    cut, _ = answer_and_collect(stories.split, tasks, {end}, (2, 4), 10)
    longest = samples[2].tokens[: samples[2].tokens.index(end, samples[2].num_prompt) + 1]
    assert cut[2].tokens == longest, "the end belongs to the answer"
    [alone], _ = answer_and_collect(stories.split, tasks[3:], frozenset(), (2, 4), 10)
    assert alone == samples[3], "an answer depends on its task alone"
    wanted = collect(stories.split, samples, (2, 4), 10)
    assert torch.equal(seen.ids[:, :1], wanted.ids[:, :1]) and seen.number == sum(limits)
    torch.testing.assert_close(seen.hidden.float(), wanted.hidden.float(), atol=0.05, rtol=0.02)
    torch.testing.assert_close(seen.last.float(), wanted.last.float(), atol=0.05, rtol=0.02)
    torch.testing.assert_close(seen.log_probs.float(), wanted.log_probs.float(), atol=0.02, rtol=0.02)


def test_every_position_is_seen_as_decoding_saw_it(stories):
    texts = [Sample(list(range(5, 5 + n)), prompt) for n, prompt in ((9, 3), (4, 3), (30, 1))]
    (seen,) = run_texts(stories.split, texts, (2, 4))
    alone = [next(run_texts(stories.split, [text], (2, 4))) for text in texts]
    torch.testing.assert_close(seen.hidden, torch.cat([one.hidden for one in alone], 1), atol=1e-4, rtol=1e-4)
    kept = collect(stories.split, texts, (2, 4), top_k=10)
    assert kept.ids.shape == (36, 10) and kept.log_probs.shape == (36, 11) and kept.hidden.shape == (2, 36, 64)
    firsts = [0, 6, 7]  # of answers of 6, 1 and 29 tokens, after prompts of 3, 3 and 1
    assert kept.is_first.nonzero()[:, 0].tolist() == firsts
    assert torch.equal(kept.last[1:6], seen.final[:5].to(kept.last.dtype))
    assert torch.equal(kept.last[8:], seen.final[7:-1].to(kept.last.dtype))
    (prompts,) = run_texts(stories.split, [Sample(text.tokens, 1) for text in texts], (2, 4))
    expected = torch.stack((prompts.final[1], prompts.final[9], torch.zeros(64)))
    torch.testing.assert_close(kept.last[firsts].float(), expected, atol=0.05, rtol=0.02)
    with torch.inference_mode():
        logits = stories.split.logits(seen.final)
    assert torch.equal(kept.ids[:, 0].long(), logits.argmax(-1))
    torch.testing.assert_close(kept.log_probs.float().exp().sum(-1), torch.ones(36), atol=2e-3, rtol=0)


def test_a_head_is_trained_on_its_own_outputs_and_on_unknown_states_too(stories):
    texts = [Sample(list(range(5, 45)), 3), Sample(list(range(7, 37)), 2)]
    seen, heads = collect(stories.split, texts, (2,), top_k=10), some_heads((2,), width=64)
    at, source = torch.arange(seen.number), torch.Generator().manual_seed(0)
    with torch.inference_mode(False):
        batch = with_own_states(stories.split, heads, 2, 0, seen, at, source)
        last = seen.last.float()
        changed = heads(seen.hidden[0].float(), 2, last)
    own = torch.cat((torch.zeros(1, 64), stories.split.normed(changed)[:-1]))
    own[[0, 37]] = torch.inf  # before an answer there is no output
    is_own = (batch.last - own).abs().amax(-1) < 1e-4
    is_zero, is_true = (batch.last == 0).all(-1), (batch.last == last).all(-1)
    assert (is_own | is_zero | is_true).all()
    counts = [int(one.sum()) for one in (is_own & ~is_true, is_zero & ~is_true, is_true)]
    assert 0.15 < counts[0] / 65 < 0.45 and 0.02 < counts[1] / 65 < 0.25 and 0.4 < counts[2] / 65 < 0.8


class Whole:
    """A model of 12 tokens whose hidden states are its logits."""

    dtype, vocab_size = torch.float32, 12

    def head_logits(self, hidden, lacks_norm):
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
    loss = exit_loss(
        Whole(),
        heads,
        1,
        Positions(logits, logits, torch.zeros(5, dtype=torch.bool), ids, with_rest(top.log())),
        subset,
        by_kl,
    )
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


@pytest.mark.parametrize(("layers", "exits"), [(2, [1]), (5, [1, 2]), (16, [1, 2, 3, 5, 8]), (30, [2, 4, 6, 10, 15])])
def test_the_exits_that_are_tried(layers, exits):
    assert exits_of(layers) == exits


def test_texts_are_written_once_for_the_same_weights(tmp_path):
    file, task = tmp_path / ANSWERS, Task((1, 2), 8, 0.7, 3)
    Written(file, "a").add(task, [4, 5])
    assert Written(file, "a").get(task) == [4, 5]
    assert Written(file, "a").missing([task, other := task._replace(seed=4), other]) == [other]
    other_model = Written(file, "b")
    assert other_model.get(task) == [] and Written(file, "a").get(task) == [4, 5]
    other_model.add(task, [6])
    assert Written(file, "b").get(task) == [6] and Written(file, "a").get(task) == []


def test_drafts_begin_over_the_tokens_that_the_heads_were_trained_on(tiny_folder, tmp_path):
    heads = ExitHeads([1], 32, 4)
    heads.counts = {50: 9, 60: 4, 70: 1, 10**6: 3}
    heads.save(tmp_path / "heads")
    assert ExitHeads.load(tmp_path / "heads").counts == heads.counts
    target = hub.open_target(tiny_folder, exit_heads=tmp_path / "heads")
    assert target.split.frequencies.top(4).tolist() == [0, 50, 60, 70]
