"""The suite notices what it is there for: known ways to lose losslessness are put into every executor.

The pitfalls are those that published speculative decoders have had. Each check is run without the fault first.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from selfspec.core import LOOKUP, Sequence
from selfspec.decoding.engine import LLMEngine
from selfspec.decoding.outputs import SpecStats
from selfspec.decoding.stopping import Stopper
from selfspec.drafting.early_exit import draft_by_exit
from selfspec.executors import eager
from selfspec.executors.cuda.rounds import RoundInputs, WholeRound
from selfspec.executors.penalties import Penalties
from selfspec.executors.picker import Picker
from selfspec.kernels.pick import num_accepted
from selfspec.kernels.suite import REFERENCE
from selfspec.model.kv_cache import PagedCache
from tests.cuda.standin import with_runner
from tests.executors.faults import NAMES, compiled_by
from tests.executors.faults import faulty as faulty
from tests.executors.requests import new_target, programs
from tests.executors.test_conformance import Both, Together, check_policy, check_same_rounds, some_params
from tests.executors.test_conformance import check as check_batch
from tests.helpers import Always

pytestmark = pytest.mark.slow  # they show what the conformance suite would notice, not what the executors do

SEEDS = 4


def check(kind, made=None):
    """Few plans of many rounds; then any plans, which record too many shapes for a recording executor."""
    for policy in (Both(5), Always(3, 5, num_rounds=5), Always(LOOKUP, 5, num_rounds=40)):
        check_policy(kind, policy, made)
    for seed in range(SEEDS if kind != "cuda" else 0):
        check_batch(kind, seed, programs(seed, eager=0.5 if kind == "eager" else 0.1))


@cache
def passes(kind):
    check(kind)
    return True


# ------------------------------------------------------------------------------------- around the executors, and each


def no_cut(self, content, emitted, block, honest=Stopper.cut):
    kept, text, reason = honest(self, content, emitted, block)
    return (len(block) if reason == "stop" else kept), text, reason


def one_too_many(self, row, honest=Sequence.append):
    honest(self, row)
    self.num_cached += 1


def pages_of_another_row(self, num_tokens, honest=PagedCache.reserve):
    pages = honest(self, num_tokens)
    return pages and [0, *pages[1:]]


def pages_never_freed(self, pages, written=None):
    pass


def finished_rows_stay(self):
    """Those that have room, since compiled code writes where it is told to."""
    self.running = [row for row in self.running if row.finish_reason is None or row.num_remaining > 1]


def cut_tokens_counted(self, row, honest=LLMEngine._emit):
    """A round that an end cut short counts all that verification accepted."""
    count, num_accepted = SpecStats.add_round, row.num_accepted
    SpecStats.add_round = lambda self, drafted, accepted, *rest: count(self, drafted, num_accepted, *rest)
    try:
        return honest(self, row)
    finally:
        SpecStats.add_round = count


def columns_beyond_the_first_rejection(self, drafted, accepted, emitted, honest=SpecStats.add_round):
    honest(self, drafted, min(drafted, accepted + (drafted > accepted)), emitted)


AROUND = [
    (Stopper, "cut", no_cut),
    (Sequence, "append", one_too_many),
    (PagedCache, "reserve", pages_of_another_row),
    (PagedCache, "release", pages_never_freed),
    (LLMEngine, "_drop_finished", finished_rows_stay),
    (LLMEngine, "_emit", cut_tokens_counted),
    (SpecStats, "add_round", columns_beyond_the_first_rejection),
]


@pytest.mark.parametrize("kind", ["eager", "cpu", "cuda"])
@pytest.mark.parametrize(("owner", "name", "fault"), AROUND, ids=[fault.__name__ for *_, fault in AROUND])
def test_faults_around_every_executor_are_noticed(monkeypatch, kind, owner, name, fault):
    assert passes(kind)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        check(kind)


# ------------------------------------------------------------------------------------------------- the eager executor


def last_early_pass_skipped(split, cache, rows, tokens, exit_layer, choose, tapped=()):
    """As if the last drafted token had not been through the early layers: its early keys and values stay empty."""
    draft = draft_by_exit(split, cache, rows, tokens, exit_layer, choose, tapped)
    for row, drafted in zip(rows, draft.lengths, strict=True):
        at = row.position + drafted
        for layer in range(exit_layer if drafted else 0):
            for storage in cache._layers[layer]:
                storage[row.pages[at // cache.page_size], at % cache.page_size] = 0
    return draft


def exit_changed_in_mid_round(split, cache, rows, tokens, exit_layer, choose, tapped=()):
    """Drafted one layer earlier than verification carries on."""
    return draft_by_exit(split, cache, rows, tokens, max(1, exit_layer - 1), choose, ())


def one_refused_is_kept(drafted, picks, honest=num_accepted):
    return min(len(drafted), honest(drafted, picks) + 1)


def noise_by_place_in_the_batch(self, logits, samplings, positions, *more, honest=Picker.__call__, **named):
    return honest(self, logits, samplings, [at + i for i, at in enumerate(positions)], *more, **named)


def penalties_without_drafted_tokens(lengths):
    return [[] for drafted in lengths for _ in range(drafted + 1)]


def the_prompt_is_output_to_penalties(self, texts, *more, honest=Penalties.__init__):
    honest(self, [text._replace(num_prompt_tokens=0) for text in texts], *more)


def repeated_tokens_by_those_before_the_last(self, text, end, size, honest=Penalties._repeating):
    return honest(self, text, (end - 1).clamp(min=size), size)


EAGER = [
    (eager, "draft_by_exit", last_early_pass_skipped),
    (eager, "draft_by_exit", exit_changed_in_mid_round),
    (eager, "num_accepted", one_refused_is_kept),
    (Picker, "__call__", noise_by_place_in_the_batch),
    (eager, "paths_to", penalties_without_drafted_tokens),
    (Penalties, "__init__", the_prompt_is_output_to_penalties),
    (Penalties, "_repeating", repeated_tokens_by_those_before_the_last),
]


@pytest.mark.parametrize(("owner", "name", "fault"), EAGER, ids=[fault.__name__ for *_, fault in EAGER])
def test_faults_of_the_eager_executor_are_noticed(monkeypatch, owner, name, fault):
    assert passes("eager")
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, ValueError)):  # a grammar refuses wrong tokens
        check("eager")


# ---------------------------------------------------------------------------------------------- the compiled executor


OF_DRAFTS = {"indices do not get new tokens", "any lookup is worth it"}  # which change what is drafted, and no token


def check_rounds_of_two_executors():
    for make in (
        Together,
        partial(programs, 0, copies=False, eager=0.0),
        partial(programs, 1, copies=False, eager=0.0),
    ):
        check_same_rounds(make, some_params(3, 30, [False, True, True]))


@pytest.fixture(scope="module")
def without_a_fault(faulty):
    with compiled_by(faulty, None):
        check("cpu")
        check_rounds_of_two_executors()


@pytest.mark.parametrize("fault", NAMES)
def test_faults_of_the_compiled_executor_are_noticed(faulty, without_a_fault, fault):
    with compiled_by(faulty, fault), pytest.raises((AssertionError, ValueError)):  # a grammar refuses wrong tokens
        if fault in OF_DRAFTS:
            check_rounds_of_two_executors()
        else:
            check("cpu")


# ---------------------------------------------------------------------------------------------------- recorded rounds


def noise_of_the_position_before(state, pages, page_size, width, *more, honest=REFERENCE.prepare):
    done = honest(state, pages, page_size, width, *more)
    sampling = done.verify.sampling
    moved = sampling._replace(positions=sampling.positions - int(width > 1))
    return done._replace(verify=done.verify._replace(sampling=moved))


def temperatures_of_other_rows(self, rows, *more, honest=RoundInputs.fill):
    other = [*rows[1:], *rows[:1]]
    pairs = zip(rows, other, strict=True)
    honest(self, [row._replace(temperature=one.temperature, seed=one.seed) for row, one in pairs], *more)


def an_exit_too_early(self, *given, honest=WholeRound._draft):
    key = self.key
    self.key = key._replace(exit_layer=max(1, key.exit_layer - 1))
    try:
        return honest(self, *given)
    finally:
        self.key = key


def one_token_too_many(state, fed, picks, starts, counts, *more, honest=REFERENCE.accept):
    """What is drafted first is never refused."""
    at = starts.long()
    first = torch.where(counts > 1, fed[(at + 1).clamp(max=len(fed) - 1)], picks[at])
    return honest(state, fed, picks.scatter(0, at, first), starts, counts, *more)


RECORDED = [
    (None, "prepare", noise_of_the_position_before),
    (RoundInputs, "fill", temperatures_of_other_rows),
    (WholeRound, "_draft", an_exit_too_early),
    (None, "accept", one_token_too_many),
]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    RECORDED,
    ids=[fault.__name__ for *_, fault in RECORDED],
)
def test_faults_of_recorded_rounds_are_noticed(monkeypatch, owner, name, fault):
    assert passes("cuda")
    kernels = REFERENCE._replace(**{name: fault}) if owner is None else REFERENCE
    if owner is not None:
        monkeypatch.setattr(owner, name, fault)
    made = with_runner(new_target("eager"), kernels=kernels)
    with pytest.raises(AssertionError):
        check("cuda", made)
