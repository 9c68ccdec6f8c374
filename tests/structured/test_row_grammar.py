"""A row's grammar along drafts and back: its masks are those of a fresh matcher after the same tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.structured.grammars import ASKED, EOS, VOCAB, bits_of, judge_of, new_row
from tests.tokenizers import byte_tokenizer

names = pytest.mark.parametrize("name", ASKED)
JUDGES = {name: judge_of(asked) for name, asked in ASKED.items()}


def walk(judge, dice, length, before=()):
    """Tokens of the grammar after others, up to its end."""
    tokens = []
    for _ in range(length):
        allowed, has_ended = judge.after([*before, *tokens])
        if has_ended:
            break
        tokens.append(dice.choice(allowed))
    return tokens


@given(name=st.sampled_from([*ASKED]), seed=st.integers(0, 1 << 16))
def test_masks_along_any_drafts_are_those_of_a_fresh_matcher(name, seed):
    dice, judge, row, taken = random.Random(seed), JUDGES[name], new_row(name), []
    for _ in range(8):
        for _ in range(3):
            some = walk(judge, random.Random(dice.randrange(3)), dice.randint(0, 6), taken)  # often where it was before
            assert bits_of(row.mask(some)) == judge.after([*taken, *some])[0]
            for n, token in enumerate(forced := row.forced(5, some)):
                assert judge.after([*taken, *some, *forced[:n]])[0] == [token]
        more = walk(judge, dice, dice.randint(1, 4), taken)
        beyond = [*more, dice.randrange(VOCAB)]  # a draft whose last token may be wrong
        assert row.num_allowed(beyond) >= len(more)
        row.mask(beyond)
        count, has_ended = row.take(more)
        taken += more
        assert count == len(more) and has_ended == judge.after(taken)[1]
        if has_ended:
            break


@names
def test_a_program_of_rounds_may_run_ahead_of_what_is_taken(name):
    judge, row = JUDGES[name], new_row(name)
    tokens = walk(judge, random.Random(1), 24)
    masks = [bits_of(row.mask(tokens[:n])) for n in range(len(tokens))]
    assert masks == [judge.after(tokens[:n])[0] for n in range(len(tokens))]
    taken = 0
    for size in (1, 2, 3, len(tokens)):
        block = tokens[taken : taken + size]
        if block:
            assert row.take(block)[0] == len(block)
        taken += len(block)
    assert judge.after(tokens)[0] == bits_of(row.mask())


def test_what_follows_the_end_is_not_taken():
    row, tokens = new_row("choice"), byte_tokenizer()("another")["input_ids"]
    assert row.take([*tokens, EOS, 3]) == (len(tokens), True)
    assert bits_of(row.mask()) == [EOS]


def test_an_end_of_text_ends_what_might_go_on():
    row, tokens = new_row("regex"), byte_tokenizer()("ab-ab-end")["input_ids"]
    assert row.take(tokens) == (len(tokens), False)
    assert EOS in bits_of(row.mask()) and len(bits_of(row.mask())) > 1
    assert row.take([EOS, 5]) == (1, True)


def test_a_token_that_is_not_allowed_is_refused():
    row = new_row("choice")
    assert len(bits_of(row.mask([3]))) == VOCAB, "what follows a wrong draft does not matter"
    with pytest.raises(ValueError, match="structured_outputs or tools allows no token that is left to pick"):
        row.take([3])
