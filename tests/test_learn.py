"""Online learning: heads get better on finished answers, within a share of the time, and never change a token."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from selfspec import SamplingParams
from selfspec.core import Request, Sequence
from selfspec.executors.eager import EagerExecutor
from selfspec.learn import LONGEST, Learner
from selfspec.learning.states import collect
from selfspec.learning.written import Sample
from selfspec.model.exit_heads import ExitHeads
from tests.helpers import Adversary, decode, make_prompts, tokens_of
from tests.models import build
from tests.target import Target

ALWAYS_TIME = {"share": 1.0, "every": 2, "batch_size": 16, "clock": lambda: 0.0}  # learning takes none by this clock


class Ticks:
    """A clock that moves on by so much at every look."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def target():
    return Target(build("llama"))


def refused(completions):
    stats = [completion.stats for completion in completions]
    return 1 - sum(s.num_accepted_draft_tokens for s in stats) / sum(s.num_draft_tokens for s in stats)


@pytest.mark.parametrize(("family", "temperature"), [("gemma3_text", 0.0), ("gemma2", 1.0)])  # compiled, and views
def test_output_and_weights_stay_the_same_while_heads_change(family, temperature):
    model = build(family)
    prompts = make_prompts([3, 9, 1, 17, 6, 12])
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed) for seed in (3, 1, 4, 1, 5, 9)]
    plain = decode(Target(build(family)), prompts, "plain", params)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    target = Target(model)
    learner = Learner(target, layers=[1, 2, 3], **ALWAYS_TIME)
    engine = {"max_num_seqs": 3, "max_num_cached_tokens": 256, "learner": learner}
    for seed in range(2):
        done = decode(target, prompts, Adversary(seed, 4, eager=0.0), params, **engine)
        assert tokens_of(done) == tokens_of(plain)
    assert learner.num_updates > 1 and all(head.down.any() for head in learner.heads.heads.values())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert all(weight.grad is None for weight in model.parameters())


def test_drafts_get_better_on_answers_of_the_kind(target):
    prompts = make_prompts([5] * 8)
    go = partial(target.generate, prompts, exit_layer=2, num_speculative_tokens=3, max_tokens=24)
    before = go()
    learner = Learner(target, layers=[2], lr=1e-2, **ALWAYS_TIME)
    learner.decoding_seconds = 1e9  # time is not what is tested here
    for _ in range(8):
        go(learn=learner)
    after = go()
    assert tokens_of(after) == tokens_of(before)
    assert refused(after) < 0.6 * refused(before)


def test_true_keeps_one_learner_that_covers_the_layer_asked_for(target):
    target.generate(make_prompts([5]), exit_layer=3, max_tokens=8, learn=True)
    learner = target.learner
    assert 3 in learner.heads.layers
    learner.decoding_seconds = 100.0
    target.generate(make_prompts([5]), exit_layer=1, max_tokens=8, learn=True)
    learner.update()
    assert learner.num_positions > 0
    assert target.learner is learner and target.exit_heads is learner.heads


def test_a_learner_of_another_target_is_refused(target):
    learner = Learner(Target(build("llama")))
    with pytest.raises(ValueError, match="learn must be a Learner of the target that decodes"):
        target.generate([[5]], learn=learner)


def test_a_learner_follows_a_model_that_changed(target):
    learner = Learner(target, layers=[2], **ALWAYS_TIME)
    learner.decoding_seconds = 100.0
    target.generate(make_prompts([5] * 4), exit_layer=2, max_tokens=24, learn=learner)
    learned = learner.heads.heads["2"].down.double()
    assert learned.any()
    target.model.to(torch.float64)
    learner.share = 0.0  # nothing is learned in between
    learner.target.generate(make_prompts([5]), exit_layer=2, max_tokens=1, learn=learner)
    assert torch.equal(learner.heads.heads["2"].down, learned)
    target.generate(make_prompts([5, 6]), exit_layer=2, max_tokens=16, learn=learner)
    assert next(learner.heads.parameters()).dtype == torch.float64 and target.exit_heads is learner.heads


def answer(seed=0):
    [tokens] = make_prompts([12], seed=seed)
    return Sample(tokens, 4)


def ended(learner, seconds):
    """A request ends in a round of `seconds`; its answer is empty."""
    learner.after([Sequence(0, Request([5], SamplingParams()), [5], 8)], seconds)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_learning_takes_no_more_than_its_share(target, share):
    learner = Learner(target, layers=[2], share=share, every=1, clock=Ticks(0.01))
    for seed in range(300):
        learner.take(answer(seed))
        ended(learner, 0.1)
        # one answer and one step may be begun before it is known what they cost
        assert learner.seconds <= share * learner.decoding_seconds + (0.05 if share else 0)
    assert (learner.num_steps > 0) == (share > 0)


def test_requests_are_counted_between_updates(target):
    learner = Learner(target, layers=[2], every=8, share=1.0, clock=lambda: 0.0)
    learner.take(answer())
    for _ in range(7):
        ended(learner, 1.0)
    assert learner.num_updates == 0
    ended(learner, 1.0)
    assert learner.num_updates == 1


@pytest.mark.parametrize("part", ["hidden", "log_probs"])
def test_what_is_no_number_is_forgotten_with_its_neighbours(target, monkeypatch, part):
    learner = Learner(target, layers=[1, 2], share=1.0, clock=lambda: 0.0)
    learner.decoding_seconds = 100.0

    def spoilt(*given):
        seen = collect(*given)
        getattr(seen, part)[...] = float("nan")
        return seen

    with monkeypatch.context() as patch:
        patch.setattr("selfspec.learn.collect", spoilt)
        learner.take(answer())
        learner.update()
    assert learner.num_positions > 0 and learner.num_steps == 0
    assert all(weight.isfinite().all() for weight in learner.heads.state_dict().values())
    learner.take(answer(1))
    learner.update()
    assert learner.num_steps > 0
    assert all(weight.isfinite().all() for weight in learner.heads.state_dict().values())


def test_the_newest_answers_are_learned_from(target, monkeypatch):
    read = []

    def noted(split, texts, *given):
        read.extend(texts)
        return collect(split, texts, *given)

    monkeypatch.setattr("selfspec.learn.collect", noted)
    learner = Learner(target, layers=[2], buffer=30, share=1.0, clock=lambda: 0.0)
    answers = [answer(seed) for seed in range(9)]  # of 8 tokens each
    for one in [*answers, Sample([5] * (LONGEST + 1), 4), Sample([5, 6], 2)]:
        learner.take(one)
    learner.decoding_seconds = 100.0
    for _ in range(9):
        learner.update()
    assert read == answers[:-4:-1], "three have 24 positions; a fourth is too many"
    assert learner.num_positions == 24


def test_rounds_stay_compiled_while_heads_learn(target, monkeypatch):
    learner = Learner(target, layers=[2], **ALWAYS_TIME)
    learner.decoding_seconds = 100.0
    monkeypatch.setattr(EagerExecutor, "round", None)
    target.generate(make_prompts([5] * 8), exit_layer=2, num_speculative_tokens=3, max_tokens=24, learn=learner)
    assert learner.num_updates > 1 and learner.heads.heads["2"].down.any()


def test_what_is_saved_is_what_drafts_and_can_be_gone_on_with(target, tmp_path):
    with Learner(target, layers=[2], folder=tmp_path / "new", **ALWAYS_TIME) as learner:
        target.generate(make_prompts([5] * 4), exit_layer=2, max_tokens=24, learn=learner)
    saved = ExitHeads.load(tmp_path / "new")
    assert all(torch.equal(v, saved.state_dict()[k]) for k, v in learner.heads.state_dict().items())
    again = Learner(Target(build("llama"), exit_heads=saved), layers=[1])
    assert again.heads.layers == (1, 2) and torch.equal(again.heads.heads["2"].down, saved.heads["2"].down)
    assert again.target.exit_heads is again.heads


def test_nobody_elses_random_numbers_move(target):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    learner = Learner(target, layers=[2], **ALWAYS_TIME)
    learner.decoding_seconds = 100.0
    learner.take(answer())
    learner.update()
    assert learner.num_steps > 0 and torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 1.5}, "share must lie between 0 and 1, got 1.5"),
        ({"share": float("nan")}, "share must lie between 0 and 1, got nan"),
        ({"every": 0}, "every must be .*at least 1, got 0"),
        ({"lr": 0}, "lr must lie between 0 and 1, got 0"),
        ({"layers": [4]}, "more than 4 layers"),
        ({"layers": [0]}, "layers must be .*at least 1, got 0"),
        ({"inner_size": 0}, "inner_size must be .*at least 1, got 0"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(target, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Learner(target, **options)
    assert target.exit_heads is None


def test_a_folder_is_needed_to_save(target):
    with pytest.raises(ValueError, match="folder must be a path"):
        Learner(target).save()
