"""Exact mode from recordings: the bits of plain decoding alone, and what is not exact on a device is found."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from selfspec.decoding.engine import Engine
from selfspec.executors.cuda.exact_body import ExactBody, with_fixed_order
from selfspec.executors.cuda.exact_views import BlockViews
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.kernels.suite import REFERENCE
from selfspec.model.stack import Stack
from tests.cuda.standin import EXACT, with_runner
from tests.cuda.test_fused_body import counting, launches, layouts
from tests.decoding.test_trees import seconds
from tests.helpers import Schedule, ShortBlocks, drain, make_prompts
from tests.models import build
from tests.slow import slow

# On CPU, products of float32 depend on their rows. Gemma 2 and the last two are run by the views.
SLOW = [
    slow(family, dtype)
    for family in ("gemma3_text", "qwen2", "gemma2", "qwen3_moe", "gpt2")
    for dtype in ("bfloat16", "float32")
]
LENGTHS = (33, 1, 17, 40)  # the prompts' wide blocks have 16 tokens
NEW = 12


@cache
def target(family, dtype):
    made = ShortBlocks(build(family).to(getattr(torch, dtype)), engine="views")
    return with_runner(made, kernels=EXACT, packing=None if made.stack.llama is None else "copy")


@cache
def alone(family, dtype, keep_logits):
    """Plain decoding of each prompt alone."""
    return [run(target(family, dtype), [prompt], "plain", 1, keep_logits, i)[0] for i, prompt in enumerate(prompts())]


def prompts():
    return make_prompts(LENGTHS)


def run(target, prompts, policy, batch, keep_logits, seed=0, chunk=512, page_size=32):
    engine = Engine(
        target,
        policy=policy,
        max_batch_size=batch,
        max_cached_tokens=96 * batch,
        prefill_chunk=chunk,
        page_size=page_size,
        exact=True,
    )
    dice, rounds = random.Random(seed), []
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, max_new_tokens=NEW, keep_logits=keep_logits, temperature=0.8, seed=seed + i)
        rounds += engine.step() if dice.random() < 0.5 else []
    done = drain(engine, before=rounds).completions
    return [done[i] for i in range(len(prompts))]


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("llama", "float32"), *SLOW])
@pytest.mark.parametrize(
    ("make", "batch", "chunk", "page_size", "keep_logits"),
    [
        (lambda: Schedule(1, 4), 3, 20, 32, False),
        (lambda: Schedule(2, 4), 4, 7, 16, True),
        (lambda: seconds(3), 2, 50, 16, True),
        (lambda: seconds(4), 2, 50, 16, False),
    ],
    ids=["rounds", "layers", "trees", "rounds without trees"],
)
def test_tokens_and_logits_are_those_of_plain_decoding_alone(family, dtype, make, batch, chunk, page_size, keep_logits):
    """Whole rounds, segments where logits are kept, and trees, which run eagerly; recorded rounds leave them out."""
    made = target(family, dtype)
    runner = made.exact_stack.runner
    assert isinstance(runner.narrow, BlockViews if made.stack.llama is None else ExactBody)
    before = runner.graphs.num_recorded
    done = run(made, prompts(), make(), batch, keep_logits, chunk=chunk, page_size=page_size)
    for one, wanted in zip(done, alone(family, dtype, keep_logits), strict=True):
        assert one.tokens == wanted.tokens
        pairs = zip(one.logits or (), wanted.logits or (), strict=True)
        assert all(torch.equal(got, other) for got, other in pairs)
    assert runner.graphs.num_recorded > before and runner.refused is None


def test_the_rounding_of_products_in_float32_depends_on_rows_here():
    """Else the tests above would prove little."""
    counts = target("llama", "float32").exact_stack.runner.narrow.row_counts.values()
    assert not any(one.is_free for one in counts)


def test_recordings_are_those_of_fused_layers_with_attention_in_a_fixed_order():
    made = target("llama", "bfloat16")
    tape = made.exact_stack.runner.graphs.capture
    before = len(tape.made)
    run(made, prompts()[:1], Schedule(4, 4), 1, False, page_size=8)
    kernels = [kernel for one in tape.made[before:] for kernel in one.kernels if kernel.startswith("attend")]
    assert kernels and all(kernel.endswith(", 16, 256)") for kernel in kernels)


WRONG = {
    "places": (lambda x: x + torch.arange(len(x))[:, None] / 64, "roundings|depend on the other tokens"),
    "few rows": (lambda x: x * (1 + (len(x) == 1) / 64), "depend on the other tokens"),
    "numbers": (lambda x: x * 1.1, "roundings"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_kernels_that_are_not_exact_here_are_found(fault, caplog):
    """The elementwise kernels are exact on CPU; here the result of one depends on what it must not depend on."""
    wrong, problem = WRONG[fault]

    def gate(gate_up, activation):
        return wrong(EXACT.gate(gate_up, activation)).to(gate_up.dtype)

    made = ShortBlocks(build("llama").to(torch.bfloat16), engine="views")
    with_runner(made, kernels=EXACT._replace(gate=gate), packing=None)
    assert isinstance(made.exact_stack.recorded, BlockViews)
    assert caplog.text.count("exact mode runs without fused layers for this model here") == 1
    assert any(part in caplog.text for part in problem.split("|"))


def test_attention_that_is_not_exact_here_leaves_the_blocks(caplog):
    made = with_runner(ShortBlocks(build("gpt2"), engine="views"), kernels=REFERENCE)
    assert made.exact_stack.runner is None and made.exact_stack.recorded is None
    assert "exact mode runs without recordings for this model here (its hidden states depend on" in caplog.text
    wanted = ShortBlocks(build("gpt2"), engine="views", graphs=False)
    pair = [one.generate([[5, 9, 4]], exact=True, max_new_tokens=4, keep_logits=True)[0] for one in (made, wanted)]
    assert all(torch.equal(got, other) for got, other in zip(*(one.logits for one in pair), strict=True))


@pytest.mark.parametrize("packing", ["copy", "none"])
def test_edits_of_weights_are_seen(packing):
    model = build("llama").to(torch.bfloat16)
    made = with_runner(ShortBlocks(model, engine="views"), kernels=EXACT, packing="copy" if packing == "copy" else None)
    how = {"exact": True, "exit_layer": 1, "max_new_tokens": 8}
    before = made.generate([[5, 9, 4]], **how)[0].tokens
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data.mul_(3.0)
    wanted = ShortBlocks(model, engine="views", graphs=False).generate([[5, 9, 4]], **how)[0].tokens
    assert made.generate([[5, 9, 4]], **how)[0].tokens == wanted != before


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_takes_ten_launches_and_padding_is_made_once(dtype):
    stack = Stack(build("llama").to(dtype))
    layout, _ = next(layouts())
    assert len(layout.rows) < 32, "there is padding"
    counts = []
    for num_layers in (1, 2):
        kernels = []
        fixed = with_fixed_order(counting(kernels))
        body = ExactBody(FusedBody(stack.llama, fixed, "copy"), fixed, 32, free=False)
        names = launches(body, layout, num_layers)
        counts.append(len(names) + len(kernels) // 2)
    assert counts[1] - counts[0] == 10 and counts[0] <= 11 + 8, "the last sum, and four padded tensors"
