"""The suite notices what it is there for: known ways to lose losslessness are put in, and the ordinary check must fail.

The pitfalls are those that published speculative decoders have had. Each check is first run without the mutation.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from selfspec.decoding import pick, rounds, verdict
from selfspec.decoding.checked import CheckedPolicy
from selfspec.decoding.choose import Chooser
from selfspec.decoding.engine import Engine
from selfspec.decoding.process import process
from selfspec.decoding.row import Row
from selfspec.decoding.stats import SpecStats
from selfspec.decoding.stopping import Stopper
from selfspec.drafting.exit import draft_by_exit
from selfspec.kernels.gumbel import NoiseAhead, gumbel
from selfspec.target.cache import PackedRows, PagedCache, Tree
from tests import models
from tests.decoding.test_cache_audit import check_cache
from tests.decoding.test_greedy import check_ends_at_eos, check_equals_generate
from tests.decoding.test_processors import PROCESSORS, check_processors
from tests.decoding.test_sampling import check_any_arrival, check_equals_plain, check_law, tiny_vocabulary
from tests.decoding.test_trees import check_known_trees, check_seconds
from tests.helpers import Always, Schedule, decode, make_prompts

RAGGED = (12, 7, 1, 20)


# Run by its own forward: nothing that is put in here may be beyond a compiled body's sight, or crash it.
tiny = partial(models.tiny, engine="views")


def must_fail(check, monkeypatch, owner, name, mutation):
    """The check passes, and with the mutation it does not."""
    check()
    monkeypatch.setattr(owner, name, mutation)
    with pytest.raises(AssertionError):
        check()


def check_greedy(family="llama", audit=False, longest=4, seeds=3):
    for seed in range(seeds):
        prompts = make_prompts(RAGGED, seed=1)
        check_equals_generate(tiny(family), prompts, Schedule(seed, 4, longest, plain=False), 20, audit=audit)


# ---------------------------------------------------------------------------------------------------- processors


def bonus_from_raw_logits(rows, lengths, fed, logits, trees=None, honest=rounds.process_packed):
    out, at = honest(rows, lengths, fed, logits).clone(), -1
    for drafted in lengths:
        at += drafted + 1
        out[at] = logits[at]
    return out


def prefix_of_the_round_everywhere(rows, lengths, fed, logits, trees=None):
    owners = [row for row, drafted in zip(rows, lengths, strict=True) for _ in range(drafted + 1)]
    return torch.stack([process(row, [], one) for row, one in zip(owners, logits, strict=True)])


@pytest.mark.parametrize("mutation", [bonus_from_raw_logits, prefix_of_the_round_everywhere])
@pytest.mark.parametrize("name", ["a repetition penalty", "no repeated bigram"])
def test_processors_left_out_or_given_another_prefix_are_noticed(monkeypatch, mutation, name):
    check = partial(check_processors, tiny("phi"), PROCESSORS[name])
    must_fail(check, monkeypatch, rounds, "process_packed", mutation)


# ---------------------------------------------------------------------------------------------------- ends in a block


def no_cut(self, content, emitted, block, honest=Stopper.cut):
    kept, text, reason = honest(self, content, emitted, block)
    return (len(block) if reason == "eos" else kept), text, reason


def limit_of_the_round_before(self, content, emitted, block, honest=Stopper.cut):
    kept, text, reason = honest(self, content, emitted, block)
    return (len(block), text, reason) if reason == "length" else (kept, text, reason)


def test_tokens_after_an_end_of_text_in_a_block_are_noticed(monkeypatch):
    check = partial(check_ends_at_eos, policies=[Always(3, 5)])
    must_fail(check, monkeypatch, Stopper, "cut", no_cut)


class Eager(Always):
    """Drafts two tokens more than a row has room for."""

    def plan(self, rows):
        return super().plan([row._replace(room=row.room + 2) for row in rows])


def test_drafts_beyond_the_limit_are_refused():
    with pytest.raises(ValueError, match="a plan's draft_lengths must be one per row, each below its room"):
        decode(tiny("llama"), make_prompts(RAGGED), Eager(2, 4), max_new_tokens=6)


def test_a_length_limit_that_is_not_cut_is_noticed(monkeypatch):
    monkeypatch.setattr(CheckedPolicy, "_check", lambda self, plan, rows: None)

    check = partial(check_equals_generate, tiny("llama"), make_prompts([5]), Eager(3, 6), 6, audit=False)
    must_fail(check, monkeypatch, Stopper, "cut", limit_of_the_round_before)


# ----------------------------------------------------------------------------------------------- keys and values


def last_early_pass_skipped(stack, cache, rows, tokens, exit_layer, choose, tapped=(), branches=None):
    """As if the last drafted token had not been through the early layers: its early keys and values stay empty."""
    draft = draft_by_exit(stack, cache, rows, tokens, exit_layer, choose, tapped)
    for row, drafted in zip(rows, draft.lengths, strict=True):
        at = row.position + drafted
        for layer in range(exit_layer if drafted else 0):
            for storage in cache._layers[layer]:
                storage[row.pages[at // cache.page_size], at % cache.page_size] = 0
    return draft


def exit_changed_in_mid_round(stack, cache, rows, tokens, exit_layer, choose, tapped=(), branches=None):
    """Drafted one layer earlier than verification carries on."""
    return draft_by_exit(stack, cache, rows, tokens, max(1, exit_layer - 1), choose, tapped)


@pytest.mark.parametrize("mutation", [last_early_pass_skipped, exit_changed_in_mid_round])
@pytest.mark.parametrize("check", [check_greedy, partial(check_cache, tiny("llama"), Always(3, 3))])
def test_holes_between_early_and_late_layers_are_noticed(monkeypatch, mutation, check):
    must_fail(check, monkeypatch, rounds, "draft_by_exit", mutation)


def one_too_many(self, tokens, logits, scores, honest=Row.keep):
    honest(self, tokens, logits, scores)
    self.num_cached += 1


def test_counting_the_bonus_token_as_cached_is_noticed(monkeypatch):
    must_fail(partial(check_cache, tiny("llama"), Schedule(0, 4)), monkeypatch, Row, "keep", one_too_many)


def one_slot_late(self, cache, spans, device="cpu", honest=PackedRows.__init__):
    honest(self, cache, spans, device)
    if not isinstance(self._slots, slice):  # a batch: every key and value lands one slot further on
        self._slots = (self._slots + 1) % (cache.num_pages * cache.page_size)


def test_keys_written_one_slot_late_are_noticed(monkeypatch):
    must_fail(partial(check_cache, tiny("llama"), Schedule(0, 4)), monkeypatch, PackedRows, "__init__", one_slot_late)


def pages_of_another_row(self, num_tokens, honest=PagedCache.reserve):
    pages = honest(self, num_tokens)
    return pages and [0, *pages[1:]]


def test_a_page_that_two_rows_own_is_noticed(monkeypatch):
    must_fail(
        partial(check_cache, tiny("llama"), Schedule(0, 4)), monkeypatch, PagedCache, "reserve", pages_of_another_row
    )


def pages_never_freed(self, pages, written=None):
    pass


def test_leaked_pages_are_noticed(monkeypatch):
    must_fail(
        partial(check_cache, tiny("llama"), Schedule(0, 4)), monkeypatch, PagedCache, "release", pages_never_freed
    )


# ------------------------------------------------------------------------------------------------------ positions


def by_slot(self, cache, spans, device="cpu", honest=PackedRows.__init__):
    """Positions as left padding gives them: all rows of a call end at the same one."""
    honest(self, cache, spans, device)
    end = max(span.start + span.length for span in spans)
    shift = [end - span.start - span.length for span in spans for _ in range(span.length)]
    self.positions = (self.positions + torch.tensor([shift])).clamp(max=127)


def second_row_shifted(self, cache, spans, device="cpu", honest=PackedRows.__init__):
    honest(self, cache, spans, device)
    if len(spans) > 1:
        self.positions = self.positions.clone()
        self.positions[0, spans[0].length : spans[0].length + spans[1].length] += 1


@pytest.mark.parametrize("mutation", [by_slot, second_row_shifted])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_positions_by_slot_are_noticed(monkeypatch, mutation, family):
    must_fail(partial(check_greedy, family), monkeypatch, PackedRows, "__init__", mutation)


@pytest.mark.parametrize("mutation", [by_slot, second_row_shifted])
def test_keys_turned_by_another_position_are_noticed_in_the_cache(monkeypatch, mutation):
    must_fail(partial(check_cache, tiny("llama"), Schedule(0, 4)), monkeypatch, PackedRows, "__init__", mutation)


# -------------------------------------------------------------------------------------------------- finished rows


def finished_rows_stay(self, honest=Engine.step):
    before = list(self.rows)
    round_ = honest(self)
    late = [row for row in before if row not in self.rows and row.stats.num_generated_tokens < 30]
    for row in late:  # decoded once more, as if they had not ended
        row.finish_reason = None
        row.stopper.max_new_tokens += 1
    self.rows += late
    return round_


def check_rounds_add_up():
    decode(tiny("llama"), make_prompts(RAGGED), Schedule(0, 4), max_new_tokens=[3, 5, 12, 20])


def test_rows_that_are_decoded_after_their_end_are_noticed(monkeypatch):
    def release(self, pages, written=None):
        self._free.extend(set(pages) - set(self._free))

    monkeypatch.setattr(PagedCache, "release", release)
    must_fail(check_rounds_add_up, monkeypatch, Engine, "step", finished_rows_stay)


def cut_tokens_counted(self, row, verdict, honest=Engine._apply):
    """A step that an end cut short counts all that verification accepted."""
    count = SpecStats.add_round
    SpecStats.add_round = lambda self, drafted, accepted, *rest: count(self, drafted, verdict.accepted, *rest)
    try:
        return honest(self, row, verdict)
    finally:
        SpecStats.add_round = count


def columns_beyond_the_first_rejection(self, drafted, accepted, emitted, beside=0, honest=SpecStats.add_round):
    honest(self, drafted, min(drafted, accepted + (drafted > accepted)), emitted, beside)


def test_statistics_polluted_by_what_was_cut_are_noticed(monkeypatch):
    check = partial(check_ends_at_eos, policies=[Always(3, 5)])
    must_fail(check, monkeypatch, Engine, "_apply", cut_tokens_counted)


def test_statistics_polluted_by_rejected_columns_are_noticed(monkeypatch):
    must_fail(check_rounds_add_up, monkeypatch, SpecStats, "add_round", columns_beyond_the_first_rejection)


# ------------------------------------------------------------------------------------------------------- sampling


def noise_by_place_in_the_batch(self, seeds, positions, vocab_size):
    return gumbel(torch.tensor(seeds) + torch.arange(len(seeds)), positions, vocab_size)


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_any_arrival(tiny("llama"), 0),
        lambda: check_equals_plain(
            tiny("llama"), make_prompts(RAGGED), Schedule(0, 4), max_new_tokens=12, temperature=1.0, seed=[0, 1, 2, 3]
        ),
    ],
    ids=["arrivals", "batches"],
)
def test_noise_that_depends_on_the_batch_is_noticed(monkeypatch, check):
    must_fail(check, monkeypatch, NoiseAhead, "__call__", noise_by_place_in_the_batch)


def the_same_noise_at_every_position(self, seeds, positions, vocab_size):
    return gumbel(torch.tensor(seeds), torch.zeros_like(positions), vocab_size)


def a_little_too_hot(logits, sampling, honest=pick.filtered):
    return honest(logits, sampling) / 1.25


def test_the_same_noise_at_every_position_breaks_the_joint_law(monkeypatch):
    check = partial(check_law, tiny_vocabulary("views"), {"temperature": 1.0}, num_tokens=2, draws=1500)
    must_fail(check, monkeypatch, NoiseAhead, "__call__", the_same_noise_at_every_position)


def test_a_temperature_that_is_a_quarter_off_breaks_the_law(monkeypatch):
    check = partial(check_law, tiny_vocabulary("views"), {"temperature": 1.0}, num_tokens=2, draws=3000)
    must_fail(check, monkeypatch, pick, "filtered", a_little_too_hot)


def withdraw_the_unsure(self, hidden, members, step, honest=Chooser.__call__):
    """Replaces every token that was drafted without confidence."""
    picks, going = honest(self, hidden, members, step)
    unsure = self._stack.logits(hidden, self._plan.exit_layer).softmax(-1).amax(-1) < 0.5
    return picks.masked_fill(unsure, 0), going


def test_a_draft_that_is_tampered_with_changes_no_token(monkeypatch):
    """No mutation of the draft alone can be seen in the output: it is verified."""
    monkeypatch.setattr(Chooser, "__call__", withdraw_the_unsure)
    check_greedy()
    check_equals_plain(tiny("llama"), make_prompts(RAGGED), Schedule(0, 4), max_new_tokens=12, temperature=1.0)


# -------------------------------------------------------------------------------------------------------------- trees


def sees_its_neighbours(self):
    return np.tri(len(self.parents), dtype=bool)


def stands_at_its_place(self):
    return list(range(len(self.parents)))


def left_where_they_are(cache, rows, verdicts):
    pass


def any_child_will_do(tree, guesses, picks, honest=verdict.walk):
    path = honest(tree, guesses, picks)
    return next(
        ([*path, node] for node in range(path[-1] + 1, len(tree.parents)) if tree.parents[node] == path[-1]), path
    )


@pytest.mark.parametrize(
    ("owner", "name", "mutation"),
    [
        (Tree, "ancestors", sees_its_neighbours),
        (Tree, "depths", stands_at_its_place),
        (rounds, "settle", left_where_they_are),
        (rounds, "walk", any_child_will_do),
    ],
    ids=["sees its neighbours", "stands at its place", "left where they are", "any child will do"],
)
@pytest.mark.parametrize("check", [check_known_trees, check_seconds])
def test_trees_taken_for_chains_are_noticed(monkeypatch, check, owner, name, mutation):
    must_fail(partial(check, "llama", target=tiny("llama")), monkeypatch, owner, name, mutation)
