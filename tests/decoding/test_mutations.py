"""The suite notices what it is there for: known ways to lose losslessness are put in, and the ordinary check must fail.

Faults of executors are in `tests/executors/test_mutations.py`.

The pitfalls are those that published speculative decoders have had. Each check is first run without the mutation.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from selfspec.decoding.stopping import Stopper
from selfspec.executors import base, eager
from selfspec.executors.base import RoundDraft
from selfspec.executors.draft_picks import DraftPicker
from selfspec.executors.processors import process
from selfspec.kernels import pick
from selfspec.kernels.gumbel import NoiseAhead, gumbel
from selfspec.model.kv_cache import PackedRows
from selfspec.params import SamplingParams
from tests import models
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_processors import PROCESSORS, check_processors
from tests.decoding.test_sampling import check_equals_plain, check_law, tiny_vocabulary
from tests.helpers import Always, Schedule, audit_cache, decode, make_prompts

RAGGED = (12, 7, 1, 20)


# Run by its own forward: nothing that is put in here may be beyond a compiled body's sight, or crash it.
tiny = partial(models.tiny, backend="views")
pytestmark = pytest.mark.slow  # they show what the suite would notice, not what the engine does


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


def check_cache():
    """Small pages, prompts in chunks, and rows that leave one by one."""
    params = [SamplingParams(max_tokens=14 - 2 * (i % 4)) for i in range(6)]
    options = {"page_size": 64, "max_num_seqs": 4, "max_num_cached_tokens": 4 * 64, "prefill_chunk": 16}
    decode(tiny("llama"), make_prompts((12, 7, 1, 20, 33, 2)), Schedule(0, 4), params, audit=audit_cache, **options)


# ---------------------------------------------------------------------------------------------------- processors


def bonus_from_raw_logits(rows, owners, paths, fed, logits, honest=eager.process_packed):
    out = honest(rows, owners, paths, fed, logits).clone()
    for row in set(owners):
        last = max(at for at, owner in enumerate(owners) if owner == row)
        out[last] = logits[last]
    return out


def prefix_of_the_round_everywhere(rows, owners, paths, fed, logits):
    return torch.stack([process(rows[i], [], one) for i, one in zip(owners, logits, strict=True)])


@pytest.mark.parametrize("mutation", [bonus_from_raw_logits, prefix_of_the_round_everywhere])
@pytest.mark.parametrize("name", ["a repetition penalty", "no repeated bigram"])
def test_processors_left_out_or_given_another_prefix_are_noticed(monkeypatch, mutation, name):
    check = partial(check_processors, tiny("phi"), PROCESSORS[name], seeds=3)
    must_fail(check, monkeypatch, eager, "process_packed", mutation)


# ---------------------------------------------------------------------------------------------------- ends in a block


def limit_of_the_round_before(self, content, emitted, block, honest=Stopper.cut):
    kept, text, reason = honest(self, content, emitted, block)
    return (len(block), text, reason) if reason == "length" else (kept, text, reason)


def drafts_longer_than_rows_may_be(rows, plan):
    return RoundDraft(plan)


def test_a_length_limit_that_is_not_cut_is_noticed(monkeypatch):
    monkeypatch.setattr(base, "next_draft", drafts_longer_than_rows_may_be)
    check = partial(check_equals_generate, tiny("llama"), make_prompts([5]), Always(3, 6), 6, audit=False)
    must_fail(check, monkeypatch, Stopper, "cut", limit_of_the_round_before)


# ----------------------------------------------------------------------------------------------- keys and values


def one_slot_late(self, cache, spans, device="cpu", honest=PackedRows.__init__):
    honest(self, cache, spans, device)
    if not isinstance(self._slots, slice):  # a batch: every key and value lands one slot further on
        self._slots = (self._slots + 1) % (cache.num_pages * cache.page_size)


def test_keys_written_one_slot_late_are_noticed(monkeypatch):
    must_fail(check_cache, monkeypatch, PackedRows, "__init__", one_slot_late)


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
    must_fail(check_cache, monkeypatch, PackedRows, "__init__", mutation)


# ------------------------------------------------------------------------------------------------------- sampling


def noise_by_place_in_the_batch(self, seeds, positions, vocab_size):
    return gumbel(torch.tensor(seeds) + torch.arange(len(seeds)), positions, vocab_size)


def check_sampling():
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in range(4)]
    check_equals_plain(tiny("llama"), make_prompts(RAGGED), Schedule(0, 4), params)


def test_noise_that_depends_on_the_batch_is_noticed(monkeypatch):
    must_fail(check_sampling, monkeypatch, NoiseAhead, "__call__", noise_by_place_in_the_batch)


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


def withdraw_the_unsure(self, hidden, members, step, honest=DraftPicker.__call__):
    """Replaces every token that was drafted without confidence."""
    picks, going = honest(self, hidden, members, step)
    unsure = self._split.logits(hidden, self._plan.exit_layer).softmax(-1).amax(-1) < 0.5
    return picks.masked_fill(unsure, 0), going


def test_a_draft_that_is_tampered_with_changes_no_token(monkeypatch):
    """No mutation of the draft alone can be seen in the output: it is verified."""
    monkeypatch.setattr(DraftPicker, "__call__", withdraw_the_unsure)
    check_greedy()
    check_sampling()
