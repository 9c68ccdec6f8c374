"""Exact mode on a device: speculation equals plain decoding bit for bit. A stand-in runs one case here as well."""

import pytest
import torch

from eval.synthetic import random_prompts, synthetic_target
from tests.cuda.standin import EXACT, MOST_TOKENS, ShortBlocks, with_runner
from tests.cuda.test_exact import run
from tests.helpers import Schedule, tokens_of
from tests.slow import slow
from tests.target import Target

NEW = 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    slow("cpu", 128, torch.bfloat16),
    *(pytest.param("cuda", width, dtype, marks=pytest.mark.gpu) for width in (256, 2048) for dtype in DTYPES),
]


def target_of(place, width, dtype):
    sizes = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    made = synthetic_target("tiny", dtype=dtype, device=place, hidden_size=width, intermediate_size=3 * width, **sizes)
    if place == "cuda":
        return Target(made.split.model)
    return with_runner(ShortBlocks(made.split.model, backend="views"), kernels=EXACT, packing="copy")


def prompts_of(target, place, count):
    return random_prompts(target.split.vocab_size, count, MOST_TOKENS // 2 if place == "cpu" else 300)


@pytest.mark.parametrize(("place", "width", "dtype"), CASES)
def test_random_plans_give_the_bits_of_plain_decoding(place, width, dtype):
    target = target_of(place, width, dtype)
    runner = target.exact_split.runner
    prompts = prompts_of(target, place, 5)
    plain = [run(target, [prompt], "plain", 1, True, i)[0] for i, prompt in enumerate(prompts)]
    for seed in range(3):
        done = run(target, prompts, Schedule(seed, 8), 1 + 2 * seed, True)
        for one, wanted in zip(done, plain, strict=True):
            assert one.completion_token_ids == wanted.completion_token_ids
            assert all(torch.equal(a, b) for a, b in zip(one.logits, wanted.logits, strict=True))
    assert runner.refused is None and runner.graphs.num_recorded > 0


@pytest.mark.parametrize("place", [slow("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whole_rounds_emit_the_tokens_of_plain_decoding(place):
    """Rows whose logits are not kept are run from recordings, from drafting to acceptance."""
    target = target_of(place, 128, torch.bfloat16)
    count = 4 if place == "cpu" else 12
    prompts = prompts_of(target, place, count)
    wanted = [target.generate([one], policy="plain", exact=True, max_tokens=NEW)[0].token_ids for one in prompts]
    for batch in (1, 4, count):
        how = {"exit_layer": 1, "num_speculative_tokens": 4, "exact": True, "max_num_seqs": batch}
        assert tokens_of(target.generate(prompts, max_tokens=NEW, **how)) == wanted
