"""Exact mode on a device: speculation equals plain decoding bit for bit in half precision."""

import pytest
import torch

from eval.synthetic import random_prompts, synthetic_target
from selfspec.decoding.engine import Engine
from selfspec.executors.cuda.exact_body import ExactBody
from tests.helpers import Schedule, drain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [256, 2048])
def test_random_plans_give_the_bits_of_plain_decoding(dtype, width):
    target = synthetic_target(
        "tiny",
        dtype=dtype,
        device="cuda",
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
    )
    runner = target.exact_stack.runner
    assert isinstance(runner.narrow, ExactBody)
    prompts = random_prompts(target.stack.vocab_size, 5, 150)
    options = {"max_new_tokens": 24, "keep_logits": True}
    for seed in range(3):
        engine = Engine(
            target, policy=Schedule(seed, 8), max_batch_size=1 + 2 * seed, max_cached_tokens=2048, exact=True
        )
        for prompt in prompts:
            engine.submit(prompt, **options)
        done = drain(engine).completions
        for i, prompt in enumerate(prompts):
            (wanted,) = target.generate([prompt], policy="plain", exact=True, **options)
            assert done[i].tokens == wanted.tokens
            assert all(torch.equal(a, b) for a, b in zip(done[i].logits, wanted.logits, strict=True))
    assert runner.refused is None and runner.graphs.num_recorded > 0


def test_whole_rounds_emit_the_tokens_of_plain_decoding():
    """Rows whose logits are not kept are run from recordings, from drafting to acceptance."""
    target = synthetic_target("tiny", dtype=torch.bfloat16, device="cuda")
    prompts = random_prompts(target.stack.vocab_size, 12, 300)
    options = {"max_new_tokens": 40}
    wanted = [target.generate([prompt], policy="plain", exact=True, **options)[0].tokens for prompt in prompts]
    for batch in (1, 4, 12):
        done = target.generate(prompts, exit_layer=1, num_draft_tokens=4, exact=True, max_batch_size=batch, **options)
        assert [one.tokens for one in done] == wanted
