"""Acceptance forced from 1 to nearly 0: random targets whose upper layers add more and more to what the lower ones say.

A model whose layers above a quarter of the depth add nothing agrees with an exit there always; the larger what they
add, by a factor on their output projections, the rarer it agrees. The time a forward takes is the same throughout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.config import LiveConfig
from eval.live import ADAPTIVE, PLAIN, compare, way_of
from eval.live_timing import Scene, scene_of
from eval.methods import Endless
from eval.timing import Say
from selfspec.calibrate.measure import measure
from selfspec.legacy import LoadedTarget as Target

SCALES = (0.0, 0.04, 0.1, 0.2, 0.4, 1.0)  # acceptance at a quarter of the depth: about 1, 0.9, 0.7, 0.5, 0.25, 0.05
SPREAD = 0.12  # of the weights, at a hidden size of 256: outputs then neither stand still nor go round in circles
PROMPTS, PROMPT_TOKENS = 8, 24


def build(scale: float, num_layers: int = 8, hidden_size: int = 256, vocab_size: int = 1024, seed: int = 0) -> Any:
    """A small random Llama; the output projections above a quarter of its layers are multiplied by `scale`."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=5 * hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=SPREAD * math.sqrt(256 / hidden_size),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[exit_of(num_layers) :]:
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
    return model


def exit_of(num_layers: int) -> int:
    """The layer whose acceptance is forced."""
    return max(1, num_layers // 4)


def acceptance(scene: Scene) -> float:
    """How often the forced exit would have picked the outputs' own tokens."""
    line = exit_of(scene.costs.num_layers) - 1
    hits = [bool(hit) for trace in scene.traces for hit in trace.hits[line]]
    return sum(hits) / len(hits)


def sweep(config: LiveConfig, say: Say) -> dict[str, Any]:
    """Adaptive beside plain decoding at every scale, and where it is slowest."""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    costs, levels = None, []
    sizes = config.synthetic_batch_sizes
    for scale in SCALES:
        target = Target(build(scale, hidden_size=config.synthetic_hidden_size).to(device))
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(target.stack.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
        if costs is None:
            say("synthetic: measuring costs")
            costs = measure(target.stack, sizes, config.cost_repeats, within=None)
        scene = scene_of(Endless(target), prompts, config.tokens, costs, f"synthetic, scale {scale:g}", say)
        batches = []
        for size in sizes:
            say(f"synthetic, scale {scale:g}: batch size {size}")
            filled = scene.filled(size)
            ways = [way_of(filled, policy) for policy in (PLAIN, ADAPTIVE)]
            batches.append({"batch_size": size, "methods": compare(filled, ways, size, config, say)})
        levels.append({"scale": scale, "acceptance": acceptance(scene), "batches": batches})
    assert costs is not None
    return {
        "exit_layer": exit_of(costs.num_layers),
        "num_layers": costs.num_layers,
        "costs": costs.as_dict(),
        "levels": levels,
        "lowest": lowest(levels),
    }


def lowest(levels: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest adaptive among all levels and batch sizes, by its median."""
    found = [
        {
            "acceptance": level["acceptance"],
            "batch_size": batch["batch_size"],
            "live": method["live"],
            "whole_call": method["whole_call"],
        }
        for level in levels
        for batch in level["batches"]
        for method in batch["methods"]
        if method["kind"] == ADAPTIVE
    ]
    return min(found, key=lambda each: each["live"]["median"])
