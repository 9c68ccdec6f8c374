"""Shadow picks and confidences are those of the layers themselves, at the positions the target has judged."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.cpu.shadow import MAX_SINGLE_THREAD
from selfspec.executors.penalties import Penalty
from selfspec.executors.picker import Picker, packed_params
from selfspec.executors.shadow import by_torch, shadow_picks
from selfspec.loading.target import Target
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.shortlist import NUM_TOP
from selfspec.params import SamplingParams
from tests.decoding.test_penalties import by_hand
from tests.helpers import Adversary, decode, make_prompts
from tests.models import build, some_heads, tiny

GREEDY = SamplingParams()
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.0, top_k=20, seed=4),
    SamplingParams(temperature=1.3, top_p=0.8, seed=5),
]
PENALIZED = [
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, seed=6, presence_penalty=-0.7, no_repeat_ngram_size=2),
]
NAMES = ["greedy", "temperature", "top-k", "top-p", "penalties", "sampled with penalties"]


@torch.inference_mode()
def picks_of_every_layer(target, prompt, output, params):
    """layer -> (hits, confidences) for the positions 1, 2, ... of a finished text."""
    token_ids, layers, picker = [*prompt, *output], range(1, target.split.num_layers), Picker(target.split)

    def penalized(logits):
        held = [(prompt[:at], output[: max(0, at - len(prompt))]) for at in range(1, len(token_ids) + 1)]
        return torch.stack([by_hand(one, *own, params) for one, own in zip(logits, held, strict=True)])

    taps, count = dict.fromkeys(layers), len(token_ids)
    rows = PackedRows(PagedCache(1, count), [Span([0], 0, count)])
    last = target.split.run(rows, 0, target.split.num_layers, torch.tensor(token_ids), taps)
    given = [params] * count, range(1, count + 1)
    own = picker(penalized(target.split.logits(last)), *given).tokens
    made = {}
    for layer in layers:
        picks = picker(penalized(target.split.logits(taps[layer], layer)), *given, with_confidence=True)
        made[layer] = picks.tokens == own, picks.confidences
    return made


def probes(policy):
    """(request id, first position, shadow picks, whether they were exact) of everything the policy was given."""
    for row, first, exact in policy.shadows:
        yield row.sequence.request_id, first, row.shadow, exact
    for row, shadow in policy.seeds:
        yield row.request_id, row.num_prompt_tokens - len(shadow.hits[0]), shadow, False


@pytest.mark.parametrize(
    ("family", "params"),
    [("llama", params) for params in SAMPLINGS + PENALIZED]
    + [("gemma2", SAMPLINGS[1]), ("gemma3_text", PENALIZED[0]), ("gpt2", PENALIZED[1])],
)
def test_shadow_picks_are_what_each_layer_would_have_picked(family, params):
    target, prompts, policy = tiny(family), make_prompts((12, 7, 1, 20), seed=1), Adversary(7, 4, most_rounds=1)
    done = decode(target, prompts, policy, replace(params, max_tokens=64))
    truth = {
        str(at): picks_of_every_layer(target, prompt, one.token_ids, params)
        for at, (prompt, one) in enumerate(zip(prompts, done, strict=True))
    }
    assert {exact for *_, exact in policy.shadows} == {True, False} and policy.seeds
    seen = right = close = 0
    for request_id, first, shadow, was_exact in probes(policy):
        for layer, hits, confidences in zip(*shadow, strict=True):
            wanted, sure = (values[first - 1 :].tolist() for values in truth[request_id][layer])
            for hit, confidence, is_hit, is_sure in zip(hits, confidences, wanted, sure, strict=False):
                assert hit or not is_hit, "a layer that is right is never taken to be wrong"
                assert not was_exact or (hit, confidence) == (is_hit, pytest.approx(is_sure, abs=1e-3))
                seen, right = seen + 1, right + (hit == is_hit)
                close += abs(confidence - is_sure) < 0.1
    assert right > 0.97 * seen and close > 0.9 * seen


@pytest.mark.parametrize("vocab_size", [4, 33])
def test_the_default_works_with_a_vocabulary_smaller_than_the_shortlist(vocab_size):
    target, params = Target(build("llama", vocab_size=vocab_size)), SamplingParams(max_tokens=20)
    [plain], [done] = (decode(target, [[3, 1]], policy, params) for policy in ("plain", "adaptive"))
    assert done.token_ids == plain.token_ids


@cache
def compiled(name):
    extra = {"small": {"vocab_size": 20}, "biased": {"vocab_size": 150}}.get(
        name, {"hidden_size": 96, "vocab_size": 999}
    )
    model = build("llama", **extra)
    if name == "biased":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(150))
    return Target(model, backend="compiled").split


def some_penalty(ways, vocab, source):
    """Of any tokens; None where no way has a repetition penalty."""
    repetition = torch.tensor([[way.penalties[0]] for way in ways], dtype=torch.float32)
    seen, bias = (torch.rand(len(ways), vocab, generator=source, dtype=torch.float32) for _ in range(2))
    # Of a vocabulary smaller than the shortlist, torch counts banned tokens among the likely ones.
    banned = (bias > 0.9) & (repetition != 1) & (vocab > 2 * NUM_TOP)
    bias = bias.masked_fill(repetition == 1, 0).masked_fill(banned, float("-inf"))
    return Penalty(repetition, seen < 0.3, bias) if bool((repetition != 1).any()) else None


def in_one_call(split, layers, hidden, params, positions, logits, picks, penalty=None):
    through, num_likely = split.through_heads(hidden, layers), min(NUM_TOP, logits.shape[1]) - 1
    sampling = packed_params(params)
    return split.compiled.shadow_picks(through, sampling, positions, logits, picks, num_likely, split.others, penalty)


def probed(split, num_layers, ways, seed, spoil=None):
    """What a compiled call and torch's operations say of the same layers: (hits, sure) of each."""
    source = torch.Generator().manual_seed(seed)
    last = torch.randn(len(ways), split.config.hidden_size, generator=source, dtype=torch.float32)
    hidden = torch.randn(len(ways), num_layers, last.shape[1], generator=source, dtype=torch.float32).transpose(0, 1)
    hidden = hidden + 2 * last  # which often picks as the last does
    logits, positions, picker = split.logits(last), range(7, 7 + len(ways)), Picker(split)
    penalty = some_penalty(ways, logits.shape[1], source)
    logits = logits if penalty is None else penalty.applied(logits)
    judged = picker(logits, ways, positions).tokens
    if spoil is not None:
        hidden[0, 0, 3] = logits[0, 5] = spoil
    given = split, range(1, 1 + num_layers), hidden, ways, positions, logits, judged
    return in_one_call(*given, penalty), by_torch(split, *given[2:], penalty=penalty)


@given(
    name=st.sampled_from(["small", "biased", "large"]),
    num_layers=st.integers(1, 20),
    ways=st.lists(
        st.sampled_from(
            [
                *SAMPLINGS,
                SamplingParams(repetition_penalty=1.3),
                SamplingParams(temperature=0.8, seed=3, repetition_penalty=0.7),
            ]
        ),
        min_size=1,
        max_size=9,
    ),
    alone=st.sampled_from([0, MAX_SINGLE_THREAD]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_probes_in_one_compiled_call_are_those_of_torchs_operations(name, num_layers, ways, alone, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.executors.cpu.shadow.MAX_SINGLE_THREAD", alone)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        (hits, sure), (wanted, wanted_sure) = probed(compiled(name), num_layers, ways, seed)
    torch.testing.assert_close(sure, wanted_sure, atol=1e-4, rtol=0)
    assert torch.equal(hits, wanted)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), float("-inf")])
@torch.inference_mode()
def test_what_is_no_number_spoils_no_more_than_its_own_layer(spoil):
    (hits, sure), (wanted, wanted_sure) = probed(compiled("large"), 3, [GREEDY] * 4, 0, spoil)
    assert torch.equal(hits[:, 1:], wanted[:, 1:]) and torch.allclose(sure[:, 1:], wanted_sure[:, 1:], atol=1e-4)
    assert not 0 <= sure[0, 0] <= 1 and not hits[0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.inference_mode()
def test_probes_are_the_same_whatever_torch_makes_by_default(dtype):
    split = compiled("large")
    Picker(split)
    torch.set_default_dtype(dtype)
    try:
        (hits, sure), (wanted, wanted_sure) = probed(split, 3, [GREEDY] * 4, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(sure, wanted_sure.float(), atol=1e-2, rtol=0)
    assert sure.dtype == torch.float32 and torch.equal(hits, wanted)


@torch.inference_mode()
def test_a_head_that_was_put_elsewhere_in_memory_is_followed():
    model = build("llama", vocab_size=300)
    split = Target(model, backend="compiled").split
    given = split, Picker(split), (1, 2), torch.randn(2, 4, 32), SAMPLINGS, range(4)
    logits = split.logits(torch.randn(4, 32))
    wanted = shadow_picks(*given, logits, logits.argmax(-1))
    model.lm_head.weight.data = model.lm_head.weight.data.t().contiguous().t()
    assert in_one_call(split, *given[2:], logits, logits.argmax(-1)) is None
    found = shadow_picks(*given, logits, logits.argmax(-1))
    np.testing.assert_allclose(found.confidences, wanted.confidences, atol=1e-4)
    assert (found.hits == wanted.hits).all()


def test_probes_with_exit_heads_go_through_them_in_a_compiled_call_too():
    split = compiled("large")
    hidden, last = torch.randn(2, 5, 96), torch.randn(5, 96)
    logits = split.logits(last)
    given = (1, 2), hidden, [GREEDY] * 5, range(5), logits, logits.argmax(-1)
    plain = in_one_call(split, *given)[1]
    split.exit_heads = some_heads((1, 2), width=96)
    try:
        hits, sure = in_one_call(split, *given)
        wanted, wanted_sure = by_torch(split, split.through_heads(hidden, (1, 2)), *given[2:])
    finally:
        split.exit_heads = None
    torch.testing.assert_close(sure, wanted_sure, atol=1e-4, rtol=0)
    assert torch.equal(hits, wanted) and not torch.allclose(sure, plain, atol=1e-3)
