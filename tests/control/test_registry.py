"""Policies by name, and what makes none."""

from __future__ import annotations

import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import Plain, Policy
from selfspec.control.published.layerskip import Fixed
from selfspec.control.published.prompt_lookup import PromptLookup
from selfspec.control.registry import CHOOSES_EXIT, NEEDS_COSTS, POLICIES, make_policy
from tests.control.rounds import ask, costs


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy_that_plans(name):
    assert ask(make_policy(name, 4, costs=costs)).exit_layer in (None, 0, 1, 2, 3)
    if name not in CHOOSES_EXIT:
        assert ask(make_policy(name, 4, exit_layer=3, costs=costs)).exit_layer in (None, 3)
    if name in NEEDS_COSTS:
        with pytest.raises(ValueError, match=f"the policy '{name}' needs costs, got none; give a function"):
            make_policy(name, 4)
    else:
        make_policy(name, 4)


def test_a_quarter_of_the_layers_draft_four_tokens_by_default():
    assert make_policy("fixed", 12) == Fixed(3, 4)
    assert make_policy("fixed", 3) == Fixed(1, 4)
    assert make_policy("fixed", 12, 5, 2) == Fixed(5, 2)
    assert make_policy("fixed", 12, draft_vocab=4096) == Fixed(3, 4, draft_vocab=4096)
    assert make_policy("pld", 4) == PromptLookup(10) and make_policy("pld", 4, None, 2) == PromptLookup(2)


def test_no_tokens_or_a_single_layer_are_plain_decoding():
    for policy in (make_policy("plain", 12, 5, 2), make_policy("fixed", 12, 5, 0), make_policy("fixed", 1)):
        assert isinstance(policy, Plain)


def test_a_policy_object_is_returned_as_it_is():
    mine = Policy()
    assert make_policy(mine, 4) is mine


def test_adaptive_takes_what_is_given():
    policy = make_policy("adaptive", 4, 2, 3, costs, drafters=["exit"])
    assert isinstance(policy, Adaptive) and ask(policy).exit_layer in (None, 2)


@pytest.mark.parametrize(
    ("name", "exit_layer", "num_speculative_tokens", "sentence"),
    [
        ("clever", None, None, "policy must be one of adaptive, plain, fixed.*, got 'clever'"),
        ("fixed", 0, None, r"exit_layer must lie in 1\.\.11 for this model, got 0"),
        ("plain", 12, None, r"exit_layer must lie in 1\.\.11 for this model, got 12"),
        ("fixed", None, -1, r"num_speculative_tokens must be at least 0 \(0 is plain decoding\), got -1"),
    ],
)
def test_an_error_names_the_argument_and_what_is_allowed(name, exit_layer, num_speculative_tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_policy(name, 12, exit_layer, num_speculative_tokens)


@pytest.mark.parametrize("drafters", [(), ("trees",), "lookup", ("copies",)])
def test_drafters_that_draft_nothing_are_refused(drafters):
    with pytest.raises(ValueError, match=r"drafters must hold exit or lookup, and besides them at most copies, got"):
        make_policy("adaptive", 4, costs=costs, drafters=drafters)
