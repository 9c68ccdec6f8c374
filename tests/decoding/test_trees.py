"""Drafts with second choices beside them change no token, and leave keys and values where a chain would."""

from __future__ import annotations

import itertools
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.acceptance import likely_seconds
from selfspec.control.plan import NUM_BINS, Plan, SecondChoices
from selfspec.executors.verdict import walk
from selfspec.kernels.pick import alternatives
from selfspec.model.attention import Reach, attend_rows
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, Tree
from tests.decoding.test_greedy import check_ends_at_eos
from tests.decoding.test_processors import PROCESSORS
from tests.helpers import Schedule, audit_cache, decode, generate, make_prompts
from tests.models import FAMILIES, build, tiny
from tests.slow import of_each_kind
from tests.target import Target

RAGGED = (12, 1, 20)


class WithSecondChoices(Schedule):
    """Drafts by layers only, with every second choice beside."""

    def plan(self, rows):
        everything = SecondChoices((0.5,) * NUM_BINS, (1.0,) * NUM_BINS, 0.0, self.random.choice([1, 3, 8]))
        return Plan(
            self.random.choice(self.exits),
            tuple(self.random.randint(0, min(self.longest, row.room - 1)) for row in rows),
            self.random.choice(self.confidences),
            second_choices=everything,
            num_rounds=self.random.randint(1, 3),
        )


def seconds(seed):
    return WithSecondChoices(seed, 4, plain=False, lookup=False)


def check_seconds(family, lengths=RAGGED, new=24, audit=True, target=None, is_thorough=False, **options):
    """Greedy, or sampled where options say so; thorough ones see second choices that are right, and wrong."""
    target, prompts = target or tiny(family), make_prompts(lengths, seed=1)
    check = partial(audit_cache, model=target.model) if audit else None
    expected = decode(target, prompts, "plain", max_new_tokens=new, **options)
    found, beside = [], 0
    for seed in range(3 if is_thorough else 2):
        policy = seconds(seed)
        done = decode(target, prompts, policy, check, max_new_tokens=new, **options)
        assert [c.tokens for c in done] == [c.tokens for c in expected]
        found += [outcome.second for outcome in policy.outcomes]
        beside += sum(c.stats.num_side_tokens for c in done)
    assert beside > 0 and (not is_thorough or {True, False, None} <= {*found})


# ----------------------------------------------------------------------------------------------------- whole outputs


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_second_choices_change_no_token_of_any_family(family):
    check_seconds(family)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("lengths", [RAGGED, (3, 30, 1, 17, 9, 2, 12, 5)], ids=len)
def test_second_choices_sample_the_tokens_of_plain_decoding(family, lengths):
    names = list(range(len(lengths)))
    temperatures = [0.7 + 0.1 * (i % 3) for i in names]
    check_seconds(family, lengths, audit=False, temperature=temperatures, top_p=0.95, seed=names)


@cache
def compiled(family):
    return Target(build(family), engine="compiled")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_second_choices_change_no_token_of_a_compiled_body(family):
    check_seconds(family, target=compiled(family), is_thorough=True)
    check_seconds(family, audit=False, target=compiled(family), temperature=[0.7, 1.0, 1.3], seed=[1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_second_choices_are_exact_bit_for_bit_in_exact_mode(dtype):
    target, prompts = Target(build("llama").to(dtype), engine="compiled"), make_prompts(RAGGED, seed=1)
    options = {"max_new_tokens": 16, "keep_logits": True, "temperature": [0.8, 1.0, 1.2], "seed": [1, 2, 3]}
    exact = {"exact": True, "max_cached_tokens": 512}
    expected = decode(target, prompts, "plain", None, exact, **options)
    done = decode(target, prompts, seconds(0), None, exact, **options)
    for one, other in zip(done, expected, strict=True):
        assert one.tokens == other.tokens
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    assert sum(c.stats.num_side_tokens for c in done) > 0


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_second_choices_leave_every_layer_as_a_chain_would_for_any_batch(lengths, seed):
    target, prompts = tiny("llama"), make_prompts(lengths, seed=seed)
    expected = [generate(target.model, prompt, 12) for prompt in prompts]
    settings = {"page_size": 5, "max_batch_size": 4, "prefill_chunk": 16}
    done = decode(target, prompts, seconds(seed), partial(audit_cache, model=target.model), settings, max_new_tokens=12)
    assert [c.tokens for c in done] == expected


def test_an_end_of_text_on_a_branch_ends_the_row_there():
    check_ends_at_eos(policies=[seconds(seed) for seed in range(3)])


def test_processors_see_the_branch_they_are_on():
    target, [prompt] = tiny("phi"), make_prompts([7])
    made = tuple(PROCESSORS["several"](7))
    done = decode(target, [prompt], seconds(0), max_new_tokens=24, logits_processor=[made])
    assert done[0].tokens == generate(target.model, prompt, 24, made)
    assert done[0].stats.num_side_tokens > 0 and done[0].stats.num_accepted_draft_tokens > 0


# ------------------------------------------------------------------------------------------------------------- pieces


@st.composite
def trees(draw, most=12):
    size = draw(st.integers(1, most))
    return Tree((-1, *(draw(st.integers(0, i)) for i in range(size))))


@given(tree=trees(), picks=st.lists(st.integers(0, 2), min_size=13, max_size=13), data=st.data())
def test_walking_follows_the_picks_from_child_to_child(tree, picks, data):
    guesses = data.draw(st.lists(st.integers(0, 2), min_size=len(tree.parents) - 1, max_size=len(tree.parents) - 1))
    path = walk(tree, guesses, picks)
    assert path[0] == 0
    for parent, node in itertools.pairwise(path):
        assert tree.parents[node] == parent and guesses[node - 1] == picks[parent]
    after = [
        n for n in range(1, len(tree.parents)) if tree.parents[n] == path[-1] and guesses[n - 1] == picks[path[-1]]
    ]
    assert not after


@given(
    tree=trees(),
    before=st.integers(0, 9),
    new=st.integers(1, 13),
    window=st.sampled_from([None, 1, 3, 6]),
    chunk=st.sampled_from([None, 4]),
    other=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_a_node_attends_to_its_own_branch_alone(tree, before, new, window, chunk, other, seed):
    """Against attention over each branch laid out by itself, beside a row that is no tree."""
    rng, nodes = torch.Generator().manual_seed(seed), len(tree.parents)
    new = min(new, nodes)
    keys, values = torch.randn(2, 2, 32, 2, 4, generator=rng, dtype=torch.float64)
    queries = torch.randn(4, new + other, 4, generator=rng, dtype=torch.float64)
    cache = PagedCache(2, 32)
    spans = [Span([0], before + nodes - new, new, tree), Span([1], 2, other)]
    reach = Reach(window, chunk)
    got = attend_rows(PackedRows(cache, spans), queries, keys, values, reach, 0.5)
    alone = attend_rows(PackedRows(cache, spans[:1]), queries[:, :new], keys, values, reach, 0.5)
    torch.testing.assert_close(got[:new], alone)
    depths = tree.depths()
    for i, node in enumerate(range(nodes - new, nodes)):
        branch = np.flatnonzero(tree.ancestors()[node])
        assert [depths[n] for n in branch] == list(range(len(branch)))
        slots = [*range(before), *(before + n for n in branch)]
        k, v = keys[:1].clone(), values[:1].clone()
        k[0, : len(slots)], v[0, : len(slots)] = keys[0, slots], values[0, slots]
        one = PackedRows(PagedCache(1, 32), [Span([0], len(slots) - 1, 1)])
        torch.testing.assert_close(got[i], attend_rows(one, queries[:, i : i + 1], k, v, reach, 0.5)[0])


@given(
    confidences=st.lists(st.floats(0, 1), max_size=10),
    right=st.lists(st.floats(0, 1), min_size=NUM_BINS, max_size=NUM_BINS),
    least=st.floats(-1, 1),
    most=st.integers(-1, 10),
)
def test_the_likeliest_second_choices_are_drafted(confidences, right, least, most):
    rule = SecondChoices(tuple(right), (0.5,) * NUM_BINS, least, 99)
    found = likely_seconds(rule, confidences, most)
    everything = likely_seconds(rule._replace(least=-1.0), confidences, 99)
    assert found == sorted(set(found)) and set(found) <= set(everything) and len(found) <= max(0, most)
    assert everything == list(range(len(confidences)))
    assert likely_seconds(rule._replace(least=1.0), confidences, most) == []


def test_second_choices_are_the_next_best():
    scores = torch.tensor([[0.1, 3.0, 2.0], [5.0, 5.0, 1.0]])
    assert alternatives(scores, scores.argmax(-1)).tolist() == [2, 1]
