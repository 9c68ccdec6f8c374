"""Synthetic targets: any model's shape with random weights and a chosen acceptance of an early exit.

Speed depends on shapes, number format and acceptance, not on the text, so a model can be measured without its weights.
The acceptance is set by scaling what the layers above the exit add to the residual stream. Of a large vocabulary, texts
use low ids only, those of the default draft vocabulary. Every table made with such a target says "synthetic".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from eval.models import open_llm
from eval.shapes import config_of
from selfspec import LLM
from selfspec.model.draft_vocabulary import DIVISOR, LEAST_SIZE
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from selfspec.model.views import base_of, family_of

RARE = 2.0**-6  # factor on the head's rows of tokens that texts do not use
GAIN = 1.9  # of a random matrix on a unit vector; with it outputs neither repeat one token nor run in a cycle
PROMPTS, PROMPT_TOKENS, SKIPPED = 8, 20, 4  # random texts for measuring acceptance; their first tokens are skipped
LOWEST, HIGHEST = 1e-3, 4.0  # range of the scale that is searched for the wanted acceptance
STEPS, TOLERANCE = 14, 0.008  # of the search: maximum forwards, and accepted error
BRANCHES = (("self_attn", "o_proj"), ("mlp", "down_proj"))  # the last projection of a layer's two branches


@dataclass(frozen=True, slots=True)
class Made:
    """The parameters of a synthetic target."""

    shape: str
    dtype: str
    seed: int
    exit_layer: int
    wanted: float | None  # requested acceptance; None: not set
    scale: float  # factor on the output of the layers above the exit
    acceptance: float  # measured on random tokens
    temperature: float  # of the picks whose acceptance this is; 0 is greedy


@dataclass(frozen=True, slots=True)
class Synthetic:
    """An opened model with random weights, and its parameters, which every record of it should include."""

    llm: LLM
    made: Made

    @property
    def split(self) -> SplitModel:
        return self.llm.target.split

    def about(self) -> dict[str, Any]:
        """The parameters as plain values."""
        return {"synthetic": True, **asdict(self.made), "num_layers": self.split.num_layers}


def synthetic_target(
    shape: str | Path | PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    exit_layer: int | None = None,
    acceptance: float | None = 0.8,
    temperature: float = 0.0,
    seed: int = 0,
    **overrides: Any,
) -> Synthetic:
    """Make a target with random weights, drawn on the device; reproducible for the same seed and device.

    Every weight is a bfloat16 number in any dtype, as in most published checkpoints; engines that pack such weights
    read half as many bytes.

    Args:
        shape: a name of `eval.shapes.SHAPES`, a `config.json`, or a configuration.
        exit_layer: the exit whose acceptance is set; default: an eighth of the layers.
        acceptance: share of positions where the exit's pick is the whole model's, 0.05..1, to about 0.03; None: not
            set, near 0.
        temperature: of the picks: those of the exit and of the model share their noise, as drafts and verification do.
            With 0, greedy, long outputs may have an acceptance that differs by 0.1. A temperature sets a lowest
            acceptance, that of independent logits: 0.14 with 1, 0.01 with 0.5.
        overrides: keys of the configuration to replace.

    Raises:
        ValueError: the shape is unknown, exit layer or acceptance is out of range, or the family's layers do not end in
            the projections of Llama.
    """
    config = shape if isinstance(shape, PretrainedConfig) else config_of(shape, **overrides)
    layers = int(config.num_hidden_layers)
    exit_layer = max(1, layers // 8) if exit_layer is None else exit_layer
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer must lie in 1..{layers - 1} for this shape, got {exit_layer}")
    if acceptance is not None and not 0.05 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie in 0.05..1, or be None to leave it as it is, got {acceptance}")
    model = random_model(config, dtype, torch.device(device), seed)
    scale, found = _set_acceptance(model, exit_layer, acceptance, temperature, seed)
    _round_weights(model)  # again, since some were scaled
    name = config.model_type if isinstance(shape, PretrainedConfig) else str(shape)
    made = Made(name, str(dtype).removeprefix("torch."), seed, exit_layer, acceptance, scale, found, temperature)
    return Synthetic(open_llm(model), made)


def text_tokens(vocab_size: int) -> int:
    """How many tokens texts use, those with the lowest ids: as many as the default draft vocabulary, if there is one.

    Texts over more tokens would have few that can be drafted, since no random token is more frequent than others.
    """
    return min(vocab_size, max(vocab_size // DIVISOR, LEAST_SIZE))


def random_prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids of those that texts use, `count` lists of `length`; equal on every device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(text_tokens(vocab_size), (count, length), generator=generator).tolist()


@torch.no_grad()
def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A causal LM with weights drawn on the device in the dtype: matrices uniform by fan-in, norms 1, biases 0.

    The head's rows of tokens that texts do not use are scaled by `RARE`, so that they are hardly ever picked.
    """
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    adds_one = str(config.model_type).startswith("gemma")  # norms that multiply by 1 + weight
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            bound = GAIN * (3 / weight.shape[-1]) ** 0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") or adds_one else 1.0)
    head = model.get_output_embeddings().weight
    head[text_tokens(len(head)) :].mul_(RARE)
    _round_weights(model)
    return model


@torch.no_grad()
def _round_weights(model: nn.Module) -> None:
    """Round every weight to bfloat16, in place and in its own dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.inference_mode()
def _set_acceptance(
    model: Any, exit_layer: int, wanted: float | None, temperature: float, seed: int
) -> tuple[float, float]:
    """Scale the output of the layers above an exit, in place, until the exit has the wanted acceptance.

    All scales are tried on the same random tokens; the layers below the exit run once. Returns the scale and its
    acceptance.
    """
    family = family_of(model)
    layers = getattr(base_of(model, family), family.layers)
    ends = [_end(layer, *names) for layer in layers[exit_layer:] for names in BRANCHES]
    factor = [0.0 if wanted == 1 else 1.0]
    with _scaled(ends, factor):
        agree = _Agreement(SplitModel(model), exit_layer, temperature, seed)
        found = agree() if wanted is None or wanted == 1 else _search(agree, factor, wanted)
    for end in ends:
        end.weight.mul_(factor[0])
    return factor[0], found


def _search(agree: _Agreement, factor: list[float], wanted: float) -> float:
    """Set the factor whose acceptance is nearest to `wanted`, by bisection; returns that acceptance."""
    low, high, tried = math.log(LOWEST), math.log(HIGHEST), []
    for _ in range(STEPS):
        factor[0] = math.exp((low + high) / 2)
        found = agree()
        tried.append((abs(found - wanted), factor[0], found))
        if tried[-1][0] <= TOLERANCE:
            break
        low, high = ((low + high) / 2, high) if found > wanted else (low, (low + high) / 2)
    _, factor[0], found = min(tried)
    return found


def _end(layer: nn.Module, branch: str, name: str) -> nn.Linear:
    end = getattr(getattr(layer, branch, None), name, None)
    if end is None:
        raise ValueError(
            f"{type(layer).__name__} has no {branch}.{name} to scale, so its acceptance cannot be set; "
            "choose a Llama-shaped configuration"
        )
    return end


@contextmanager
def _scaled(ends: Sequence[nn.Linear], factor: list[float]) -> Iterator[None]:
    """Multiply the projections' outputs by `factor[0]` inside the block."""
    hooks = [end.register_forward_hook(lambda module, given, output: output * factor[0]) for end in ends]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Agreement:
    """Measures the share of positions where an exit's pick is the whole model's, over random prompts."""

    def __init__(self, split: SplitModel, exit_layer: int, temperature: float, seed: int) -> None:
        self.split, self.exit_layer, self.temperature = split, exit_layer, temperature
        prompts = random_prompts(split.vocab_size, PROMPTS, PROMPT_TOKENS, seed)
        cache = PagedCache(PROMPTS, PROMPT_TOKENS)
        spans = [Span([row], 0, PROMPT_TOKENS) for row in range(PROMPTS)]
        self.rows = PackedRows(cache, spans, split.device)
        tokens = torch.tensor(prompts, device=split.device).flatten()
        self.hidden = split.run(self.rows, 0, exit_layer, tokens)
        at = torch.arange(PROMPTS * PROMPT_TOKENS, device=split.device)
        self.judged = at[at % PROMPT_TOKENS >= SKIPPED]
        self.early = split.logits(self.hidden[self.judged], exit_layer)

    def __call__(self) -> float:
        last = self.split.run(self.rows, self.exit_layer, self.split.num_layers, self.hidden)
        logits = self.split.logits(last[self.judged])
        if self.temperature:
            return float(agreement(self.early / self.temperature, logits / self.temperature).mean())
        return float((logits.argmax(-1) == self.early.argmax(-1)).float().mean())


def agreement(first: Tensor, second: Tensor) -> Tensor:
    """The probability `[N]` that samples from logits `[N, vocab]` are equal, by argmax with the same Gumbel noise.

    Both pick token i if its noise exceeds that of every other token j by the larger of log(p_j / p_i) and
    log(q_j / q_i); so the probability is the sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i). In the order of
    p / q, the maximum is the q's quotient for all tokens before i and the p's from i on.
    """
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    order = (p - q).argsort(-1)
    p, q = p.gather(-1, order).exp(), q.gather(-1, order).exp()
    from_here, before = p.flip(-1).cumsum(-1).flip(-1), q.cumsum(-1) - q
    return (p * q / (from_here * q + before * p)).nan_to_num(0.0).sum(-1)
