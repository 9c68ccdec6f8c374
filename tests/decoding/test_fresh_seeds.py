"""Losslessness by examples that nobody has seen before: more of them, other ones in every run."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.test_greedy import SCHEDULES, check_any_batch
from tests.decoding.test_sampling import SAMPLINGS, check_any_sampling
from tests.models import FAMILIES, build
from tests.slow import FRESH
from tests.target import Target


@FRESH
@given(st.integers(0, 10**9))
def is_small(number):
    assert number < 10


def test_a_failure_says_how_to_repeat_it():
    with pytest.raises(AssertionError) as failure:
        is_small()
    assert any("@reproduce_failure(" in note for note in failure.value.__notes__)


def test_every_run_tries_other_examples():
    tried = []

    @FRESH
    @given(st.integers(0, 1 << 60))
    def note(number):
        tried[-1].add(number)

    for _ in range(2):
        tried.append(set())
        note()
    assert tried[0] != tried[1]


@pytest.mark.slow
@FRESH
@given(family=st.sampled_from(sorted(FAMILIES)), **SCHEDULES)
def test_any_schedule_of_any_family_equals_generate(family, **case):
    check_any_batch(family, **case)


@cache
def target_of(family, engine):
    """In float64, or compiled, where a token has the same bits in every batch: no near-tie turns by rounding."""
    model = build(family)
    return Target(model, engine=engine) if engine == "compiled" else Target(model.double(), engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "engine"), [("llama", "compiled"), ("llama", "views"), ("gemma2", "views"), ("gpt2", "views")]
)
@FRESH
@given(**SAMPLINGS)
def test_any_speculation_samples_the_tokens_of_plain_decoding(family, engine, **case):
    check_any_sampling(target_of(family, engine), **case)
