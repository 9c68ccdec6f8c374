"""What must hold on a CUDA device (`pytest -m gpu`), each also run here by stand-ins, so that the tests are tested.

The kernels themselves are compared with their twins in `test_kernels.py`.
"""

from __future__ import annotations

import math

import pytest
import torch

from selfspec import SamplingParams
from selfspec.control.plan import ShadowPlan
from selfspec.core import LOOKUP, Plan
from selfspec.executors.cuda.rounds import RoundRow
from selfspec.model.attention import Reach
from selfspec.model.attention_backends import importable
from selfspec.model.kv_cache import PackedRows, Span
from tests.cuda.standin import with_runner
from tests.helpers import Always, Run, Schedule, decode, engine_of, make_prompts, tokens_of
from tests.model.test_backends import check, packed_call
from tests.models import FAMILIES, GROUPED, build
from tests.target import Target

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 2}, {"temperature": 1.0, "top_p": 0.9, "seed": 3})
HALF = {"cpu": torch.float32, "cuda": torch.bfloat16}
CALLS = (  # (row, first position, tokens)
    [(0, 0, 30), (1, 0, 50), (2, 0, 10)],
    [(0, 30, 5), (2, 10, 1)],
    [(1, 50, 3)],
    [(0, 35, 1), (1, 53, 2)],
)
on_places = pytest.mark.parametrize("place", PLACES)


def targets(family, place, dtype=torch.float32):
    """The same model, decoded from recordings and eagerly."""
    model = build(family).to(place, dtype)
    recorded, eager = Target(model), Target(model, graphs=False)
    if place == "cpu":
        with_runner(recorded)
    assert recorded.split.runner is not None and eager.split.runner is None
    return recorded, eager


@pytest.mark.parametrize(
    ("place", "family"), [("cpu", "llama"), *(pytest.param("cuda", one, marks=pytest.mark.gpu) for one in FAMILIES)]
)
def test_speculation_from_recordings_is_plain_decoding(place, family):
    recorded, eager = targets(family, place)
    prompts = make_prompts([5, 23, 40])
    params = [SamplingParams(max_tokens=24, **one) for one in SAMPLINGS]
    plain = tokens_of(decode(eager, prompts, "plain", params))
    for target in (recorded, eager):
        assert tokens_of(decode(target, prompts, Schedule(1, 4), params, page_size=64)) == plain
    # In float32 torch groups the products of experts on the host, which no graph can hold.
    assert recorded.split.runner.refused == ("aten._grouped_mm.default" if family in GROUPED else None)


@on_places
@pytest.mark.parametrize(("exit_layer", "longest", "least"), [(None, 0, 0.0), (2, 3, 0.0), (1, 5, 0.3)])
def test_programs_of_several_rounds_are_plain_decoding(place, exit_layer, longest, least):
    recorded, eager = targets("llama", place)
    prompts = make_prompts([5, 23, 40])
    params = [SamplingParams(max_tokens=n, **one) for n, one in zip((24, 9, 31), SAMPLINGS, strict=True)]
    plain = tokens_of(decode(eager, prompts, "plain", params))
    policy = Always(exit_layer, longest, least, num_rounds=99)
    assert tokens_of(decode(recorded, prompts, policy, params, page_size=64, max_step_seconds=math.inf)) == plain


def fix_routes(model):
    """Make the routers of a mixture of experts choose the same experts for every token.

    Two ways to run the same layers round differently in half precision, and a token whose experts are nearly tied is
    then sent to other experts, which gives other numbers altogether. Only the experts that are not chosen are moved, so
    the shares of those that are still depend on the token, and every position can be compared. That recordings follow
    a router's choice is seen in float32, by `test_speculation_from_recordings_is_plain_decoding`.
    """
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "top_k") and isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                module.bias[module.top_k :] -= 20  # several times what the router's products differ by


def layer_outputs(split, place):
    """What half of the layers and all of them make of `CALLS`, `[2, tokens, hidden]`; from recordings where there are.

    The first call is a prompt, which no recording reads.
    """
    made, layers = [], split.num_layers // 2
    with torch.inference_mode():
        cache = split.new_cache(8, 64)
        pages = [cache.reserve(128) for _ in range(3)]
        tokens = torch.arange(90, device=place) % 90 + 3
        for at, call in enumerate(CALLS):
            lengths = [count for _, _, count in call]
            if at and split.runner is not None:
                fed = tokens[: sum(lengths)].split(lengths)
                rows = [
                    RoundRow(
                        pages[row], first + 1, int(own[0]), 99, (), count - 1, own[1:].tolist(), 0.0, 0, 1.0, 0.0, 0
                    )
                    for own, (row, first, count) in zip(fed, call, strict=True)
                ]
                plan = Plan(LOOKUP, (0,), shadow=ShadowPlan((layers,), (0,), 1))
                rounds = split.runner.begin(cache, rows, plan)
                states = rounds.launch(range(len(rows)), [layers])
                rounds.take()
                made.append(torch.cat([states[:, i, :count] for i, count in enumerate(lengths)], 1)[[1, 0]])
                continue
            rows, taps = PackedRows(cache, [Span(pages[row], *own) for row, *own in call], place), {layers: None}
            last = split.run(rows, 0, split.num_layers, tokens[: rows.num_tokens], taps)
            made.append(torch.stack([taps[layers], last]))
    return torch.cat(made, 1).float()


def assert_same_layers(got, wanted, dtype):
    exact = dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-3 if exact else 0.1, atol=1e-4 if exact else 0.1)


@on_places
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_layers_from_a_recording_are_layers_run_eagerly(place, family):
    dtype = torch.bfloat16 if family in GROUPED else HALF[place]
    recorded, eager = targets(family, place, dtype)
    recorded.split.compiled = eager.split.compiled = None
    fix_routes(eager.model)  # both targets', which have one model
    assert_same_layers(layer_outputs(recorded.split, place), layer_outputs(eager.split, place), dtype)
    assert recorded.split.runner.graphs.num_recorded >= 3


@on_places
@pytest.mark.parametrize("reach", [Reach(None, None), Reach(9, None)])
def test_every_importable_backend_keeps_the_contract(place, reach):
    for backend in importable(place).values():
        for page_size in (64, 256):
            rows = [(300, 3), (0, 1), (20, 34), (64, 1)]
            packed, *tensors = packed_call(rows, page_size, 8, 2, 64, HALF[place], 0)
            rows_here = PackedRows(packed.cache, packed.spans, place)
            check(backend, (rows_here, *(one.to(place) for one in tensors)), reach)


@on_places
def test_not_a_number_in_rejected_slots_changes_nothing(place):
    recorded, eager = targets("llama", place)
    prompts = make_prompts([5, 23])
    params = SamplingParams(max_tokens=20)
    wanted = tokens_of(decode(eager, prompts, "plain", params))
    made = Run(engine_of(recorded, Schedule(4, 4), max_num_seqs=2, max_num_cached_tokens=256, page_size=64))
    for prompt in prompts:
        made.add(prompt, params)
    engine, example = made.engine, torch.ones(1, 2, 8, device=place)
    while engine.has_unfinished_requests():
        made.step()
        with torch.inference_mode():
            for row in [row for row in engine.running if row.is_prefilled]:
                for position in range(row.num_cached, 64 * len(row.pages)):
                    for layer in range(4):
                        for pages in engine.cache.layer(layer, example, example):
                            pages[row.pages[position // 64], position % 64] = float("nan")
    assert tokens_of(made.outputs) == wanted


@on_places
def test_a_second_call_records_nothing(place):
    recorded, _ = targets("llama", place)
    prompts = make_prompts([5, 23])
    first = recorded.generate(prompts, exit_layer=2, num_speculative_tokens=3, max_tokens=16)
    count = recorded.split.runner.graphs.num_recorded
    again = recorded.generate(prompts, exit_layer=2, num_speculative_tokens=3, max_tokens=16)
    assert tokens_of(again) == tokens_of(first)
    assert recorded.split.runner.graphs.num_recorded == count > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backend_is_chosen_by_measurement_and_named(dtype):
    target = Target(build("llama").to("cuda", dtype))
    assert target.attention_backend in set(importable("cuda")) - {"reference"}
    for name in importable("cuda"):
        assert Target(build("llama").to("cuda", dtype), attention=name, graphs=False).attention_backend == name


@pytest.mark.gpu
def test_memory_that_recordings_keep_is_counted():
    recorded, _ = targets("llama", "cuda", torch.bfloat16)
    recorded.generate(make_prompts([5, 23]), exit_layer=2, num_speculative_tokens=3, max_tokens=16)
    graphs = recorded.split.runner.graphs
    assert 0 < graphs.num_bytes < graphs.budget
