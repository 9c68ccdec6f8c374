"""Penalties: transformers' own generate where it has them, else a plain loop; the same tokens whatever the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from selfspec.control.fixed import Fixed
from selfspec.control.plan import Policy
from selfspec.executors.cpu.rounds import CompiledRounds
from selfspec.executors.penalties import DraftPenalties, Penalties, Text
from selfspec.executors.pick import Sampling
from selfspec.kernels.pick import scored
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Adversary, Always, Schedule, decode, generate, make_prompts
from tests.models import build, tiny
from tests.slow import slow
from tests.target import Target

RAGGED = (12, 7, 1, 20)
NEW = 20
OF_GENERATE = {
    "repetition": {"repetition_penalty": 1.6},
    "reward": {"repetition_penalty": 0.7},
    "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}
of_any = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.3]),
        "no_repeat_ngram_size": st.sampled_from([0, 0, 1, 2, 3]),
    }
)


def by_transformers(repetition_penalty=1.0, no_repeat_ngram_size=0):
    made = [] if repetition_penalty == 1 else [RepetitionPenaltyLogitsProcessor(repetition_penalty)]
    return (*made, *([NoRepeatNGramLogitsProcessor(no_repeat_ngram_size)] if no_repeat_ngram_size else []))


def by_hand(logits, prompt, output, sampling):
    """Logits `[vocab]` after penalties, token by token as their laws are written."""
    ids = torch.tensor([[*prompt, *output]])
    out = logits[None].clone()
    for process in by_transformers(sampling.repetition_penalty, sampling.no_repeat_ngram_size):
        out = process(ids, out)
    for token in set(output):
        out[0, token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return out[0]


@torch.inference_mode()
def plain_loop(model, prompt, count, sampling):
    """Plain decoding with whole forwards."""
    output = []
    for _ in range(count):
        logits = by_hand(model(torch.tensor([[*prompt, *output]])).logits[0, -1].float(), prompt, output, sampling)
        position = torch.tensor([len(prompt) + len(output)])
        output.append(int(scored(logits[None], [sampling], position).argmax()))
    return output


@pytest.mark.parametrize("name", OF_GENERATE)
@pytest.mark.parametrize(
    ("family", "engine"),
    [("phi", "views"), ("llama", "compiled"), ("gemma3_text", "compiled"), slow("llama", "views")],
)
def test_repetition_and_ngrams_are_those_of_generate(family, engine, name):
    target, changed = tiny(family, engine=engine), False
    for prompt in make_prompts(RAGGED, seed=1, vocab=14):
        expected = generate(target.model, prompt, NEW, by_transformers(**OF_GENERATE[name]))
        changed |= expected != generate(target.model, prompt, NEW)
        for policy in ("plain", Schedule(0, 4), Schedule(1, 4), Always(2, 4, num_rounds=9)):
            [done] = decode(target, [prompt], policy, max_new_tokens=NEW, **OF_GENERATE[name])
            assert done.tokens == expected
    assert changed


@given(penalties=of_any, temperature=st.sampled_from([0.0, 0.9]), seed=st.integers(0, 999), is_compiled=st.booleans())
def test_all_penalties_together_are_those_of_a_plain_loop(penalties, temperature, seed, is_compiled):
    target = tiny("llama", engine="compiled" if is_compiled else "views")
    prompts = make_prompts((5, 1, 14), seed)
    options = {**penalties, "temperature": temperature, "seed": seed}
    wanted = [plain_loop(target.model, prompt, 14, Sampling(**options)) for prompt in prompts]
    done = decode(target, prompts, Adversary(seed, 4), max_new_tokens=14, ignore_eos=True, **options)
    assert [c.tokens for c in done] == wanted


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_rows_with_and_without_penalties_share_a_batch(engine):
    ways = {
        "repetition_penalty": [1.5, 1.0, 1.0, 1.1],
        "presence_penalty": [0.0, 0.0, 1.5, 0.0],
        "frequency_penalty": [0.0, 0.0, 0.2, 0.0],
        "no_repeat_ngram_size": [0, 0, 0, 2],
        "temperature": [0.0, 0.8, 0.0, 1.1],
        "seed": [1, 2, 3, 4],
    }
    for seed in range(3):
        policy = Schedule(seed, 4)
        check_equals_plain(tiny("llama", engine=engine), make_prompts(RAGGED), policy, max_new_tokens=18, **ways)


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_a_processor_is_asked_after_penalties(engine):
    target, [prompt] = tiny("llama", engine=engine), make_prompts([9], seed=1)

    def size(input_ids, scores):
        return scores.abs()

    expected = generate(target.model, prompt, NEW, (*by_transformers(1.7), size))
    options = {"repetition_penalty": 1.7, "logits_processor": size}
    [done] = decode(target, [prompt], Schedule(0, 4), max_new_tokens=NEW, **options)
    assert done.tokens == expected != generate(target.model, prompt, NEW, by_transformers(1.7))


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_kept_scores_are_those_after_penalties_and_kept_logits_those_before(engine):
    target, [prompt] = tiny("llama", engine=engine), make_prompts([9], seed=1)
    sampling = Sampling(repetition_penalty=1.4, presence_penalty=0.5, no_repeat_ngram_size=2)
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "no_repeat_ngram_size": 2, "keep_logits": True}
    [done] = decode(target, [prompt], Always(2, 3), max_new_tokens=12, **options)
    assert done.stats.num_accepted_draft_tokens > 0
    for at, (logits, scores) in enumerate(zip(done.logits, done.scores, strict=True)):
        torch.testing.assert_close(scores, by_hand(logits, prompt, done.tokens[:at], sampling))


@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_drafts_over_a_part_of_the_vocabulary_are_penalized_too(engine):
    target, prompts = tiny("llama", engine=engine), make_prompts(RAGGED)
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
    wanted = decode(target, prompts, "plain", **options)
    done = decode(target, prompts, Fixed(3, 4, draft_vocab=60), **options)
    assert [c.tokens for c in done] == [c.tokens for c in wanted]
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 5


def test_a_program_of_rows_with_penalties_is_one_compiled_call(monkeypatch):
    calls, honest = [], CompiledRounds.run
    monkeypatch.setattr(CompiledRounds, "run", lambda *given, **named: calls.append(1) or honest(*given, **named))
    target, [prompt] = tiny("llama", engine="compiled"), make_prompts([9])
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "no_repeat_ngram_size": 4, "logprobs": 2}
    policy, engine = Always(2, 3, num_rounds=1000), {"burst": 60.0}
    [done] = decode(target, [prompt], policy, engine=engine, max_new_tokens=30, ignore_eos=True, **options)
    assert len(done.tokens) == 30 and len(calls) == 1


def test_exact_mode_knows_penalties():
    target, prompts = Target(build("llama").bfloat16(), engine="compiled"), make_prompts(RAGGED, seed=1)
    options = {"max_new_tokens": 16, "exact": True, "keep_logits": True, "repetition_penalty": 1.3, "logprobs": 2}
    wanted = target.generate(prompts, policy="plain", **options)
    done = target.generate(prompts, exit_layer=3, num_draft_tokens=3, **options)
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0
    for one, plain in zip(done, wanted, strict=True):
        assert one.tokens == plain.tokens and one.logprobs == plain.logprobs
        assert torch.equal(torch.stack(one.scores), torch.stack(plain.scores))


class Pupil:
    """Keeps what exit heads could learn from."""

    def __init__(self):
        self.logits = []

    def take(self, exit_layer, hidden, logits):
        self.logits += logits

    def follow(self, stack):
        pass

    def after(self, num_ended, seconds):
        pass


def test_lessons_are_of_logits_before_penalties():
    target, [prompt], pupil = tiny("llama", engine="views"), make_prompts([9], seed=1), Pupil()
    options = {"engine": {"learn": pupil}, "max_new_tokens": 20, "repetition_penalty": 1.5}
    [done] = decode(target, [prompt], Always(1, 3), **options)
    with torch.inference_mode():
        whole = target.model(torch.tensor([[*prompt, *done.tokens]])).logits[0]
    assert pupil.logits
    for logits in pupil.logits:
        assert float((whole - logits).abs().amax(-1).min()) < 1e-3


class Asks(Policy):
    """Keeps what it is told of rows."""

    def __init__(self):
        self.rows = []

    def plan(self, rows):
        self.rows += rows
        return Always(None, 0).plan(rows)


def test_policies_need_not_mind_penalties():
    policy, [prompt] = Asks(), make_prompts([9])
    decode(tiny("llama"), [prompt], policy, max_new_tokens=3, repetition_penalty=1.2, no_repeat_ngram_size=2)
    assert policy.rows and not any(row.has_processors for row in policy.rows)


def test_a_vocabulary_that_is_used_up_is_refused_in_words_where_tokens_are_drawn():
    target = Target(build("llama", vocab_size=12))
    options = {"no_repeat_ngram_size": 1, "max_new_tokens": 20, "ignore_eos": True}
    with pytest.raises(ValueError, match=r"sampled at position 12, .* and no_repeat_ngram_size leave a token"):
        target.generate([[3, 4]], temperature=1.0, **options)


# ------------------------------------------------------------------------------------------------- the law by itself


@given(
    penalties=st.lists(of_any, min_size=1, max_size=4),
    vocab=st.integers(3, 30),
    size=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_tensors_say_what_the_laws_say_token_by_token(penalties, vocab, size, seed):
    source = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(vocab, (count,), generator=source).tolist()

    texts = [Text(Sampling(**one), tokens(1 + (seed + i) % 9), 1 + i % 2) for i, one in enumerate(penalties)]
    texts = [text._replace(num_prompt_tokens=min(text.num_prompt_tokens, len(text.content))) for text in texts]
    blocks = [tokens(size + i % 2) for i in range(len(texts))]
    logits = torch.randn(sum(map(len, blocks)), vocab, generator=source)
    got = Penalties(texts, vocab, "cpu").along(blocks).applied(logits)
    some = torch.randperm(vocab, generator=source)[:2].sort()[0]
    part = Penalties(texts, vocab, "cpu").along(blocks).applied(logits[:, some], some)
    assert torch.equal(part, got[:, some])
    at = 0
    for text, block in zip(texts, blocks, strict=True):
        prompt, output = text.content[: text.num_prompt_tokens], text.content[text.num_prompt_tokens :]
        for count in range(len(block)):
            wanted = by_hand(logits[at], prompt, [*output, *block[:count]], text.sampling)
            torch.testing.assert_close(got[at], wanted)
            at += 1


def test_no_number_of_the_device_is_waited_for():
    """Tensors of the meta device have no numbers that the host could ask for."""
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, no_repeat_ngram_size=2)
    penalties = Penalties([Text(sampling, [3, 4, 3], 1), Text(Sampling(), [5], 1)], 9, "meta")
    drafts = DraftPenalties(penalties)
    for members in ([0, 1], [1]):
        got = drafts.at(members).applied(torch.empty(len(members), 9, device="meta"))
        drafts.add(got.argmax(-1))
    drafted = torch.empty(3, 2, dtype=torch.int64, device="meta")
    assert penalties.at([0, 0, 1], drafted, [0, 1, 2]).applied(torch.empty(3, 9, device="meta")).is_meta


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"repetition_penalty": 0}, r"repetition_penalty must be a number above 0 \(1 changes nothing\), got 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a number above 0 .* got inf"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be a number in \[-2, 2\] .* got 2.5"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be a number in \[-2, 2\] .* got nan"),
        ({"frequency_penalty": "1"}, r"frequency_penalty must be a number in \[-2, 2\] .* got '1'"),
        ({"no_repeat_ngram_size": -1}, r"no_repeat_ngram_size must lie in 0..65536 \(0 allows all\), got -1"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size must be a whole number, got 1.5"),
    ],
)
def test_penalties_out_of_range_are_refused_by_name(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny("llama").generate([[3]], **options)
