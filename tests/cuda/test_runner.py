"""Decoding from recordings gives the tokens of decoding without them: ragged and sampled rows, every kind of plan."""

from __future__ import annotations

import logging

import pytest
import torch

from selfspec import SamplingParams
from selfspec.control.published.layerskip import Fixed
from selfspec.core import LOOKUP
from selfspec.executors.cuda.graphs import Graphs
from selfspec.executors.cuda.runner import install
from selfspec.kernels.suite import REFERENCE, pick_for, triton_kernels
from selfspec.model.exit_heads import ExitHeads
from tests.cuda.standin import runner_of, with_runner
from tests.cuda.tape import Tape
from tests.helpers import Always, Run, Schedule, decode, engine_of, make_prompts, run, tokens_of
from tests.models import build, tiny
from tests.slow import slow
from tests.target import Target


@pytest.mark.parametrize("family", ["gpt2", slow("qwen3"), slow("gemma2"), slow("opt")])
def test_views_of_other_families_can_be_recorded(family):
    prompts = make_prompts([3, 20, 11])
    wanted = decode(tiny(family), prompts, Schedule(3, 4), SamplingParams(max_tokens=12))
    target = with_runner(Target(build(family)))
    got = decode(target, prompts, Schedule(3, 4), SamplingParams(max_tokens=12))
    assert tokens_of(got) == tokens_of(wanted)
    runner = target.split.runner
    assert runner.refused is None and runner.graphs.num_recorded > 0


@pytest.mark.parametrize("family", [slow("mixtral"), slow("gpt_oss")])
def test_experts_are_recorded_in_the_dtype_that_a_graph_can_hold(family):
    prompts, params = make_prompts([3, 20, 11]), SamplingParams(max_tokens=6)
    wanted = decode(tiny(family), prompts, Schedule(3, 4), params)
    target = with_runner(Target(build(family)))
    got = decode(target, prompts, Schedule(3, 4), params)
    assert tokens_of(got) == tokens_of(wanted)
    assert target.split.runner.refused == "aten._grouped_mm.default"
    half = with_runner(Target(build(family).bfloat16()))
    decode(half, prompts, Schedule(3, 4, lookup=False), params)
    assert half.split.runner.refused is None and half.split.runner.graphs.num_recorded > 0


# ------------------------------------------------------------------------------------------------------- bookkeeping


def test_another_call_decodes_without_recording_anything_anew():
    target, prompts = with_runner(Target(build("llama"))), make_prompts([9, 17])
    first = target.generate(prompts, max_tokens=12, exit_layer=1, num_speculative_tokens=3)
    runner = target.split.runner
    recorded = runner.graphs.num_recorded
    again = target.generate(prompts, max_tokens=12, exit_layer=1, num_speculative_tokens=3)
    assert tokens_of(again) == tokens_of(first)
    assert runner.graphs.num_recorded == recorded
    assert sum(made.num_replays for made in runner.graphs.capture.made) > recorded


def test_two_engines_at_once_have_pages_of_their_own():
    target, prompts = with_runner(Target(build("llama"))), make_prompts([9, 17])
    wanted = decode(tiny("llama"), prompts, Always(1, 3), SamplingParams(max_tokens=12))
    runs = [Run(engine_of(target, Always(1, 3), max_num_cached_tokens=256, page_size=16)) for _ in prompts]
    for one, prompt in zip(runs, prompts, strict=True):
        one.add(prompt, SamplingParams(max_tokens=12))
    while any(one.engine.has_unfinished_requests() for one in runs):
        for one in runs:
            one.step()
    assert [one.output("0").token_ids for one in runs] == tokens_of(wanted)


def test_the_longest_unused_recordings_are_given_up():
    target, prompts = with_runner(Target(build("llama")), budget=7 << 19, num_bytes=1 << 20), make_prompts([9, 17])
    wanted = decode(tiny("llama"), prompts, Schedule(7, 4), SamplingParams(max_tokens=20))
    got = decode(target, prompts, Schedule(7, 4), SamplingParams(max_tokens=20))
    assert tokens_of(got) == tokens_of(wanted)
    graphs = target.split.runner.graphs
    assert len(graphs) == 3 and 3 << 20 < graphs.num_bytes < 7 << 19 and graphs.num_recorded > 3


def test_rounds_are_recorded_anew_with_new_exit_heads():
    target, prompts = with_runner(Target(build("llama"))), make_prompts([9, 17])
    before = target.generate(prompts, max_tokens=16, exit_layer=1, num_speculative_tokens=3)
    heads, dice = ExitHeads([1], 32, 4), torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=dice)
    target.exit_heads, runner = heads, target.split.runner
    recorded, kept = runner.graphs.num_recorded, len(runner.graphs)
    after = target.generate(prompts, max_tokens=16, exit_layer=1, num_speculative_tokens=3)
    assert tokens_of(after) == tokens_of(before)
    assert [one.stats for one in after] != [one.stats for one in before], "the new heads draft otherwise"
    assert runner.graphs.num_recorded > recorded and len(runner.graphs) <= kept + 2, (
        "recorded anew, in place of the old"
    )


def test_a_model_that_waits_for_numbers_is_decoded_eagerly_and_says_which(caplog):
    class Waiting(torch.nn.SiLU):
        def forward(self, hidden):
            return super().forward(hidden) if float(hidden.sum()) < 1e30 else hidden

    model, prompts = build("llama"), make_prompts([9, 17])
    model.model.layers[0].mlp.act_fn = Waiting()
    target = Target(model, backend="views")
    wanted = target.generate(prompts, max_tokens=12, exit_layer=1)
    with_runner(target)
    with caplog.at_level(logging.WARNING):
        got = target.generate(prompts, max_tokens=12, exit_layer=1)
    assert tokens_of(got) == tokens_of(wanted)
    notices = [one.message for one in caplog.records if "cannot be captured" in one.message]
    assert len(notices) == 1 and "aten.item" in notices[0]
    assert target.split.runner.refused == "aten.item.default"


# -------------------------------------------------------------------------------------------------------- installing


@pytest.mark.parametrize("problem", ["raises", "wrong"])
def test_a_runner_that_disagrees_with_the_model_is_taken_away(caplog, problem):
    def careless(queries, *given):
        if problem == "raises":
            raise RuntimeError("no kernel image is available")
        return torch.zeros_like(queries)

    split = Target(build("llama"), backend="views").split
    install(split, lambda one: runner_of(one, REFERENCE._replace(attend=careless)))
    assert split.runner is None
    assert "decoding from graphs does not serve this model here" in caplog.text


def test_a_runner_that_agrees_stays_and_there_is_none_on_the_processor():
    split = Target(build("llama"), backend="views").split
    assert split.runner is None
    install(split)
    assert split.runner is None
    install(split, runner_of)
    assert split.runner is not None and split.runner.graphs.num_recorded > 0


@pytest.mark.slow
def test_the_kernels_themselves_decode_from_recordings():
    """Triton's, in its interpreter: everything but the device."""
    pytest.importorskip("triton", reason="Triton is not installed")
    prompts = make_prompts([5, 9])
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, temperature=0.9, top_k=20, seed=7)]
    wanted = decode(tiny("llama"), prompts, Always(1, 2), params)
    target = with_runner(Target(build("llama"), backend="views"), kernels=triton_kernels())
    assert tokens_of(decode(target, prompts, Always(1, 2), params)) == tokens_of(wanted)
    assert target.split.runner.graphs.num_recorded > 0


def test_picks_made_by_the_kernel_on_a_device_are_those_of_the_ordinary_engine(monkeypatch):
    prompts, kinds = make_prompts([9, 17, 4]), ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 9})
    params = [SamplingParams(max_tokens=14, seed=i, **kind) for i, kind in enumerate(kinds)]
    wanted = decode(tiny("llama"), prompts, Schedule(3, 4), params)
    monkeypatch.setattr("selfspec.executors.picker.pick_for", lambda device: REFERENCE.pick)
    assert tokens_of(decode(tiny("llama"), prompts, Schedule(3, 4), params)) == tokens_of(wanted)
    assert pick_for(torch.device("cpu")) is None


@pytest.mark.parametrize(("exit_layer", "rows"), [slow(2, 1), (LOOKUP, 1), slow(2, 2)])
def test_drafts_that_no_recording_holds_are_cut(exit_layer, rows):
    """Not run operation by operation, which takes several times as long."""
    target = with_runner(Target(build("llama"), backend="views"))
    prompts = [[5, 6, 7, 8] * 12, [9, 8, 7] * 12][:rows]
    params = SamplingParams(max_tokens=40)
    wanted = decode(tiny("llama"), prompts, "plain", params)
    made = run(target, prompts, Always(exit_layer, 30), params, max_num_seqs=rows, max_num_cached_tokens=256)
    assert tokens_of(made.outputs) == tokens_of(wanted)
    drafted = [len(row.drafted) for one in made.rounds for row in one.rows]
    assert max(drafted) == 15 and target.split.runner.graphs.num_recorded > 0


def test_recordings_draft_over_a_part_that_is_ranked_anew_and_over_edited_heads():
    target, [prompt] = with_runner(Target(build("llama"), backend="views")), make_prompts([9])
    frequencies, runner = target.split.frequencies, target.split.runner

    def drafted():
        params = SamplingParams(max_tokens=9)
        [plain], made = (
            decode(target, [prompt], "plain", params),
            run(target, [prompt], Fixed(2, 3, draft_vocab=20), params),
        )
        assert made.output("0").token_ids == plain.token_ids
        return {token for row in made.rows("0") for token in row.drafted}

    assert drafted() <= frequencies.part(20).members
    before, recorded = frequencies.part(20).version, runner.graphs.num_recorded
    frequencies.add(list(range(70, 90)) * 50, written=True)
    later = drafted()
    assert frequencies.part(20).version > before and later <= frequencies.part(20).members == {*range(70, 90)}
    assert runner.graphs.num_recorded == recorded, "the same recordings"
    with torch.no_grad():
        target.model.lm_head.weight[75] += 9 * target.model.lm_head.weight[80]
    assert drafted() != later
    assert runner.graphs.num_recorded == recorded


class Held:
    """Inputs of a recording."""

    def __init__(self, *shared):
        self.num_bytes, self.shared = 1, shared


def test_bytes_that_several_recordings_read_count_once():
    part, buffer = Held(), torch.zeros(4)
    part.num_bytes = 1000
    graphs = Graphs(Tape(num_bytes=10), budget=1040)
    for key in range(3):
        graphs.record(key, Held(part), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3
    graphs.record(3, Held(), lambda: (buffer + 1,))
    assert graphs.num_bytes == 1033 and len(graphs) == 3, "over the budget, so that one is dropped"
