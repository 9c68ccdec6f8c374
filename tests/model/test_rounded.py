"""Copies in 4 bits: products near the real ones, bits of a row its own, drafts that change no token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import SamplingParams
from selfspec.control.published.layerskip import Fixed
from selfspec.executors.cpu.packed import PackedInt4
from selfspec.kernels.large_pages import LargePageAllocator
from tests.helpers import Adversary, generate, make_prompts, run, tokens_of
from tests.model.test_packed import multiply, weights
from tests.models import build
from tests.target import Target, load

RAGGED = (12, 7, 1, 20)
GROUP = 32  # inputs whose weights share a scale, and whose activations do


def in_whole_numbers(x, weight):
    """What 4 bits make of a product, worked out in int64 and float64."""
    pad = -x.shape[1] % GROUP
    x, weight = (torch.nn.functional.pad(each, (0, pad)) for each in (x, weight))
    by = weight.view(len(weight), -1, GROUP)
    far = by.gather(2, by.abs().argmax(2, keepdim=True))  # the largest of a group, with its sign
    shares = [1 - 0.1 * step for step in range(4)]
    tried = torch.stack([scale for share in shares for scale in (far * (-share / 8), far.abs() * (share / 7))])
    inverse = torch.where(tried == 0, 0, 1 / tried)
    whole = (by * inverse).round().clamp(-8, 7)
    best = (by - whole * tried).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    scale = tried.gather(0, best)[0].half().float()
    numbers_of = (by / scale.where(scale != 0, 1)).round().clamp(-8, 7).to(torch.int64)
    groups = x.view(len(x), -1, GROUP)
    own = groups.abs().amax(2) / 127
    numbers = (groups / own.where(own > 0, 1)[:, :, None]).round().to(torch.int64)
    sums = torch.einsum("tgi,ogi->tog", numbers, numbers_of).double()
    return (sums * own[:, None].double() * scale[None, :, :, 0].double()).sum(2)


@given(
    outputs=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    inputs=st.integers(1, 200),
    rows=st.integers(1, 11),
    threads=st.integers(1, 3),
    biased=st.booleans(),
    zeros=st.booleans(),
)
def test_products_are_those_of_rounded_numbers_and_a_rows_bits_its_own(outputs, inputs, rows, threads, biased, zeros):
    parts = weights(*((out, inputs) for out in outputs), biased=biased)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    x[:, inputs // 2] *= 100  # a group's scale is its own
    if zeros:
        x[0] = 0
        parts[0].weight[0] = 0
    packed = PackedInt4(parts, LargePageAllocator())
    got = multiply(packed, x, threads)
    weight = torch.cat([part.weight for part in parts])
    wanted = in_whole_numbers(x, weight)
    if biased:
        wanted += torch.cat([part.bias for part in parts]).double()
    # a number halfway between two whole ones may be rounded to either, and of two scales as good each be taken
    most = x.abs().amax(1, keepdim=True) * weight.abs().amax(1) * 2e-1 + 1e-4
    assert ((got - wanted).abs() <= most).all() and ((got - wanted).abs() <= 1e-4).float().mean() > 0.9
    assert torch.equal(got, torch.cat([multiply(packed, row) for row in x.split(1)]))


@pytest.mark.parametrize("rows", [1, 9])
def test_products_too_large_for_a_cores_cache_are_those_of_rounded_numbers_too(rows):
    [part] = parts = weights((5000, 250))  # more than 512 KiB in 4 bits: prefetched
    x = torch.randn(rows, 250, generator=torch.Generator().manual_seed(3))
    got = multiply(PackedInt4(parts, LargePageAllocator()), x, 2)
    assert ((got - in_whole_numbers(x, part.weight)).abs() <= 1e-4).float().mean() > 0.98
    few = [PackedInt4([part._replace(weight=weight)], LargePageAllocator()) for weight in part.weight.split(500)]
    assert torch.equal(got, torch.cat([multiply(one, x) for one in few], 1))


@pytest.mark.parametrize(("family", "engine"), [("qwen3", "compiled"), ("gemma3_text", "compiled"), ("llama", "views")])
def test_output_is_that_of_generate(family, engine):
    target, prompts = Target(build(family), backend=engine), make_prompts(RAGGED)
    done = target.generate(prompts, policy=Fixed(2, 4, draft_bits=4), max_tokens=24)
    assert tokens_of(done) == [generate(target.model, prompt, 24) for prompt in prompts]
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.8]))
def test_no_plan_changes_a_token(seed, temperature):
    target, prompts = Target(build("llama"), backend="compiled"), make_prompts(RAGGED)
    options = {"max_tokens": 16, "temperature": temperature, "seed": 3}
    plain = target.generate(prompts, policy="plain", **options)
    drafted = target.generate(prompts, policy=Adversary(seed, 4, eager=0.0), **options)
    assert tokens_of(drafted) == tokens_of(plain)


def drafts_of(target, draft_bits, lengths=RAGGED, **options):
    policy = Fixed(2, 4, draft_bits=draft_bits, **options)
    rounds = run(target, make_prompts(lengths), policy, SamplingParams(max_tokens=16)).rounds
    return [(row.seq_id, row.drafted, row.num_accepted) for round_ in rounds for row in round_.rows]


def test_edited_weights_are_rounded_anew():
    model = build("llama")
    target = Target(model, backend="compiled")
    before = drafts_of(target, 4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * weight.std())
    edited = drafts_of(target, 4)
    assert edited == drafts_of(Target(model, backend="compiled"), 4) != before


def test_copies_of_a_trained_model_are_nearly_as_often_right_as_its_layers():
    target = load("demo", backend="compiled")
    prompts = ["def main(argv):\n    parser =", "class Node:\n    def __init__(self", "import os\n\n\ndef read("]
    done = {bits: target.generate(prompts, policy=Fixed(4, 4, draft_bits=bits), max_tokens=64) for bits in (None, 4)}
    layers, copies = (sum(c.stats.num_accepted_draft_tokens for c in done[bits]) for bits in (None, 4))
    assert tokens_of(done[4]) == tokens_of(done[None])
    assert copies > 0.9 * layers > 0


def test_copies_draft_the_likeliest_of_a_part_of_the_vocabulary():
    target = Target(build("llama"), backend="compiled")
    sizes = (None, 30, target.split.vocab_size)
    whole, part, all_of_it = (drafts_of(target, 4, RAGGED[:1], draft_vocab=size) for size in sizes)
    named = target.split.frequencies.part(30).members
    assert whole == all_of_it != part
    assert {token for _, drafted, _ in part for token in drafted} <= named


def test_other_numbers_of_bits_are_refused():
    target = Target(build("llama"))
    with pytest.raises(ValueError, match=r"^a plan's draft_bits must be 4 or None \(the layers themselves\), got 8$"):
        target.generate([[3, 4]], policy=Fixed(2, 3, draft_bits=8), max_tokens=4)
