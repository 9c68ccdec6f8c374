"""A draft's last token that does not pay for its verification is withdrawn: by both executors, in the same rounds."""

from __future__ import annotations

import pytest

from selfspec.control.plan import NUM_BINS, SurvivalStop, confidence_bin
from selfspec.params import SamplingParams
from tests.helpers import Always, make_prompts, run, tokens_of
from tests.models import build
from tests.target import Target

RATES = tuple(i / NUM_BINS for i in range(NUM_BINS))  # by bin of confidence


def rounds_of(backend, keep, num_rows=1, temperature=0.7, bits=None):
    """The outputs, and the rounds of every row: its draft, the withdrawn token, and confidences."""
    target = Target(build("llama"), backend=backend)
    policy = Always(2, 3, stop=SurvivalStop(RATES, 0.3, keep), num_rounds=4, draft_bits=bits)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    made = run(target, make_prompts([9, 5, 12][:num_rows], seed=2), policy, params)
    return tokens_of(made.outputs), made.rounds


@pytest.mark.parametrize("num_rows", [1, 3])
def test_executors_withdraw_the_same_tokens(num_rows):
    (tokens, compiled), (others, views) = (rounds_of(backend, 0.25, num_rows) for backend in ("compiled", "views"))
    assert tokens == others
    drafts = [[(row.drafted, row.withdrawn) for round_ in made for row in round_.rows] for made in (compiled, views)]
    assert drafts[0] == drafts[1], "a near-tie may be rounded"
    assert any(row.withdrawn is not None for round_ in compiled for row in round_.rows)


@pytest.mark.parametrize(("backend", "bits"), [("compiled", None), ("compiled", 4), ("views", None)])
def test_a_token_is_withdrawn_where_its_draft_is_unlikely_and_counts_as_known_where_it_is(backend, bits):
    whole, _ = rounds_of(backend, 0.0, bits=bits)
    tokens, rounds = rounds_of(backend, 0.25, bits=bits)
    assert tokens == whole, "what is drafted changes no token"
    known = 0
    for round_ in rounds:
        [row] = round_.rows
        survival = 1.0
        for one in row.confidences:
            survival *= RATES[confidence_bin(one)]
        assert (row.withdrawn is not None) == (len(row.confidences) > 0 and survival < 0.25)
        assert row.num_drafted == len(row.drafted) == len(row.confidences) - (row.withdrawn is not None)
        assert round_.exit_layer == (2 if row.confidences else None), "a layer has drafted"
        if row.withdrawn is not None and row.num_accepted == row.num_drafted < len(row.token_ids):
            known += 1
            is_right = row.withdrawn == row.token_ids[-1]
            assert row.num_right == (row.num_accepted + is_right, row.num_drafted + 1)
        else:
            assert row.num_right == (row.num_accepted, row.num_judged)
    assert known > 3


def test_without_a_bound_nothing_is_withdrawn():
    _, rounds = rounds_of("compiled", 0.0)
    assert all(row.withdrawn is None for round_ in rounds for row in round_.rows)
