"""Logits processors: tokens are those of `generate`, and a processor sees the prefix of its own position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

from selfspec.core import LOOKUP
from selfspec.kernels.pick import scored
from selfspec.params import SamplingParams
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import (
    Adversary,
    Always,
    Run,
    Schedule,
    decode,
    engine_of,
    generate,
    make_prompts,
    request,
    run,
    tokens_of,
)
from tests.models import EOS, tiny
from tests.slow import slow

PROCESSORS = {
    "a repetition penalty": lambda length: [RepetitionPenaltyLogitsProcessor(1.6)],
    "no repeated bigram": lambda length: [NoRepeatNGramLogitsProcessor(2)],
    "at least eleven new tokens": lambda length: [MinNewTokensLengthLogitsProcessor(length, 11, [EOS, *range(40)])],
    "several": lambda length: [
        SuppressTokensLogitsProcessor([5, 9], device="cpu"),
        RepetitionPenaltyLogitsProcessor(1.3),
        NoRepeatNGramLogitsProcessor(3),
        MinNewTokensLengthLogitsProcessor(length, 5, [EOS]),
    ],
}
RAGGED = (12, 7, 1, 20)


def params(processors, max_tokens=20, **more):
    return SamplingParams(max_tokens=max_tokens, logits_processors=tuple(processors) or None, **more)


def check_processors(target, processors, seeds=2):
    """Greedy tokens under the processors equal generate's, and somewhere differ from those without."""
    changed = False
    for prompt in make_prompts(RAGGED, seed=1):
        made = processors(len(prompt))
        expected = generate(target.model, prompt, 20, made)
        changed |= expected != generate(target.model, prompt, 20)
        for policy in (*(Schedule(seed, 4) for seed in range(seeds)), Adversary(1, 4)):
            assert tokens_of(decode(target, [prompt], policy, params(made))) == [expected]
    assert changed


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("family", ["phi", slow("gpt_neox")])  # these two like to repeat themselves
def test_processors_that_look_back_equal_generate(family, name):
    check_processors(tiny(family), PROCESSORS[name])


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_batch_with_processors_equals_generate(lengths, seed):
    made = PROCESSORS["several"](0)[:3]
    check_equals_generate(tiny("qwen3"), make_prompts(lengths, seed), Schedule(seed, 4), 16, processors=made)


def test_rows_with_and_without_processors_share_a_batch_and_only_others_are_probed():
    target, prompts = tiny("llama"), make_prompts(RAGGED, seed=1)
    made = [PROCESSORS["a repetition penalty"](0), [], PROCESSORS["no repeated bigram"](0), []]
    expected = [generate(target.model, prompt, 20, own) for prompt, own in zip(prompts, made, strict=True)]
    policies = [Schedule(0, 4), *(Adversary(seed, 4) for seed in range(2))]
    for policy in policies:
        assert tokens_of(decode(target, prompts, policy, [params(own) for own in made])) == expected
    probed = {row.seq_id for policy in policies[1:] for row, *_ in policy.shadows}
    assert probed == {1, 3} and {row.seq_id for policy in policies[1:] for row, _ in policy.seeds} <= probed


def test_sampling_with_processors_equals_plain_decoding():
    made = params(PROCESSORS["several"](0)[:3], 16, temperature=0.9, top_p=0.9, seed=3)
    check_equals_plain(tiny("llama"), make_prompts(RAGGED), Schedule(0, 4), made)


def test_processors_see_the_draft_they_are_on():
    target, [prompt] = tiny("phi"), make_prompts([7])
    made = PROCESSORS["several"](7)
    found = [decode(target, [prompt], Adversary(seed, 4, eager=1.0), params(made, 24))[0] for seed in range(3)]
    assert tokens_of(found) == [generate(target.model, prompt, 24, made)] * 3
    assert sum(one.stats.num_draft_tokens for one in found) > 0


def test_a_processor_is_shown_each_positions_own_prefix():
    target, [prompt] = tiny("llama"), make_prompts([6], seed=1)
    seen = []

    def watch(input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        seen.append(tuple(input_ids[0].tolist()))
        return scores

    [done] = decode(target, [prompt], Always(3, 4), params([watch], 12))
    whole = (*prompt, *done.token_ids)
    for n in range(len(prompt), len(whole)):  # every kept token was picked after its own prefix
        assert whole[:n] in seen


def test_a_processor_cannot_spoil_the_logits_it_is_given():
    target, prompts = tiny("llama"), make_prompts(RAGGED, seed=1)

    def spoil(input_ids, scores):
        kept = scores.clone()
        scores.zero_()
        return kept

    asked = [request(prompt, params([spoil], 10), keep_logits=True) for prompt in prompts]
    made = run(target, asked, Schedule(0, 4))
    assert tokens_of(made.outputs) == [generate(target.model, prompt, 10) for prompt in prompts]
    assert all(torch.stack(row.logits).std() > 0 for row in made.sequences.values())


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda ids, logits: logits[0], r"a Tensor of shape \[96\]"),
        (lambda ids, logits: logits[:, :50], r"a Tensor of shape \[1, 50\]"),
        (lambda ids, logits: logits.numpy(), "a ndarray of"),
        (lambda ids, logits: None, "a NoneType of"),
        (lambda ids, logits: logits > 0, r"a Tensor of shape \[1, 96\] and dtype torch.bool at position 9"),
    ],
)
def test_a_processor_that_returns_no_logits_ends_its_own_row_alone(wrong, got):
    target, (first, second) = tiny("llama"), make_prompts([9, 4])
    made = Run(engine_of(target, Schedule(1, 4), max_num_seqs=2))
    spoiled, sound = made.add(first, params([wrong], 12)), made.add(second, params([], 12))
    with pytest.raises(ValueError, match=r"<lambda>\) must return a tensor of logits \[1, 96\], got " + got):
        made.finish()
    made.finish()
    assert made.output(spoiled).finish_reason == "abort"
    assert made.output(sound).token_ids == generate(target.model, second, 12)


POLICIES = {
    "plain": lambda: "plain",
    "exit": lambda: Always(3, 4),
    "lookup": lambda: Always(LOOKUP, 4),
    "adversary": lambda: Adversary(1, 4),
}


def turns_bad(kind, at, is_bad=lambda ids: True):
    """A processor that does so from a length on."""

    def processor(ids, logits):
        if ids.shape[1] < at or not is_bad(tuple(ids[0].tolist())):
            return logits
        return {"nan": lambda: logits.index_fill(1, torch.tensor([7]), torch.nan), "cut": lambda: logits[:, :9]}[kind]()

    return processor


@pytest.mark.parametrize("kind", ["nan", "cut", "raises"])
@pytest.mark.parametrize("policy", ["plain", "exit", "lookup", "adversary"])
def test_a_processor_that_fails_late_is_named_with_its_position_and_ends_its_own_row_alone(kind, policy):
    target, (first, second) = tiny("llama"), make_prompts([9, 4])
    bad = turns_bad("none" if kind == "raises" else kind, 14)
    wanted = generate(target.model, first, 20)
    made = Run(engine_of(target, POLICIES[policy](), max_num_seqs=2))
    spoiled = made.add(first, params([lambda ids, logits: logits, bad], 20))
    sound = made.add(second, params([], 12))
    with pytest.raises(KeyError if kind == "raises" else ValueError) as caught:
        made.finish()
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])][-1]
    assert told.startswith("logits_processors[1] (turns_bad.<locals>.processor) ") and "position 14" in told
    made.finish(check=False)
    assert made.output(spoiled).finish_reason == "abort" and made.output(spoiled).token_ids == wanted[:5]
    assert made.output(sound).token_ids == generate(target.model, second, 12)


@pytest.mark.parametrize("kind", ["nan", "cut", "raises"])
@pytest.mark.parametrize("policy", ["exit", "lookup", "adversary"])
def test_a_processor_that_fails_on_prefixes_that_plain_decoding_never_has_changes_nothing(kind, policy):
    target, (first, second) = tiny("llama"), make_prompts([9, 4])
    wanted, asked = generate(target.model, first, 20), []
    whole = (*first, *wanted)

    def is_bad(ids):
        asked.append(ids != whole[: len(ids)])
        return asked[-1]

    bad = turns_bad("none" if kind == "raises" else kind, 0, is_bad)
    made = Run(engine_of(target, POLICIES[policy](), max_num_seqs=2))
    names = made.add(first, params([bad], 20)), made.add(second, params([], 20))
    made.finish(check=False)
    assert [made.output(name).token_ids for name in names] == [wanted, generate(target.model, second, 20)]
    assert any(asked)


def test_a_processor_that_fails_on_the_logits_of_an_early_layer_alone_changes_nothing():
    """Here those of an exit differ from the model's own in their largest one."""
    target, [prompt] = tiny("llama"), make_prompts([9])
    seen = set()
    plain = params([lambda ids, logits: seen.add(float(logits.max())) or logits], 20)
    [wanted] = decode(target, [prompt], "plain", plain)
    failed = []

    def picky(ids, logits):
        if not any(abs(one - float(logits.max())) < 1e-4 for one in seen):
            failed.append(ids)
            raise ZeroDivisionError
        return logits

    def continues(ids):
        return tuple(ids[0].tolist()) == (*prompt, *wanted.token_ids)[: ids.shape[1]]

    [done] = decode(target, [prompt], Always(3, 4), params([picky], 20))
    assert done.token_ids == wanted.token_ids and any(map(continues, failed))


def test_a_nan_that_a_later_processor_removes_is_none():
    target, [prompt] = tiny("llama"), make_prompts([9])
    made = [turns_bad("nan", 0), lambda ids, logits: logits.nan_to_num(-torch.inf)]
    expected = generate(target.model, prompt, 12, [SuppressTokensLogitsProcessor([7], device="cpu")])
    assert tokens_of(decode(target, [prompt], Always(3, 4), params(made, 12))) == [expected]


@pytest.mark.parametrize("policy", ["exit", "lookup"])
@pytest.mark.parametrize("others", [0.0, -torch.inf])
def test_drafts_of_tokens_that_a_processor_forces_by_infinite_logits_are_accepted(policy, others):
    def forces(ids, logits):
        token = torch.full_like(logits, others)
        return token.index_fill(1, ids[:, 1], torch.inf)

    target, [prompt] = tiny("llama"), make_prompts([9])
    made = Run(engine_of(target, POLICIES[policy](), max_num_seqs=1))
    name = made.add(prompt, params([forces], 20))
    made.finish()
    assert made.output(name).token_ids == [prompt[1]] * 20 and len(made.rounds) < 12


def test_a_processor_of_another_dtype_does_not_change_its_neighbours():
    first, second = make_prompts([9, 4])
    asked = [
        request(first, params([lambda ids, logits: logits.double()], 12), keep_logits=True),
        request(second, params([], 12), keep_logits=True),
    ]
    made = run(tiny("llama"), asked, Schedule(1, 4))
    assert {score.dtype for row in made.sequences.values() for score in row.scores} == {torch.float32}


class Mirror:
    """Keeps a mean of the logits that it was called with, and turns them over where it was called often enough."""

    def __init__(self, num_calls=0, mean=0.0):
        self.num_calls, self.mean = num_calls, mean

    def copy(self):
        return Mirror(self.num_calls, self.mean)

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        self.mean = 0.7 * self.mean + 0.3 * float(scores.max())
        turned = scores.flip(-1) if self.num_calls % 3 == 0 else scores
        return turned + (turned > self.mean)


class Undone:
    """The same, which can undo calls and has no method `copy`."""

    def __init__(self):
        self.mirror = Mirror()

    def rollback(self, count):
        raise NotImplementedError

    def __call__(self, input_ids, scores):
        return self.mirror(input_ids, scores)

    @property
    def num_calls(self):
        return self.mirror.num_calls


@pytest.mark.parametrize("kind", [Mirror, Undone])
@pytest.mark.parametrize("policy", ["random", "adversary", "layers"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_processor_with_a_state_that_can_be_copied_is_asked_as_in_plain_decoding(policy, temperature, kind):
    target, prompts = tiny("llama"), make_prompts(RAGGED, seed=1)
    mine = kind()
    made = params([mine], 24, temperature=temperature, seed=3)
    plain = [decode(target, [prompt], "plain", made)[0] for prompt in prompts]
    policies = {"random": Schedule(0, 4), "adversary": Adversary(1, 4), "layers": Always(3, 4)}
    done = decode(target, prompts, policies[policy], made)
    assert tokens_of(done) == tokens_of(plain) and mine.num_calls == 0
    assert sum(one.stats.num_accepted_draft_tokens for one in done) > 0
    asked = Mirror()
    loop, ids = [], list(prompts[0])
    if not temperature:
        with torch.inference_mode():
            while len(loop) < len(plain[0].token_ids):
                logits = target.model(torch.tensor([ids])).logits[0, -1:].float()
                loop.append(int(asked(torch.tensor([ids]), logits).argmax()))
                ids.append(loop[-1])
        assert loop == plain[0].token_ids


@pytest.mark.parametrize("policy", ["adversary", "layers"])
def test_the_watermark_of_transformers_that_has_a_state_is_that_of_plain_decoding(policy):
    target, [prompt] = tiny("llama"), make_prompts([6])

    def mark():
        return SynthIDTextWatermarkLogitsProcessor(3, [654, 400, 836], 256, 0, context_history_size=16, device="cpu")

    made = params([mark()], 30, temperature=0.9, seed=3)
    plain = decode(target, [prompt], "plain", made)[0]
    policies = {"adversary": Adversary(1, 4), "layers": Always(3, 4)}
    assert decode(target, [prompt], policies[policy], made)[0].token_ids == plain.token_ids
    own, ids = mark(), list(prompt)
    with torch.inference_mode():
        for token in plain.token_ids:  # by a loop with one processor, which is called once per position
            logits = own(torch.tensor([ids]), target.model(torch.tensor([ids])).logits[:, -1].float())
            wanted = scored(logits, [made], torch.tensor([len(ids)])).argmax()
            assert int(wanted) == token
            ids.append(token)


def test_a_state_that_cannot_be_copied_is_refused_by_name():
    kept = {"__call__": lambda self, ids, scores: scores, "__module__": "xgrammar.contrib.hf"}
    kind = type("Stateful", (), kept)
    with pytest.raises(ValueError, match=r"or have a method copy, got .*Stateful, which has a state and no copy"):
        params([kind()], 5)
    assert params([type("Sound", (), kept | {"copy": lambda self: self})()], 5)
