"""Alternatives, drafted on branches by the eager executor: pieces of a round whose draft is a tree.

That they change no token, and leave keys and values where a chain would, is shown by `tests/executors`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.plan import NUM_BINS, Alternatives, likely_alternatives
from selfspec.executors.accept import accept_tree
from selfspec.model.attention import Reach, attend_rows
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, Tree
from selfspec.params import SamplingParams
from tests.helpers import Always, audit_cache, decode, generate, make_prompts, tokens_of
from tests.models import FAMILIES, tiny
from tests.slow import of_each_kind


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_alternatives_change_no_token_of_any_family(family):
    target, prompts = tiny(family, backend="views"), make_prompts((12, 1, 20), seed=1)
    everything = Alternatives((0.5,) * NUM_BINS, (1.0,) * NUM_BINS, 0.0, 3)
    policy = Always(2, 4, num_rounds=3, alternatives=everything)
    done = decode(target, prompts, policy, SamplingParams(max_tokens=20), audit=audit_cache)
    assert tokens_of(done) == [generate(target.model, prompt, 20) for prompt in prompts]
    are_right = all(row.num_accepted == row.num_drafted for row in policy.rows)  # then no alternative is asked for
    assert are_right or True in {row.alternative for row in policy.rows}
    assert sum(one.stats.num_branch_tokens for one in done) > 0
    followed = [row for row in policy.rows if row.alternative and row.num_drafted == 4 and not row.finish_reason]
    assert max(len(row.drafted) + row.num_branch_tokens for row in followed) == 4 + everything.most


@st.composite
def trees(draw, most=12):
    size = draw(st.integers(1, most))
    return Tree((-1, *(draw(st.integers(0, i)) for i in range(size))))


@given(tree=trees(), picks=st.lists(st.integers(0, 2), min_size=13, max_size=13), data=st.data())
def test_walking_follows_the_picks_from_child_to_child(tree, picks, data):
    guesses = data.draw(st.lists(st.integers(0, 2), min_size=len(tree.parents) - 1, max_size=len(tree.parents) - 1))
    path = accept_tree(tree, guesses, picks)
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
def test_the_likeliest_alternatives_are_drafted(confidences, right, least, most):
    rule = Alternatives(tuple(right), (0.5,) * NUM_BINS, least, 99)
    found = likely_alternatives(rule, confidences, most)
    everything = likely_alternatives(rule._replace(least=-1.0), confidences, 99)
    assert found == sorted(set(found)) and set(found) <= set(everything) and len(found) <= max(0, most)
    assert everything == list(range(len(confidences)))
    assert likely_alternatives(rule._replace(least=1.0), confidences, most) == []
