"""Every family's layers and heads run on a device without a copy from the host, in the dtypes that kernels accept.

On the processor such a copy is invisible: the host's memory is the device's. On the meta device it is not. A copy from
the host inside a recording fails on CUDA, since the memory it comes from is not pinned.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec import SamplingParams
from selfspec.control.plan import Policy
from selfspec.core import LOOKUP, Plan
from selfspec.executors.cuda.rounds import RecordedRounds, RoundInputs, RoundKey, StaticRows, WholeRound
from selfspec.kernels.layout import Accepted
from selfspec.kernels.suite import REFERENCE
from selfspec.model import views
from selfspec.model.draft_vocabulary import HeldSubset
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel
from tests.cuda.standin import with_runner
from tests.cuda.transfers import counted
from tests.helpers import engine_of, make_prompts, request
from tests.kernels.samples import layout_of
from tests.models import FAMILIES, GROUPED, SMALL, build
from tests.slow import KINDS, slow
from tests.target import Target


class NoHostCopies(TorchDispatchMode):
    """Raises where memory of the host enters an operation of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        made = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
        hosts = [one for one in given if not one.is_meta]
        if not hosts or not any(one.is_meta for one in (*given, *made)):
            return out
        # A number of the host beside tensors of the device is handed to the kernel by value.
        by_value = len(hosts) < len(given) and not any(one.dim() for one in hosts) and "copy" not in str(func)
        if not by_value:
            raise AssertionError(f"{func} reads memory of the host")
        return out


@pytest.fixture
def meta_is_served(monkeypatch):
    """A model without weights is refused where tokens are asked of it; here nothing but its operations is looked at."""
    monkeypatch.setattr(views, "refuse_unsplittable", lambda model: None)


def on_meta(family, dtype):
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
        return SplitModel(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())


CASES = [slow(family, torch.float32) for family in FAMILIES if family not in GROUPED]
CASES += [(one, torch.bfloat16) if one in KINDS else slow(one, torch.bfloat16) for one in FAMILIES]


@pytest.mark.usefixtures("meta_is_served")
@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.inference_mode()
def test_layers_and_heads_copy_nothing_from_the_host(family, dtype):
    split = on_meta(family, dtype)
    cache = PagedCache(4, 16)
    for start, stop in ((0, 2), (2, 4)):
        given = torch.zeros(4, dtype=torch.int64, device="meta")
        if start:
            given = torch.zeros(4, SMALL["hidden_size"], dtype=dtype, device="meta")
        rows = StaticRows(cache, layout_of([(5, 2), (0, 2)], 16, device="meta")[0], REFERENCE)
        hidden = split.run(rows, start, stop, given)  # makes what is made once
        with NoHostCopies():
            hidden = split.run(StaticRows(cache, rows.layout, REFERENCE), start, stop, given)
            logits = split.logits(hidden, stop)
    assert logits.is_meta and logits.shape == (4, SMALL["vocab_size"])


def pick_on_device(logits, sampling, names=None):
    """In place of the reference, which reads numbers on the host."""
    return logits.argmax(-1), logits.amax(-1)


def accept_on_device(state, fed, picks, starts, counts, most_new):
    return Accepted(torch.empty_like(counts), fed.new_empty(len(counts), 3 + 2 * most_new))


@pytest.mark.usefixtures("meta_is_served")
@pytest.mark.parametrize("has_part", [True, False])
@torch.inference_mode()
def test_a_round_copies_nothing_from_the_host(has_part):
    """Drafts over a part of the vocabulary, too."""
    split = on_meta("llama", torch.float32)
    cache = PagedCache(4, 16)
    part = HeldSubset(split.draft_subset(20)) if has_part else None
    key = RoundKey(1, 3, 2, 32, True, 20 * has_part)
    kernels = REFERENCE._replace(pick=pick_on_device, accept=accept_on_device)
    body = WholeRound(split, cache, kernels, RoundInputs(key, cache, split.device, part))
    body()
    with NoHostCopies():
        record, *states = body()
    assert record.is_meta and len(record) == 2 and len(states) == split.num_layers


@pytest.mark.parametrize("inference", [True, False])
def test_a_copy_from_the_host_is_seen(inference):
    with torch.inference_mode(inference):
        check_that_copies_are_seen()


def check_that_copies_are_seen():
    with NoHostCopies():
        assert (torch.zeros(2, device="meta") * torch.tensor(2.0)).is_meta
    with pytest.raises(AssertionError, match="reads memory of the host"), NoHostCopies():
        torch.zeros(()).to("meta")
    with pytest.raises(AssertionError, match="reads memory of the host"), NoHostCopies():
        torch.zeros(2, device="meta").copy_(torch.zeros(2))


# ------------------------------------------------------------------------------------- what a round exchanges


class Rounds(Policy):
    """Programs of some rounds, the first one of a single round."""

    def __init__(self, plan, num_rounds):
        self.made, self.num_rounds, self.is_first = plan, num_rounds, True

    def plan(self, rows):
        count, self.is_first = 1 if self.is_first else self.num_rounds, False
        return replace(self.made, draft_lengths=self.made.draft_lengths * len(rows), num_rounds=count)


PLANS = {
    "plain": Plan(None, (0,)),
    "fixed": Plan(2, (2,)),
    "confidence": Plan(1, (3,), keep_confidence=True),
    "a part of the vocabulary": Plan(2, (2,), draft_vocab=40),
    "lookup": Plan(LOOKUP, (3,)),
}


def running(plan, count, num_rounds, max_tokens=110, **options):
    """An engine whose rows have run one round, from a recording that has room for their ends."""
    target = with_runner(Target(build("llama"), backend="views"), max_rows=options.pop("max_rows", 32))
    engine = engine_of(
        target, Rounds(plan, num_rounds), max_num_seqs=count, max_num_cached_tokens=count * 128, page_size=16,
        prefill_chunk=4096, max_step_seconds=math.inf,
    )  # fmt: skip
    for i, prompt in enumerate(make_prompts([5 + i % 7 for i in range(count)])):
        sampled = {"temperature": 0.9, "seed": i} if i % 2 else {}
        params = SamplingParams(**sampled, max_tokens=max_tokens)
        engine.add_request(str(i), request(prompt, params, **options))
    engine.step()
    return engine, target.split.runner.graphs.capture


def rounds_of(engine):
    """The rounds of a step."""
    rounds = []
    engine.step(rounds.append)
    return rounds


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("plain", 1),
        slow("plain", 32),
        slow("fixed", 17),
        ("confidence", 3),
        ("lookup", 2),
        ("a part of the vocabulary", 2),
    ],
)
def test_a_program_uploads_its_rows_once_and_a_round_copies_its_record_alone(name, count):
    plan = PLANS[name]
    engine, tape = running(plan, count, 4)
    for _ in range(3 if name == "lookup" else 0):  # records rounds with a match, and without
        engine.step()
    with counted(tape) as exchange:
        num_rounds = sum(len(rounds_of(engine)) for _ in range(2))
    assert num_rounds == 8
    assert exchange.counts["replays"] == exchange.counts["downloads"] == num_rounds
    assert exchange.counts["waits"] == 0
    # Rows are uploaded anew for a draft by lookup, and after it; other rounds follow one another on the device.
    assert exchange.counts["uploads"] == 2 or (name == "lookup" and 2 < exchange.counts["uploads"] < num_rounds)


def test_rows_that_text_may_end_are_uploaded_every_round():
    engine, tape = running(Plan(2, (2,)), 2, 4, stopping_criteria=(lambda ids, scores: False,))
    with counted(tape) as exchange:
        num_rounds = len(rounds_of(engine))
    assert exchange.counts["replays"] == exchange.counts["downloads"] == exchange.counts["uploads"] == num_rounds
    assert exchange.counts["waits"] == 0


def test_the_host_reads_a_record_while_the_device_runs_the_next_round(monkeypatch):
    engine, _ = running(Plan(2, (2,)), 2, 4)
    done, launch, take = [], RecordedRounds.launch, RecordedRounds.take
    monkeypatch.setattr(RecordedRounds, "launch", lambda self: done.append("launch") or launch(self))
    monkeypatch.setattr(RecordedRounds, "take", lambda self: done.append("take") or take(self))
    engine.step()
    assert done == ["launch", "launch", "take", "launch", "take", "launch", "take", "take"]


def test_waits_and_copies_that_block_are_seen():
    engine, tape = running(Plan(None, (0,)), 1, 2)
    record = tape.made[0].outputs[0]
    with counted(tape) as exchange, torch.inference_mode():
        for wait in (record.tolist, record[0, 0].item, record.nonzero):
            before = exchange.counts["waits"]
            wait()
            assert exchange.counts["waits"] > before
        with pytest.raises(AssertionError, match="blocks"):
            torch.ones(record[0].shape).copy_(record[0])
        with pytest.raises(AssertionError, match="memory of the host"):
            record + torch.ones(record.shape)
    assert engine.has_unfinished_requests()
