"""Shadow picks and confidences are those of the layers themselves, at the positions the target has judged."""

from __future__ import annotations

import pytest
import torch

from selfspec.api import Target
from selfspec.decoding.pick import Sampling, pick, pick_surely
from selfspec.target.cache import PackedRows, PagedCache, Span
from tests.helpers import Adversary, decode, make_prompts
from tests.models import build, tiny

RAGGED = (12, 7, 1, 20)
WAYS = [Sampling(), Sampling(0.8, seed=3), Sampling(1.0, top_k=20, seed=4), Sampling(1.3, top_p=0.8, seed=5)]


@torch.inference_mode()
def picks_of_every_layer(target, content, sampling):
    """layer -> (picks, how sure each is) for the positions 1, 2, ... of a finished text."""
    layers = range(1, target.stack.num_layers)
    taps, count = dict.fromkeys(layers), len(content)
    rows = PackedRows(PagedCache(1, count), [Span([0], 0, count)])
    last = target.stack.run(rows, 0, target.stack.num_layers, torch.tensor(content), taps)
    positions = torch.arange(1, count + 1)
    own = pick(target.stack.logits(last), [sampling] * count, positions)
    made = {}
    for layer in layers:
        picks, sure = pick_surely(target.stack.logits(taps[layer], layer), [sampling] * count, positions)
        made[layer] = picks == own, sure
    return made


def looks(policy):
    """(request id, first position, shadow, whether it was exact) of everything the policy was shown."""
    for row, shadow, exact in policy.shadows:
        yield row.request_id, row.content_length, shadow, exact
    for row, shadow in policy.seeds:
        yield row.request_id, row.content_length - len(shadow.hits[0]), shadow, False


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "temperature", "top-k", "top-p"])
def test_shadows_are_what_each_layer_would_have_picked(family, exact, way):
    target, prompts, policy = tiny(family), make_prompts(RAGGED, seed=1), Adversary(7, 4, exact)
    options = {name: getattr(way, name) for name in ("temperature", "top_k", "top_p", "seed")}
    done = decode(target, prompts, policy, max_new_tokens=24, **options)
    truth = [picks_of_every_layer(target, [*p, *c.tokens], way) for p, c in zip(prompts, done, strict=True)]
    assert len(policy.shadows) > 10 and policy.seeds
    seen = right = close = 0
    for request_id, first, shadow, was_exact in looks(policy):
        for layer, hits, confidences in zip(*shadow, strict=True):
            wanted, sure = (values[first - 1 :].tolist() for values in truth[request_id][layer])
            for hit, confidence, is_hit, is_sure in zip(hits, confidences, wanted, sure, strict=False):
                assert hit or not is_hit, "a layer that is right is never taken to be wrong"
                assert not was_exact or (hit, confidence) == (is_hit, pytest.approx(is_sure, abs=1e-3))
                seen, right = seen + 1, right + (hit == is_hit)
                close += abs(confidence - is_sure) < 0.1
    assert right > 0.97 * seen and close > 0.9 * seen


@pytest.mark.parametrize("vocab_size", [4, 31, 33, 90])
def test_the_default_works_with_a_vocabulary_smaller_than_the_shortlist(vocab_size):
    target = Target(build("llama", vocab_size=vocab_size))
    [plain] = target.generate([[3, 1]], policy="plain", max_new_tokens=20)
    [done] = target.generate([[3, 1]], max_new_tokens=20)
    assert done.tokens == plain.tokens
