"""Penalties: transformers' own generate where it has them, else a plain loop; the same tokens whatever the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from selfspec.executors.penalties import DraftPenalties, Penalties, Text
from selfspec.kernels.pick import scored
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.helpers import Adversary, Always, Run, Schedule, decode, engine_of, generate, make_prompts, request, run
from tests.models import build, tiny
from tests.slow import slow

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


def by_hand(logits, prompt, output, params):
    """Logits `[vocab]` after penalties, token by token as their laws are written."""
    ids = torch.tensor([[*prompt, *output]])
    out = logits[None].clone()
    repetition, presence, frequency, size = params.penalties
    for process in by_transformers(repetition, size):
        out = process(ids, out)
    for token in set(output):
        out[0, token] -= frequency * output.count(token) + presence
    return out[0]


@torch.inference_mode()
def plain_loop(model, prompt, params):
    """Plain decoding with whole forwards."""
    output = []
    for _ in range(params.max_tokens):
        logits = by_hand(model(torch.tensor([[*prompt, *output]])).logits[0, -1].float(), prompt, output, params)
        position = torch.tensor([len(prompt) + len(output)])
        output.append(int(scored(logits[None], [params], position).argmax()))
    return output


backends = pytest.mark.parametrize("backend", ["compiled", "views"])


@pytest.mark.parametrize("name", OF_GENERATE)
@pytest.mark.parametrize(
    ("family", "backend"),
    [("phi", "views"), ("llama", "compiled"), slow("gemma3_text", "compiled"), slow("llama", "views")],
)
def test_repetition_and_ngrams_are_those_of_generate(family, backend, name):
    target, changed = tiny(family, backend=backend), False
    params = SamplingParams(max_tokens=NEW, **OF_GENERATE[name])
    for prompt in make_prompts(RAGGED, seed=1, vocab=14):
        expected = generate(target.model, prompt, NEW, by_transformers(**OF_GENERATE[name]))
        changed |= expected != generate(target.model, prompt, NEW)
        for policy in ("plain", Schedule(0, 4), Always(2, 4, num_rounds=9)):
            assert decode(target, [prompt], policy, params)[0].token_ids == expected
    assert changed


@given(penalties=of_any, temperature=st.sampled_from([0.0, 0.9]), seed=st.integers(0, 999), is_compiled=st.booleans())
def test_all_penalties_together_are_those_of_a_plain_loop(penalties, temperature, seed, is_compiled):
    target = tiny("llama", backend="compiled" if is_compiled else "views")
    params = SamplingParams(max_tokens=14, temperature=temperature, seed=seed, ignore_eos=True, **penalties)
    prompts = make_prompts((5, 1, 14), seed)
    done = decode(target, prompts, Adversary(seed, 4), params)
    assert [one.token_ids for one in done] == [plain_loop(target.model, prompt, params) for prompt in prompts]


@backends
def test_a_processor_is_asked_after_penalties(backend):
    target, [prompt] = tiny("llama", backend=backend), make_prompts([9], seed=1)

    def size(input_ids, scores):
        return scores.abs()

    expected = generate(target.model, prompt, NEW, (*by_transformers(1.7), size))
    params = SamplingParams(max_tokens=NEW, repetition_penalty=1.7, logits_processors=size)
    [done] = decode(target, [prompt], Schedule(0, 4), params)
    assert done.token_ids == expected != generate(target.model, prompt, NEW, by_transformers(1.7))


@backends
def test_kept_scores_are_those_after_penalties_and_kept_logits_those_before(backend):
    target, [prompt] = tiny("llama", backend=backend), make_prompts([9], seed=1)
    params = SamplingParams(max_tokens=12, repetition_penalty=1.4, presence_penalty=0.5, no_repeat_ngram_size=2)
    made = run(target, [request(prompt, params, keep_logits=True)], Always(2, 3))
    row = made.sequences["0"]
    assert row.stats.num_accepted_draft_tokens > 0
    for at, (logits, scores) in enumerate(zip(row.logits, row.scores, strict=True)):
        torch.testing.assert_close(scores, by_hand(logits, prompt, row.completion_token_ids[:at], params))


def test_a_vocabulary_that_is_used_up_is_refused_in_words_where_tokens_are_drawn():
    made = Run(engine_of(Target(build("llama", vocab_size=12))))
    made.add([3, 4], SamplingParams(no_repeat_ngram_size=1, max_tokens=20, ignore_eos=True, temperature=1.0))
    with pytest.raises(ValueError, match=r"sampled at position 12, .* and no_repeat_ngram_size leave a token"):
        made.finish()


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

    texts = [Text(SamplingParams(**one), tokens(1 + (seed + i) % 9), 1 + i % 2) for i, one in enumerate(penalties)]
    texts = [text._replace(num_prompt_tokens=min(text.num_prompt_tokens, len(text.token_ids))) for text in texts]
    blocks = [tokens(size + i % 2) for i in range(len(texts))]
    logits = torch.randn(sum(map(len, blocks)), vocab, generator=source)
    got = Penalties(texts, vocab, "cpu").along(blocks).applied(logits)
    some = torch.randperm(vocab, generator=source)[:2].sort()[0]
    part = Penalties(texts, vocab, "cpu").along(blocks).applied(logits[:, some], some)
    assert torch.equal(part, got[:, some])
    at = 0
    for text, block in zip(texts, blocks, strict=True):
        prompt, output = text.token_ids[: text.num_prompt_tokens], text.token_ids[text.num_prompt_tokens :]
        for count in range(len(block)):
            wanted = by_hand(logits[at], prompt, [*output, *block[:count]], text.params)
            torch.testing.assert_close(got[at], wanted)
            at += 1


def test_no_number_of_the_device_is_waited_for():
    """Tensors of the meta device have no numbers that the host could ask for."""
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, no_repeat_ngram_size=2)
    penalties = Penalties([Text(params, [3, 4, 3], 1), Text(SamplingParams(), [5], 1)], 9, "meta")
    drafts = DraftPenalties(penalties)
    for members in ([0, 1], [1]):
        got = drafts.at(members).applied(torch.empty(len(members), 9, device="meta"))
        drafts.add(got.argmax(-1))
    drafted = torch.empty(3, 2, dtype=torch.int64, device="meta")
    assert penalties.at([0, 0, 1], drafted, [0, 1, 2]).applied(torch.empty(3, 9, device="meta")).is_meta
