"""Exact mode on the stand-in: the bits of plain decoding alone, and layers that are not exact here are refused."""

from __future__ import annotations

import random
from copy import copy
from functools import cache

import pytest
import torch

from selfspec import SamplingParams, SpeculativeConfig
from selfspec.decoding.engine import LLMEngine
from selfspec.errors import UnsupportedModelError
from selfspec.kernels.suite import REFERENCE
from selfspec.model.exit_heads import ExitHeads
from tests.cuda.standin import EXACT, ShortBlocks, with_runner
from tests.helpers import Run, Schedule, make_prompts, request
from tests.models import build
from tests.slow import slow
from tests.target import Target

SLOW = [slow(family, dtype) for family in ("gemma3_text", "qwen2") for dtype in ("bfloat16", "float32")]
LENGTHS = (33, 1, 17, 40)  # the prompts' wide blocks have 16 tokens
NEW = 12


@cache
def target(family, dtype):
    made = ShortBlocks(build(family).to(getattr(torch, dtype)), backend="views")
    return with_runner(made, kernels=EXACT, packing="copy")


@cache
def alone(family, dtype, keep_logits):
    """Plain decoding of each prompt alone."""
    made = enumerate(make_prompts(LENGTHS))
    return [run(target(family, dtype), [prompt], "plain", 1, keep_logits, i)[0] for i, prompt in made]


def run(target, prompts, policy, batch, keep_logits, seed=0, chunk=512, page_size=32):
    """The sequences of these prompts, which come at random steps."""
    config, longest = SpeculativeConfig(policy=policy), max(map(len, prompts)) + NEW
    engine = LLMEngine(
        target.refresh(exact=True), target.policy(config, batch, exact=True), target.defaults, max_num_seqs=batch,
        max_num_cached_tokens=(longest + -longest % page_size) * batch, prefill_chunk=chunk, page_size=page_size,
    )  # fmt: skip
    dice, made = random.Random(seed), Run(engine)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NEW, temperature=0.8, seed=seed + i)
        made.add(request(prompt, params, keep_logits=keep_logits))
        if dice.random() < 0.5:
            made.step()
    made.finish()
    return [made.sequences[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), slow("llama", "float32"), *SLOW])
@pytest.mark.parametrize(
    ("make", "batch", "chunk", "page_size", "keep_logits"),
    [
        (lambda: Schedule(1, 4), 3, 20, 32, False),
        slow(lambda: Schedule(2, 4), 4, 7, 16, True),
    ],
    ids=["rounds", "layers"],
)
def test_tokens_and_logits_are_those_of_plain_decoding_alone(family, dtype, make, batch, chunk, page_size, keep_logits):
    """By the record of rounds, and by their hidden states where logits are kept."""
    made = target(family, dtype)
    runner = made.exact_split.runner
    before = runner.graphs.num_recorded
    done = run(made, make_prompts(LENGTHS), make(), batch, keep_logits, chunk=chunk, page_size=page_size)
    for one, wanted in zip(done, alone(family, dtype, keep_logits), strict=True):
        assert one.completion_token_ids == wanted.completion_token_ids
        pairs = zip(one.logits, wanted.logits, strict=True)
        assert all(torch.equal(got, other) for got, other in pairs)
    assert runner.graphs.num_recorded > before and runner.refused is None


@pytest.mark.slow
def test_the_rounding_of_products_in_float32_depends_on_rows_here():
    """Else the test above would prove little."""
    counts = target("llama", "float32").exact_split.runner.narrow.row_counts.values()
    assert not any(one.is_free for one in counts)


def test_attention_runs_in_fixed_tiles_and_splits():
    made = target("llama", "bfloat16")
    tape = made.exact_split.runner.graphs.capture
    before = len(tape.made)
    run(made, make_prompts(LENGTHS)[:1], Schedule(4, 4), 1, False, page_size=8)
    kernels = [kernel for one in tape.made[before:] for kernel in one.kernels if kernel.startswith("attend")]
    assert kernels and all(kernel.endswith(", 16, 256)") for kernel in kernels)


@pytest.mark.parametrize(
    ("family", "kernels", "reason"),
    [
        ("gpt2", EXACT, "its layers are of another kind"),
        ("llama", None, "here its own modules run"),
        ("llama", REFERENCE, "(hidden states|logits) of fused layers depend on the other tokens of a call"),
        slow("llama", "numbers", "hidden states of fused layers differ by .* roundings"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(family, kernels, reason):
    made = ShortBlocks(build(family), backend="views")
    if kernels == "numbers":
        kernels = EXACT._replace(gate=lambda *given: EXACT.gate(*given) * 1.1)
    if kernels is not None:
        with_runner(made, kernels=kernels)
    with pytest.raises(UnsupportedModelError, match=f"{family}: exact mode needs compiled layers .* and {reason}; "):
        made.generate([[3, 4]], exact=True)
    assert made.split.head_rows is None and not made.split.wide, "the ordinary mode stays as it was"


def test_exit_heads_are_those_of_the_target(monkeypatch):
    monkeypatch.setattr("selfspec.loading.target.exact_split", copy)
    made = Target(build("llama"), backend="views")
    assert made.exact_split is made.exact_split and made.exact_split.exit_heads is None
    made.exit_heads = ExitHeads([1], 32, 4)
    assert made.exact_split.exit_heads is made.split.exit_heads is not None


@pytest.mark.slow
def test_edits_of_weights_are_seen():
    model = build("llama").to(torch.bfloat16)
    made = with_runner(ShortBlocks(model, backend="views"), kernels=EXACT, packing="copy")
    how = {"exact": True, "exit_layer": 1, "max_tokens": 8}
    before = made.generate([[5, 9, 4]], **how)[0].token_ids
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data.mul_(3.0)
    anew = with_runner(ShortBlocks(model, backend="views"), kernels=EXACT, packing="copy")
    assert made.generate([[5, 9, 4]], **how)[0].token_ids == anew.generate([[5, 9, 4]], **how)[0].token_ids != before
