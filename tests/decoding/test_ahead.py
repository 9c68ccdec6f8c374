"""Rounds that are decoded in one call come to what they come to one by one, and nobody but the clock can tell."""

from __future__ import annotations

import ctypes
import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import selfspec
from selfspec import api
from selfspec.control.adaptive import Adaptive
from selfspec.control.fixed import Fixed, Plain
from selfspec.control.laps import Seconds
from selfspec.control.plan import (
    DRAFTS,
    LOOKUP,
    NUM_BINS,
    Lookups,
    Plan,
    Policy,
    SecondChoices,
    Steady,
    SurvivalStop,
    TokenTree,
)
from selfspec.decoding import ahead
from selfspec.decoding.ahead import Ahead
from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.drafting.compiled_lookup import CompiledLookup
from selfspec.drafting.lookup import Lookup
from selfspec.kernels.compiled_call import functions
from selfspec.target.compiled_round import Rounds
from tests.decoding.test_compiled_round import LENGTHS, compiled, decoded
from tests.eval.replays import Witness, made_up_costs
from tests.helpers import audit_cache, generate, make_prompts

TABLES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


class Given(Policy):
    """A policy made of what it is given."""

    reads_lookup, steady = False, Steady()

    def __init__(self, **given):
        self.__dict__.update(given)


class Runs(Policy):
    """Plans of one kind for some rounds, then of another; says how long it goes on, and now and then too much.

    Lookup drafts by the match alone.
    """

    reads_lookup = False

    def __init__(self, seed, table, branches, reads_lookup):
        self.dice, self.table, self.branches, self.reads_lookup = random.Random(seed), table, branches, reads_lookup
        self.left, self.bias, self.looks, self.seen = 0, 0, (), []
        self.usual, self.tells_usual = None, seed % 2 == 1
        self.grown = () if seed % 3 == 0 else tuple([1 + (seed + 2 * n) % 9 for n in range(seed % 4)])
        self.streak, self.match = 0, 0
        self.most_surprises, self.kept = (1 << 30, 0) if seed % 5 < 3 else (seed % 11, seed % 3)
        self.shares, self.longer, self.spared = seed % 3 > 0, seed % 4, 0
        self.lookups = None  # of a batch, as it was planned last

    @property
    def steady(self):
        lengths = self.table if len(self.looks) == 1 else [0 if n else -1 for n in self.table]
        usual = self.usual if self.tells_usual else None
        told = Steady(max(0, self.left + self.bias), tuple(lengths), tuple(self.branches), usual)
        told = told._replace(most_surprises=self.most_surprises, kept=self.kept)
        told = told._replace(grown=self.grown, streak=self.streak)
        return told._replace(lookups=self.lookups, longer=max(0, self.longer - self.spared))

    def _share(self, rows):
        """What every row drafts, and with how much of that all together do."""
        own = tuple([tuple([max(0, n - row.request_id % 2) for n in self.table]) for row in rows])
        gains = tuple([tuple([n * (1 + row.request_id % 3) / 4 for n in self.table]) for row in rows])
        return Lookups(own, gains, (0.0, *[0.3 * n for n in range(1, 2 + self.table[-1] * len(rows))]))

    def _by_layers(self, rows):
        if self.left == 0:
            dice = self.dice
            right = tuple(dice.random() for _ in range(NUM_BINS))
            rule = SecondChoices(right, right[::-1], dice.choice([-1, 0.05]), dice.choice([1, 3, 9]), 0.0)
            self.left, self.bias = dice.choice([1, 4, 30]), dice.choice([0, 0, 0, 5, -2])
            self.drawn = (
                (dice.choice([None, 1, 2, 3]), dice.randint(0, 6)),
                {
                    "stop": dice.choice([None, SurvivalStop(right, dice.random())]),
                    "second_choices": dice.choice([None, rule]),
                    "draft_bits": dice.choice([None, 4]),
                    "draft_vocab": dice.choice([None, 40]),
                },
            )
        self.left -= 1
        (exit_layer, longest), more = self.drawn
        lengths = tuple(min(longest, row.room - 1) for row in rows)
        if exit_layer is None or not any(lengths):
            return Plan(None, (0,) * len(rows))
        return Plan(exit_layer, lengths, **more)

    def plan(self, rows):
        self.lookups = self._share(rows) if self.shares and len(rows) > 1 and self.reads_lookup else None
        before = self.left
        self.looks, usual = rows, self._by_layers(rows)
        self.usual = usual
        if self.lookups is not None:
            return self._by_all(rows, before) or usual
        plan = self._by_lookup(rows[0]) if self.reads_lookup and len(rows) == 1 else None
        if self.reads_lookup and len(rows) > 1 and any(self._entry(row, self.table) == 0 for row in rows):
            self.left = 0  # a match that is to be asked about: other plans may follow
        return plan or usual

    def _by_all(self, rows, before):
        lengths = self.lookups.drafted([row.match for row in rows], [row.room - 1 for row in rows])
        if lengths is None:
            return None
        if before and self.spared < self.longer:
            self.left, self.spared = self.left + 1, self.spared + 1  # others may follow one round later
        elif not before:
            self.spared = 0
        if self.bias:
            return Plan(LOOKUP, lengths)
        chains = [row.guesses.chain(n) for row, n in zip(rows, lengths, strict=True)]
        return Plan(LOOKUP, lengths, trees=tuple([TokenTree(tuple(c), tuple(range(len(c)))) for c in chains]))

    def _entry(self, row, table):
        return table[min(row.match, len(table) - 1)]

    def _by_lookup(self, row):
        length, self.match = self._entry(row, self.table), row.match
        if length and self.streak and self.grown and row.match >= len(self.table) - 1:
            length = self.grown[min(self.streak, len(self.grown)) - 1]
        length = min(length, row.room - 1)
        if not row.match or length <= 0:
            return None
        if self._entry(row, self.branches) and row.guesses.alternatives():
            length = min(2, row.room - 1)
        tokens = tuple(row.guesses.chain(length))
        return Plan(LOOKUP, (length,), trees=(TokenTree(tokens, tuple(range(length))),))

    def observe(self, plan, outcomes, seconds):
        assert min(seconds.draft, seconds.verify, seconds.head, seconds.pick) >= 0
        self.seen.append((plan, outcomes))
        one = outcomes[0]
        is_right = len(outcomes) == 1 and plan.exit_layer == LOOKUP and 0 < one.num_drafted == one.num_accepted
        self.streak = self.streak + 1 if is_right and self.match >= len(self.table) - 1 else 0


@given(
    seed=st.integers(0, 1 << 16),
    num_rows=st.integers(1, 4),
    family=st.sampled_from(["llama", "qwen3", "mistral"]),
    table=TABLES,
    branches=st.lists(st.booleans(), min_size=1, max_size=12),
    reads_lookup=st.booleans(),
    sampled=st.lists(st.booleans(), min_size=len(LENGTHS), max_size=len(LENGTHS)),
)
def test_they_are_what_they_are_one_by_one(seed, num_rows, family, table, branches, reads_lookup, sampled):
    table, branches = [0, *table], (branches * 13)[: len(table) + 1]
    found = []
    for most in (16, 1):
        policy = Runs(seed, table, branches, reads_lookup)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "most_rounds", lambda count, most=most: most)
            patch.setattr(ahead, "BURST", 60.0)
            found.append((*decoded(family, num_rows, seed, policy, 40, sampled), policy.seen))
    assert found[0] == found[1]


def counted(monkeypatch):
    """Rounds of every compiled call."""
    calls, run = [], Rounds.run

    def counting(*given, **named):
        done = run(*given, **named)
        calls.append(len(done))
        return done

    monkeypatch.setattr(Rounds, "run", counting)
    return calls


@pytest.mark.parametrize("policy", [Plain(), Fixed(2, 3)])
def test_policies_that_never_change_take_a_call_for_many_rounds(monkeypatch, policy):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    calls = counted(monkeypatch)
    engine = Engine(compiled("llama"), policy=policy, max_batch_size=1)
    engine.submit(make_prompts([7])[0], max_new_tokens=400)
    rounds = [round_ for round_ in engine.run() if round_.rows]
    assert calls[0] == 1  # nobody waits for later tokens before the first is there
    assert len(rounds) == sum(calls) and max(calls) <= ahead.most_rounds(1)
    assert calls[1] == min(ahead.most_rounds(1), len(rounds) - 1)
    assert len(calls) < len(rounds) / 4


def test_lookup_is_drafted_by_without_asking(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    calls, policy = counted(monkeypatch), Runs(3, [0, 0, 3], [False] * 3, True)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=250)  # greedy text, which soon goes round in circles
    rounds = [round_ for round_ in engine.run() if round_.rows]
    by_lookup = [round_ for round_ in rounds if round_.plan.exit_layer == LOOKUP]
    assert any(round_.is_ahead and round_.rows[0].num_accepted for round_ in by_lookup)
    assert sum(calls) == len(rounds) > len(calls)  # nothing was in vain


class Together(Policy):
    """Rows that all draft by lookup after long matches; else an early layer drafts for them, or none."""

    reads_lookup = True

    def __init__(self, exit_layer, rounds=1000, longer=0):
        self.exit_layer, self.rounds, self.longer, self.planned = exit_layer, rounds, longer, 0

    def plan(self, rows):
        self.planned += 1
        rooms = [row.room - 1 for row in rows]
        self.usual = Plan(
            self.exit_layer, tuple([min(3, room) for room in rooms]) if self.exit_layer else (0,) * len(rows)
        )
        self.lookups = Lookups(((0, 0, 0, 4),) * len(rows), ((0.0, 0.0, 0.0, 3.0),) * len(rows), (5.0,))
        lengths = self.lookups.drafted([row.match for row in rows], rooms)
        return self.usual if lengths is None else Plan(LOOKUP, lengths)

    def observe(self, plan, outcomes, seconds):
        pass

    @property
    def steady(self):
        return Steady(self.rounds, usual=self.usual, lookups=self.lookups, longer=self.longer)


def together(monkeypatch, policy, num_tokens=120):
    """Rounds of three rows that soon go round in circles, and of every call how many, and whether lookup drafted."""
    monkeypatch.setattr(ahead, "BURST", 60.0)
    run, calls = Rounds.run, []

    def running(*given, **named):
        done = run(*given, **named)
        calls.append([one.is_given and any(row.drafted for row in one.rows) for one in done])
        return done

    monkeypatch.setattr(Rounds, "run", running)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=3)
    for text in ("class Stack:\n", "import os\n", "def mean(values):\n"):
        engine.submit(text, max_new_tokens=num_tokens)
    return [round_ for round_ in engine.run() if round_.rows], calls


@pytest.mark.parametrize("exit_layer", [None, 4])
def test_rows_of_a_batch_draft_by_lookup_together_without_asking(monkeypatch, exit_layer):
    rounds, calls = together(monkeypatch, Together(exit_layer))
    by_lookup = [one for one in rounds if one.plan.exit_layer == LOOKUP and len(one.rows) == 3]
    assert sum(one.is_ahead for one in by_lookup) > 5
    assert any(0 in one.plan.draft_lengths for one in by_lookup), "two rows are enough for the third to wait"
    assert all(sum(map(bool, one.plan.draft_lengths)) > 1 for one in by_lookup)
    assert sum(map(len, calls)) == len(rounds) > 4 * len(calls)  # nothing was in vain


@pytest.mark.parametrize(("steady", "longer"), [(2, 0), (2, 3), (2, 1000), (0, 1000)])
def test_each_round_by_lookup_lets_one_more_follow_as_far_as_the_policy_says(monkeypatch, steady, longer):
    _, calls = together(monkeypatch, Together(4, steady, longer))
    for call in calls:
        allowed = 1 + steady  # and a lookup after the first round adds one
        for at in range(1, len(call)):
            assert at < allowed
            allowed += call[at] and allowed - 1 - steady < longer
    longest = max(map(len, calls))
    assert longest == 1 + steady + longer if longer < 1000 else (longest > 6 if steady else longest == 1)


def test_a_table_that_drafts_longer_than_rows_have_room_for_takes_no_more_memory(monkeypatch):
    class Endless(Together):
        def plan(self, rows):
            super().plan(rows)
            huge = tuple([tuple([1 << 40 if n else 0 for n in own]) for own in self.lookups.lengths])
            self.lookups = self.lookups._replace(lengths=huge)
            lengths = self.lookups.drafted([row.match for row in rows], [row.room - 1 for row in rows])
            return self.usual if lengths is None else Plan(LOOKUP, lengths)

    rounds, calls = together(monkeypatch, Endless(4))
    assert sum(map(len, calls)) == len(rounds) and any(any(call) for call in calls)


@pytest.mark.parametrize("grown", [(), (7, 9)])
def test_a_call_goes_on_by_lookup_and_drafts_grow_as_they_are_right(monkeypatch, grown):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    policy, run, drafted, lookups = Runs(4, [0, 5], [False] * 2, True), Rounds.run, [], []
    policy.left, policy.drawn, policy.tells_usual = 1000, ((2, 3), {"keep_confidence": True}), True
    policy.grown = grown

    def running(*given, **named):
        done = run(*given, **named)
        by_lookup = [len(one.rows[0].drafted) for one in done if one.is_given and one.rows[0].drafted]
        drafted.append(by_lookup)
        lookups.append(len([one for one in done[1:] if one.is_given and one.rows[0].drafted]))
        return done

    monkeypatch.setattr(Rounds, "run", running)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=250)  # greedy text, which soon goes round in circles
    list(engine.run())
    assert max(lookups) > 2 and len(lookups) < 10
    every = [n for call in drafted for n in call]
    assert {*every[:-1]} == {5, *grown}  # the row's end cuts the last one
    assert not grown or any(call[i : i + 4] == [5, 7, 9, 9] for call in drafted for i in range(len(call)))


@pytest.mark.parametrize("kept", [0, 20])
@pytest.mark.parametrize("table", [[0, 0], [0, 0, 0, 2], [0, 5]])
def test_a_call_ends_where_there_is_something_to_learn(monkeypatch, table, kept):
    """Guessed tokens where nothing is drafted, and drafts, but for those that grow by themselves."""
    monkeypatch.setattr(ahead, "BURST", 60.0)
    policy, run, most, calls = Runs(4, table, [False] * len(table), True), Rounds.run, 6, []
    policy.left, policy.drawn, policy.tells_usual = 1000, ((None, 0), {}), True
    policy.most_surprises, policy.kept, policy.grown = most, kept, (7, 9)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=1)

    def running(*given, **named):
        done = run(*given, **named)
        [row] = engine.rows
        calls.append(([*row.content], [one.rows[0].block for one in done], [one.rows[0].drafted for one in done]))
        return done

    monkeypatch.setattr(Rounds, "run", running)
    plan = policy.plan

    def asked(rows):  # and so begins to count anew
        if not engine._ahead:
            rows[0].guesses.take_tally()
        return plan(rows)

    policy.plan = asked
    engine.submit("class Stack:\n", max_new_tokens=250)  # greedy text, which soon goes round in circles
    list(engine.run())
    watched, told = Steady(9, tuple(table)).watched, []
    for content, blocks, drafts in calls[:-1]:
        naive, surprises, left = Lookup(content), [], 0
        for block, drafted in zip(blocks, drafts, strict=True):
            match = naive.match
            content += block
            naive.take_tally() if not surprises else None
            grows = drafted and len(block) > len(drafted) and match >= len(table) - 1
            left += bool(drafted) and not grows
            naive.match  # noqa: B018  # it catches up
            guessed = sum(n for n, counts in zip(naive.guessed, watched, strict=True) if counts)
            surprises.append(left + guessed)
        told.append(surprises)
    ended = [one for one in told if len(one) > kept and one[-1] >= most]
    assert all(max(one[kept:-1], default=0) < most for one in told)
    assert ended or table == [0, 5]


@pytest.mark.parametrize("tells_usual", [False, True])
def test_a_call_may_begin_with_a_round_by_lookup_if_it_is_known_how_others_are_planned(monkeypatch, tells_usual):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    policy, run, began = Runs(3, [0, 5], [False] * 2, True), Rounds.run, []
    policy.left, policy.drawn, policy.tells_usual = 1000, ((2, 3), {"keep_confidence": True}), tells_usual

    def running(*given, **named):
        done = run(*given, **named)
        began.append([one.is_given and bool(one.rows[0].drafted) for one in done])
        return done

    target, sampling = selfspec.load("demo", engine="compiled"), {"temperature": 0.8, "seed": 1}
    expected = target.generate("class Stack:\n", max_new_tokens=250, policy="plain", **sampling)
    monkeypatch.setattr(Rounds, "run", running)
    engine = Engine(target, policy=policy, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=250, **sampling)
    rounds = [round_ for round_ in engine.run() if round_.rows]
    assert [token for round_ in rounds for token in round_.rows[0].tokens] == expected[0].tokens
    longest = max(len(call) for call in began if call[0])
    assert longest > 3 if tells_usual else longest == 1
    assert sum(map(len, began)) == len(rounds)  # nothing was in vain


@pytest.mark.parametrize("usual", [Plan(99, (2,)), Plan(2, (1 << 30,)), Plan(2, (2, 2)), Plan(2, (-1,))])
def test_a_usual_plan_that_cannot_be_is_refused_where_it_would_count(usual):
    policy = Runs(3, [0, 2], [False] * 2, True)
    policy.left, policy.drawn = 1000, ((2, 3), {"keep_confidence": True})
    steady = Steady(9, (0, 2), usual=usual)
    lying = Given(plan=policy.plan, observe=policy.observe, steady=steady, reads_lookup=True)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=lying, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=200)
    with pytest.raises(ValueError, match="a plan's"):
        list(engine.run())
    assert any(plan.exit_layer == 2 for plan, _ in policy.seen)  # until lookup drafted


@pytest.mark.parametrize("lies", [False, True])
def test_plain_plans_need_no_lengths(lies):
    """Nor do those that are only told of as usual."""
    plain, runs = Plan(None, ()), Runs(3, [0, 2], [False] * 2, True)
    runs.left, runs.drawn = 1000, ((None, 0), {})
    plan = runs.plan if lies else lambda rows: plain
    steady = Steady(9, (0, 2), usual=plain)
    policy = Given(plan=plan, observe=lambda *given: None, steady=steady, reads_lookup=lies)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=60)
    expected = engine.target.generate("class Stack:\n", max_new_tokens=60, policy="plain")
    assert tokens_of(engine.run())[0].tokens == expected[0].tokens


def test_indices_are_lent_to_all_rows_or_none(monkeypatch):
    """What was lent and is not told of is made anew: no row pays for another's index being ahead."""
    monkeypatch.setattr(ahead, "BURST", 60.0)
    made = []
    anew = CompiledLookup._begin_anew
    monkeypatch.setattr(CompiledLookup, "_begin_anew", lambda self: made.append(self) or anew(self))
    policy = Runs(1, [1], [False], True)
    policy.shares = False
    policy.left, policy.drawn = 1 << 20, ((2, 3), {"keep_confidence": True})
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=2)
    for text in ("def mean(values):\n", "class Stack:\n", "import os\n"):
        engine.submit(text, max_new_tokens=90)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 12:
            engine.cancel(0)  # while rounds of both wait: the other's index knows more than its row for a while
    assert not made


def test_drafts_are_cut_to_what_rows_have_room_for(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    calls = counted(monkeypatch)
    for left in (1, 2, 3, 5, 9, 20, 33):
        engine = Engine(compiled("llama"), policy=Fixed(1, 9), max_batch_size=2)
        prompts = make_prompts([7, 5])
        for prompt, more in zip(prompts, (left, left + 4), strict=True):
            engine.submit(prompt, max_new_tokens=more)
        done = tokens_of(engine.run())
        expected = [generate(engine.target.model, prompts[i], left + 4 * i) for i in (0, 1)]
        assert [done[i].tokens for i in (0, 1)] == expected
    assert len(calls) < 0.6 * sum(calls)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_row_with_room_for_its_last_token_alone_takes_it_beside_others_that_draft(monkeypatch, num_rows):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    last = []
    for left in range(8, 30):
        engine = Engine(compiled("llama"), policy=Fixed(2, 1), max_batch_size=2)
        for prompt, more in zip(make_prompts([9, 4])[:num_rows], (left, 40), strict=False):
            engine.submit(prompt, max_new_tokens=more)
        rounds = [round_ for round_ in engine.run() if round_.rows]
        for round_ in rounds[2:]:
            if round_.rows[0].request_id == 0 and len(round_.rows) == num_rows and not round_.plan.draft_lengths[0]:
                last.append((round_.is_ahead, round_.rows[0].completion is not None, sum(round_.plan.draft_lengths)))
    # A round in which nothing is drafted is another plan.
    assert last and set(last) == {(num_rows > 1, True, num_rows - 1)}


def test_after_some_time_no_round_begins(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 0.0)
    calls = counted(monkeypatch)
    decoded("llama", 2, 0, Plain(), 20, [False] * 8)
    assert {*calls} == {1}


def test_generate_decodes_on_for_longer_than_stream_and_says_so_if_that_is_nonsense(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 0.0)
    monkeypatch.setattr(api, "WHOLE_BURST", 60.0)
    target, calls, told = compiled("llama"), counted(monkeypatch), {"policy": Plain(), "max_new_tokens": 120}
    [done] = target.generate(make_prompts([7]), **told)
    assert len(calls) < 5 and sum(calls) == 120
    assert calls[0] > 1, "nobody waits for the first token"
    calls.clear()
    [early] = target.generate(make_prompts([7]), **told, stopping_criteria=[lambda ids, scores: False])
    assert {*calls} == {1}, "nobody knows where it ends"
    assert early.tokens == done.tokens
    calls.clear()
    [streamed] = tokens_of(target.stream(make_prompts([7]), **told)).values()
    assert {*calls} == {1} and streamed.tokens == done.tokens
    for burst in (-1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match="burst must be a number of seconds, at least 0, got"):
            target.stream(make_prompts([7]), burst=burst)


def test_the_first_token_of_a_stream_comes_alone(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    calls = counted(monkeypatch)
    [done] = tokens_of(compiled("llama").stream(make_prompts([7]), policy=Plain(), max_new_tokens=120)).values()
    assert calls[0] == 1 and len(calls) < 6 and sum(calls) == len(done.tokens) == 120


@pytest.mark.parametrize("count", [1, 3, 4, 16, 64, 500])
def test_calls_of_many_rows_have_fewer_rounds_and_memory_for_them(count):
    assert 64 <= ahead.most_rounds(count) <= min(256, max(64, 1024 // count))


def tokens_of(rounds):
    done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
    return {one.request_id: one for one in done}


def test_rows_that_come_and_go_meanwhile(monkeypatch):
    """Every row's tokens are plain decoding's, and its keys and values those of a forward, after every step."""
    monkeypatch.setattr(ahead, "BURST", 60.0)
    target, prompts = compiled("llama"), make_prompts([9, 4, 12, 6])
    engine = Engine(target, policy=Fixed(2, 3), max_batch_size=3)
    for prompt in prompts[:2]:
        engine.submit(prompt, max_new_tokens=60)
    rounds = []
    for step in range(400):
        if not engine.has_work:
            break
        if step == 4:
            engine.submit(prompts[2], max_new_tokens=30)
        if step == 7:
            engine.cancel(0)
        if step == 9:
            engine.submit(prompts[3], max_new_tokens=25)
        rounds.append(engine.step())
        audit_cache(engine, target.model)
    done = tokens_of(rounds)
    assert done[0].finish_reason == "cancelled" and len(done[0].tokens) > 3
    for request, (prompt, count) in enumerate(zip(prompts, (60, 60, 30, 25), strict=True)):
        expected = generate(target.model, prompt, count)
        assert done[request].tokens == (expected[: len(done[0].tokens)] if request == 0 else expected)
    assert engine.cache.num_free_pages == engine.cache.num_pages


@pytest.mark.parametrize("policy", [Plain(), Fixed(2, 3)])
def test_nothing_is_decoded_after_an_end(monkeypatch, policy):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    target, prompt = compiled("llama"), make_prompts([9])[0]
    text = generate(target.model, prompt, 40)
    end = next(at for at in range(10, 40) if text[at] not in text[:at])
    calls = counted(monkeypatch)
    engine = Engine(target, policy=policy, max_batch_size=1)
    engine.submit(Request(prompt, 200, eos=frozenset([text[end]])))
    rounds = list(engine.run())
    assert tokens_of(rounds)[0].tokens == text[: end + 1]
    assert sum(calls) == sum(1 for round_ in rounds if round_.rows)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_an_index_that_was_told_of_tokens_nobody_heard_of_is_made_anew(monkeypatch, at, problem):
    """What is interrupted right after a compiled call has lost that call, and nothing else."""
    monkeypatch.setattr(ahead, "BURST", 60.0)
    run, found = Rounds.run, []
    for interrupted in (False, True):
        policy, left = Runs(3, [0, 0, 3], [False] * 3, True), [at if interrupted else -1]
        policy.left, policy.drawn = 1000, ((2, 3), {"keep_confidence": True})

        def running(*given, left=left, **named):
            done = run(*given, **named)
            left[0] -= 1
            if left[0] == 0:
                raise problem
            return done

        monkeypatch.setattr(Rounds, "run", running)
        engine = Engine(selfspec.load("demo", engine="compiled"), policy=policy, max_batch_size=1)
        engine.submit("class Stack:\n", max_new_tokens=120)
        rounds = []
        while engine.has_work:
            try:
                rounds.append(engine.step())
            except problem:
                policy.left += 1
        found.append(([row.tokens for round_ in rounds for row in round_.rows], policy.seen))
        assert left[0] < 0  # so it was, if it was to be
    assert found[0] == found[1]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=30, max_size=80),
    read=st.integers(1, 20),
    told=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    grown=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    is_lost=st.booleans(),
)
def test_an_index_that_knows_more_than_its_row_tells_what_it_would(tokens, read, told, grown, is_lost):
    """Whatever it was told beforehand, and however the row goes on then."""
    functions()
    content, anew = tokens[:read], []
    known, plain = CompiledLookup(content), Lookup(content)
    begin_anew, known._begin_anew = known._begin_anew, lambda: anew.append(len(content)) or begin_anew()
    place, out = known.lend(), (ctypes.c_int64 * known.told_size)()
    heard, at = [], read
    for count in told:
        new = tokens[at : at + count]
        if not new:
            break
        at += len(new)
        out[0] = functions().selfspec_index_add(
            place, (ctypes.c_int64 * len(new))(*new), len(new), ctypes.byref(out, 8)
        )
        heard.append((out[1 : 5 + out[0]], len(new)))
    if not is_lost:
        known.foresee([each for each, _ in heard], [count for _, count in heard])
    for count in grown:
        new = tokens[len(content) : len(content) + count]
        content += new
        assert (known.match, known.draft(9), known.alternatives()) == (
            plain.match,
            plain.draft(9),
            plain.alternatives(),
        )
        told, all_told = known.take_tally(), plain.take_tally()
        assert told == all_told if not anew else told.num_tokens == all_told.num_tokens
        assert all(mine <= all_ for mine, all_ in zip(told.seen, all_told.seen, strict=True)), "nothing counts twice"


def test_an_index_that_memory_was_too_little_for_is_made_when_there_is_enough():
    functions()
    content = [1, 2, 1, 2, 1]
    known, made = CompiledLookup(content), functions()
    known.lend()
    known.foresee([[0, -1, 0, 0]], [3])  # which the row does not go on by
    known._lib = SimpleNamespace(selfspec_index_new=lambda *given: None, selfspec_index_free=made.selfspec_index_free)
    content += [2, 1]
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="too little memory for an index"):
            patch.setattr("selfspec.drafting.compiled_lookup.functions", lambda lib=known._lib: lib)
            assert known.match
    content += [2, 3, 1]  # more than it held
    assert (known.match, known.draft(4)) == (Lookup(content).match, Lookup(content).draft(4))


@pytest.mark.parametrize(
    ("steady", "said"),
    [
        (Steady(-1), "the rounds that a policy is steady for must be"),
        (Steady(0.5), "the rounds that a policy is steady for must be"),
        (Steady(3, ()), "lengths must be whole numbers, at least one"),
        (Steady(3, (0, 1), (True,)), "its branches as many or none"),
        (Steady(3, (0, 1), grown=("2",)), "as those of grown drafts"),
        (Steady(3, (0, 1), grown=(2, 0)), "grown drafts must have at least a token"),
        (Steady(3, streak=-1), "the right drafts that a steady policy has seen in a row must be"),
        (Steady(3, most_surprises=-1), "the surprises after which a steady policy is asked must be"),
        (Steady(3, kept=-1), "the rounds for which a steady policy is not asked because of these must be"),
        (Steady(3, usual=3), "usual must be a plan or None, got 3"),
        (Steady(3, longer=-1), "the rounds by which lookups lengthen that must be"),
        (Steady(3, lookups=Lookups((), (), (1.0,))), "lookups must have lengths and gains of every row, 1, by as many"),
        (Steady(3, lookups=Lookups(((0, 2),), ((0.0,),), (1.0,))), "got 1 rows' lengths and 1 rows' gains of [1, 2]"),
        (Steady(3, lookups=Lookups(((0, 2),), ((0.0, 1.0),), ())), "matches, and 0 needs"),
        (Steady(3, lookups=Lookups(((0, 2.0),), ((0.0, 1.0),), (1.0,))), "lookups must be tuples, of whole numbers as"),
        (Steady(3, lookups=Lookups(((0, 2),), ((0.0, 1.0),), ("x",))), "lookups must be tuples, of whole numbers as"),
        (Steady(3, lookups=Lookups(((0, 2),), ((0.0, None),), (1.0,))), "lookups must be tuples, of whole numbers as"),
        (Steady(3, lookups=Lookups(([0, 2],), ((0.0, 1.0),), (1.0,))), "lookups must be tuples, of whole numbers as"),
        (Steady(3, lookups=[((0, 2),), ((0.0, 1.0),), (1.0,)]), "lookups must be Lookups or None, got [((0, 2),)"),
    ],
)
def test_what_is_no_steadiness_is_refused(steady, said):
    policy = Fixed(1, 1)
    engine = Engine(compiled("llama"), policy=Given(plan=policy.plan, observe=policy.observe, steady=steady))
    engine.submit(make_prompts([5])[0], max_new_tokens=4)
    with pytest.raises(ValueError, match=re.escape(said)):
        engine.step()


@pytest.mark.parametrize("lengths", [(-2,), (3, 3), (0, 1 << 40), (0, 0, -7)])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_policies_that_say_what_they_do_not_do_lose_time_alone(lengths, num_rows):
    policy = Runs(1, [0], [False], True)
    policy.left, policy.drawn = 1000, ((2, 3), {"keep_confidence": True})
    lying = Given(plan=policy.plan, observe=policy.observe, steady=Steady(9, lengths), reads_lookup=True)
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=lying, max_batch_size=num_rows)
    texts = ("def mean(values):\n", "class Stack:\n")[:num_rows]
    for text in texts:
        engine.submit(text, max_new_tokens=60)
    done = tokens_of(engine.run())
    expected = engine.target.generate(texts, max_new_tokens=60, policy="plain")
    assert [done[i].tokens for i in range(num_rows)] == [one.tokens for one in expected]


def test_seconds_of_what_was_in_vain_are_told_as_control(monkeypatch):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    told, vain, lost, forget = [], [], Ahead.lost, Ahead.forget

    def losing(self):
        told.append(lost(self))
        return told[-1]

    def forgetting(self):
        vain.extend(taken for one in self._coming for _, taken in one.parts)
        forget(self)

    monkeypatch.setattr(Ahead, "lost", losing)
    monkeypatch.setattr(Ahead, "forget", forgetting)
    policy = Runs(5, [0], [False], False)
    lying = Given(plan=policy.plan, observe=policy.observe, steady=Steady(9))
    engine = Engine(selfspec.load("demo", engine="compiled"), policy=lying, max_batch_size=1)
    engine.submit("class Stack:\n", max_new_tokens=200)
    rounds = list(engine.run())
    assert sum(told) == pytest.approx(sum(vain)) and sum(vain) > 0
    assert len(told) == len(rounds) and all(r.seconds.control >= own for r, own in zip(rounds, told, strict=True))


class Clocked(Witness):
    """Hides the clock, but that looks at other layers take their time."""

    def observe(self, plan, outcomes, seconds):
        self.calls.append(("observe", tuple(outcomes)))
        shadow = 0.0 if plan.shadow is None else 5e-3
        self.inner.observe(plan, outcomes, Seconds(draft=1e-3, verify=2e-3, head=1e-4, pick=1e-4, shadow=shadow))


@pytest.mark.parametrize("drafts", [None, ["exit", "copies"], ["exit"]])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_adaptive_plans_the_same_whether_or_not_rounds_come_at_once(monkeypatch, num_rows, drafts):
    monkeypatch.setattr(ahead, "BURST", 60.0)
    calls, found = counted(monkeypatch), []
    for most in (1, 16):
        monkeypatch.setattr(ahead, "most_rounds", lambda count, most=most: most)
        calls.clear()
        policy = Adaptive(made_up_costs(16), drafts=drafts or DRAFTS)
        policy.tell_copies(True)
        witness = Clocked(policy)
        engine = Engine(selfspec.load("demo", engine="compiled"), policy=witness, max_batch_size=num_rows)
        for text in ("def mean(values):\n", "class Stack:\n", "import os\n")[:num_rows]:
            engine.submit(text, max_new_tokens=150)
        found.append(([row.tokens for round_ in engine.run() for row in round_.rows], repr(witness.calls)))
    assert found[0] == found[1]
    assert len(calls) < 0.7 * sum(calls)
