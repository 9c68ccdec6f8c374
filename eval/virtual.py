"""A device that is not here: a GPU's cost table, and traces of random outputs whose acceptance is set.

Costs are computed, not measured. For a layer, and for the head, over n tokens:

    seconds = max(weight bytes / bandwidth, 2 parameters n / FLOP/s) + gap

and for every cached token of a row, the bytes of its keys and values over the bandwidth. `Gpu` holds the attainable
figures of a device, which are lower than those of its data sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from eval.traces import WRONG_STEPS, Trace
from selfspec.control.costs import Costs, Table
from selfspec.control.plan import SEED_POSITIONS

BYTES = 2  # of a number in bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens per row
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
POWER = 3.6  # of the rate of refusals by the share of layers above the exit
SPREAD, MEMORY = 0.6, 0.3  # of acceptance between outputs (its logit), and correlation of neighbouring tokens


class Gpu(NamedTuple):
    """Attainable figures of a device, in seconds, bytes and FLOP."""

    bandwidth: float  # bytes per second of a large copy
    flops: float  # of a large product of bfloat16 matrices, per second
    gap: float = 40e-6  # between kernels, per layer: published rates of 1B and 8B models on an H100 leave that much
    pick: float = 15e-6  # of launching what picks tokens, and of the copy to the host
    round: float = 100e-6  # around a round
    row: float = 3e-6  # of a row in a round, on the host


GPUS = {"h200": Gpu(4.3e12, 640e12), "h100": Gpu(3.0e12, 640e12)}


def gpu_costs(config: PretrainedConfig, gpu: Gpu) -> Costs:
    """The cost table of a Llama-shaped model in bfloat16, without 4-bit copies."""
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    cached = 2 * config.num_key_value_heads * head_dim  # keys and values of a token, per layer
    of_layer = hidden * (2 * heads * head_dim + cached) + 3 * hidden * config.intermediate_size
    of_head = hidden * config.vocab_size

    def product(parameters: int, tokens: float) -> float:
        return max(BYTES * parameters / gpu.bandwidth, 2 * parameters * tokens / gpu.flops)

    def layer(tokens: float) -> float:
        return product(of_layer, tokens) + gpu.gap

    logits = 3 * 4 * config.vocab_size / gpu.bandwidth  # written, and read twice, in float32

    def head(tokens: float) -> float:
        return product(of_head, tokens) + gpu.gap + gpu.pick + tokens * logits

    def round_of(rows: int, width: int) -> float:
        return layers * layer(rows * width) + head(rows * width) + gpu.round + rows * gpu.row

    reading = layers * BYTES * cached / gpu.bandwidth
    return Costs(
        layers,
        rounds={rows: Table(WIDTHS, tuple(round_of(rows, width) for width in WIDTHS)) for rows in ROWS},
        steps={rows: Table((1, layers), tuple(e * layer(rows) + head(rows) for e in (1, layers))) for rows in ROWS},
        head=Table(TOKENS, tuple(head(n) for n in TOKENS)),
        context=Table(ROWS, tuple(rows * reading for rows in ROWS)),
        shadow_picks=Table(TOKENS, tuple(gpu.gap + gpu.pick + n * logits / 16 for n in TOKENS)),
        width=4 * heads * head_dim / gpu.flops / (BYTES * cached / gpu.bandwidth),
    )


def acceptance_of(quarter: float, num_layers: int) -> np.ndarray:
    """Acceptance by exit layer 1..L-1 where that of a quarter of the layers is `quarter`; it rises to 1 with depth."""
    above = 1 - np.arange(1, num_layers) / num_layers
    return np.clip(1 - (1 - quarter) * (above / 0.75) ** POWER, 0.02, 1.0)


def synthetic_traces(
    num_layers: int, count: int, prompt_tokens: int, num_tokens: int, acceptance: float, seed: int | Sequence[int] = 0
) -> list[Trace]:
    """Traces of random outputs, in which every layer accepts what the layers before it accept.

    Outputs differ in acceptance, and neighbouring tokens are alike. Texts are random, so lookup finds no drafts.

    Args:
        acceptance: of a quarter of the layers, on average over outputs.
    """
    rng = np.random.default_rng(seed)
    mean = acceptance_of(acceptance, num_layers)
    return [_trace(rng, np.log(mean / np.maximum(1 - mean, 1e-9)), prompt_tokens, num_tokens) for _ in range(count)]


def _trace(rng: np.random.Generator, logits: np.ndarray, num_prompt: int, num_tokens: int) -> Trace:
    own = 1 / (1 + np.exp(-(logits + SPREAD * rng.standard_normal())))[:, None]
    seen = min(SEED_POSITIONS, num_prompt - 1)
    ease = np.empty(seen + num_tokens)
    steps = rng.standard_normal(len(ease))
    for i, step in enumerate(steps):
        ease[i] = MEMORY * ease[i - 1] + (1 - MEMORY**2) ** 0.5 * step if i else step
    hard = np.argsort(np.argsort(ease)) / len(ease)  # uniform in 0..1
    hits = hard < own
    noise = rng.standard_normal(hits.shape)
    confidences = (1 / (1 + np.exp(-(0.8 + 4 * (own - hard) + noise)))).astype(np.float32)
    wrong = (1 / (1 + np.exp(-rng.standard_normal((1, num_tokens, WRONG_STEPS))))).astype(np.float32)
    content = rng.integers(1_000_000, size=num_prompt + num_tokens).tolist()
    right, sure = hits[:, seen:], confidences[:, seen:]
    return Trace(
        "synthetic",
        tuple(content[:num_prompt]),
        tuple(content[num_prompt:]),
        hits=right,
        confidences=sure,
        divergences=(2 * (1 - sure) ** 2).astype(np.float32),
        wrong=np.broadcast_to(wrong, (len(hits), num_tokens, WRONG_STEPS)),
        short_hits=right,
        short_confidences=sure,
        prompt_hits=hits[:, :seen],
        prompt_confidences=confidences[:, :seen],
    )
