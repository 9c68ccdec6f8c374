"""Traces predict drafts, and can be saved and loaded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eval.models import decode, with_policy
from eval.recording import record
from eval.replay import replay
from eval.traces import Trace, draft, draft_lengths, load, save
from selfspec.control.plan import NUM_BINS, SurvivalStop
from selfspec.control.published.layerskip import Fixed
from selfspec.core import Plan
from selfspec.params import SamplingParams
from tests.eval.models import tiny_llm
from tests.eval.replays import made_up_costs, random_trace
from tests.helpers import make_prompts


def equal(here, there):
    pairs = [(getattr(here, f.name), getattr(there, f.name)) for f in dataclasses.fields(Trace)]
    return all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f") for a, b in pairs)


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_hits_are_the_accepted_drafts_of_one_token_at_every_position(temperature):
    """Outputs of two tokens from growing prompts: one round, whose draft is the layer's pick of the first token."""
    llm, (prompt,) = tiny_llm(), make_prompts((37,))
    (done,) = decode(llm, [prompt], 40, temperature=temperature, seeds=3)
    trace = record(llm.target.split, prompt, done.token_ids, SamplingParams(temperature=temperature, seed=3))
    for e in range(1, llm.target.split.num_layers):
        accepted = []
        for i in range(len(done.token_ids)):
            rounds = []
            own = with_policy(llm, policy="fixed", exit_layer=e, num_speculative_tokens=1)
            text = [*prompt, *done.token_ids[:i]]
            decode(own, [text], 2, temperature=temperature, seeds=3, on_round=rounds.append)
            accepted.append(bool(rounds[0].rows[0].num_accepted))
        assert accepted == trace.hits[e - 1].tolist()
        assert 0 < sum(accepted) < len(accepted)


def test_confidences_after_a_wrong_token_are_recorded():
    llm, (prompt,) = tiny_llm(), make_prompts((9,))
    (done,) = decode(llm, [prompt], 30)
    trace = record(llm.target.split, prompt, done.token_ids, wrong_steps=5)
    assert trace.wrong.shape == (3, 30, 5)
    assert np.isnan(trace.wrong[trace.hits]).all()
    assert ((trace.wrong[~trace.hits] > 0) & (trace.wrong[~trace.hits] <= 1)).all()
    assert (trace.divergences >= -1e-5).all()
    assert trace.prompt_hits.shape == trace.prompt_confidences.shape == (3, 8)


def test_at_the_end_of_the_context_nothing_is_recorded_beyond_it():
    llm, (prompt,) = tiny_llm(), make_prompts((100,))
    limit = llm.target.split.context_limit
    (done,) = decode(llm, [prompt], limit)
    trace = record(llm.target.split, prompt, done.token_ids)
    assert len(trace.tokens) == limit - 100
    for i in range(len(trace.tokens)):
        known = (~np.isnan(trace.wrong[:, i])).sum(1)
        assert (known == np.where(trace.hits[:, i], 0, min(17, limit - 100 - i - 1))).all()


def test_a_cut_trace_is_the_beginning_of_the_output():
    trace = random_trace(0, 4, 20)
    short = trace.cut(7)
    assert short.tokens == trace.tokens[:7]
    assert short.hits.shape == short.confidences.shape == short.divergences.shape == (3, 7)
    assert short.wrong.shape[:2] == short.short_hits.shape == short.short_confidences.shape == (3, 7)
    assert equal(trace.cut(20), trace) and equal(trace.cut(99), trace)
    assert replay([short], Fixed(2, 3), made_up_costs(4)).num_tokens == 7


@pytest.mark.parametrize("prior", [None, {"hits": [[1.5]], "pace": {"last_plain": -3}}])
def test_saved_traces_and_statistics_are_read_back_unchanged(tmp_path, prior):
    traces = [random_trace(seed, 3, n, prompt) for seed, n, prompt in ((0, 1, 1), (1, 12, 50))]
    save(traces, tmp_path / "traces.npz", prior)
    again, beside = load(tmp_path / "traces.npz")
    assert len(again) == 2 and all(map(equal, traces, again)) and beside == prior
    assert (again[1].task, again[1].tokens) == (traces[1].task, traces[1].tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["traces.npz"]


def damaged(tmp_path):
    save([random_trace(0, 3, 50)], tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    yield b""
    yield b"no traces"
    yield whole[: len(whole) // 2]
    yield whole[:300] + bytes(40) + whole[340:]
    np.save(tmp_path / "one.npy", np.zeros(3))
    yield (tmp_path / "one.npy").read_bytes()
    np.savez(tmp_path / "other.npz", count=np.array(1), tokens=np.zeros(3))
    yield (tmp_path / "other.npz").read_bytes()
    trace = random_trace(0, 3, 50)
    save([dataclasses.replace(trace, hits=trace.hits[:, 1:])], tmp_path / "shifted.npz")
    yield (tmp_path / "shifted.npz").read_bytes()


def test_traces_of_an_earlier_format_are_refused_in_one_sentence(tmp_path):
    save([random_trace(0, 3, 50)], tmp_path / "now.npz")
    with np.load(tmp_path / "now.npz") as arrays:
        np.savez(tmp_path / "before.npz", **{name: array for name, array in arrays.items() if name != "version"})
    with pytest.raises(ValueError, match=r"before.npz': its format is 1, .* reads 6; record the outputs again$"):
        load(tmp_path / "before.npz")


def test_a_broken_file_is_refused_in_one_sentence(tmp_path):
    for content in damaged(tmp_path):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read the traces '.*broken.npz'") as caught:
            load(tmp_path / "broken.npz")
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot read the traces"):
        load(tmp_path / "nowhere.npz")


def played(trace, at, plan):
    return draft(None, trace, at, plan, draft_lengths([(trace, at)], plan)[0])


def test_drafts_beyond_the_trace_need_a_stop():
    trace = random_trace(1, 3, 60, wrong_steps=2)
    at = int(trace.hits[0].argmin())
    whole, stopped = (played(trace, at, Plan(1, (9,), min_confidence=least)) for least in (0.0, 1.0))
    assert (whole.num_drafted, whole.num_accepted) == (9, 0)  # nobody asks how sure it was
    assert (stopped.num_drafted, stopped.num_accepted) == (1, 0)
    with pytest.raises(ValueError, match="a draft continues for 8 tokens after a wrong one, beyond the trace"):
        played(trace, at, Plan(1, (9,), keep_confidence=True))


def test_a_survival_stop_ends_a_draft_after_the_token_that_makes_it_unlikely():
    trace = random_trace(2, 3, 60)
    halves = SurvivalStop((0.5,) * NUM_BINS, 0.2)
    outcome = played(trace, 0, Plan(1, (9,), stop=halves))
    assert outcome.num_drafted == len(outcome.confidences) == 3  # .5, .25, .125


def test_rows_that_draft_together_stop_together_when_their_mean_survival_does_not_pay():
    traces = [random_trace(seed, 3, 60) for seed in (2, 3)]
    halves = SurvivalStop((0.5,) * NUM_BINS, 0.2)
    places = [(trace, 0) for trace in traces]
    assert draft_lengths(places, Plan(1, (9, 9), stop=halves)) == [3, 3]
    assert draft_lengths(places, Plan(1, (1, 9), stop=halves)) == [1, 3]  # a row at its end is no longer asked
