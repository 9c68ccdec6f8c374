"""Synthetic targets: the shape of any model with random weights, whose early exit is right as often as is wanted.

Speed depends on shapes, number format and acceptance; text does not matter to it. So figures of models whose weights
are not at hand can be measured: a forward takes as long as the real one's, and how often an exit agrees with the whole
model is set by how much the layers above it add to the residual stream. Every table made with one says "synthetic".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from eval.methods import Endless
from eval.shapes import config_of
from eval.weights import random_model, round_weights
from selfspec.executors.cpu.install import Engine
from selfspec.legacy import LoadedTarget as Target
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.stack import Stack
from selfspec.model.views import base_of, family_of

RARE = 0.1  # size of the head's rows for tokens that are not written
PROMPTS, PROMPT_TOKENS, SKIPPED = 8, 20, 4  # what acceptance is first measured on, but for a prompt's first tokens
LOWEST, HIGHEST = (1e-3, 0.995), (4.0, 0.01)  # where the search for the factor begins, and what is supposed there
STEPS, CLOSE = 10, 0.008  # forwards of the later layers at most, and how near is near enough
BRANCHES = (("self_attn", "o_proj"), ("mlp", "down_proj"))  # what a layer's two branches end with


@dataclass(frozen=True, slots=True)
class Made:
    """What a synthetic target is made of."""

    shape: str
    dtype: str
    seed: int
    exit_layer: int
    wanted: float | None  # acceptance asked for; None: later layers add as much as they like
    scale: float  # factor on what the layers above the exit add
    acceptance: float  # of the exit over random tokens
    frequent: int | None = None  # only so many tokens are ever written
    rounded: bool = True  # every weight is a bfloat16 number, as published checkpoints' are

    @property
    def label(self) -> str:
        text = "" if self.frequent is None else f", writing {self.frequent} of its tokens"
        kind = f"{self.dtype} of bfloat16" if self.rounded and self.dtype != "bfloat16" else self.dtype
        return f"synthetic {self.shape}, {kind}, acceptance {self.acceptance:.2f} at layer {self.exit_layer}{text}"


class Synthetic(Target):
    """A target with random weights; `made` says how, and belongs into whatever is reported of it."""

    def __init__(self, model: nn.Module, made: Made, check: bool = True, engine: Engine = "auto") -> None:
        super().__init__(model, check=check, engine=engine)
        self.made = made

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()  # it knows no end of text: every method writes as many tokens as it is asked for

    def about(self) -> dict[str, Any]:
        """For a record: plain values."""
        return {"synthetic": True, **asdict(self.made), "num_layers": self.stack.num_layers}


def synthetic_target(
    shape: str | Path | PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    exit_layer: int | None = None,
    acceptance: float | None = 0.8,
    seed: int = 0,
    check: bool = True,
    frequent: int | None = None,
    rounded: bool = True,
    engine: Engine = "auto",
    **overrides: Any,
) -> Synthetic:
    """A target of a known shape with random weights, made on the device; the same one for the same seed and device.

    Args:
        shape: a name of `eval.shapes.SHAPES`, a `config.json`, or a configuration.
        exit_layer: where acceptance is set; default: an eighth of the layers.
        acceptance: how often the exit's pick shall be the whole model's, 0.05..1, to about 0.03; None: as it comes,
            nearly never.
        check: run the self-check; without it the views run the layers.
        frequent: the first tokens of the vocabulary, which alone are written, as text uses a part of a vocabulary most
            of the time; default: all are as likely.
        rounded: round every weight to bfloat16, whatever the dtype: published checkpoints mostly hold such, and bodies
            that pack weights read half as much of them.
        engine: what runs the layers, see `selfspec.load`.
        overrides: keys of the configuration to replace.

    Raises:
        ValueError: an unknown shape, an exit layer or an acceptance out of range, or a family whose layers do not end
            in the usual projections.
    """
    named = shape if isinstance(shape, PretrainedConfig) else config_of(shape, **overrides)
    layers = int(named.num_hidden_layers)
    exit_layer = max(1, layers // 8) if exit_layer is None else exit_layer
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer must lie in 1..{layers - 1} for this shape, got {exit_layer}")
    if acceptance is not None and not 0.05 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie in 0.05..1, or be None to leave it as it is, got {acceptance}")
    model = random_model(named, dtype, torch.device(device), seed)
    if frequent is not None:
        with torch.no_grad():
            model.get_output_embeddings().weight[frequent:].mul_(RARE)
    if rounded:
        round_weights(model)
    scale, found = set_acceptance(model, exit_layer, acceptance, seed)
    if rounded:
        round_weights(model)  # those that were scaled
    name = named.model_type if isinstance(shape, PretrainedConfig) else str(shape)
    made = Made(name, str(dtype).removeprefix("torch."), seed, exit_layer, acceptance, scale, found, frequent, rounded)
    return Synthetic(model, made, check, engine)


class _Strength:
    """What a hook multiplies by; a plain number in a box."""

    value = 1.0


@torch.inference_mode()
def set_acceptance(
    model: Any, exit_layer: int, wanted: float | None, seed: int = 0, steps: int = STEPS
) -> tuple[float, float]:
    """Scale what the layers above an exit add, in place, until the exit agrees with the model as often as wanted.

    The search narrows an interval of factors by false position (the logit of acceptance is nearly straight in the
    factor's logarithm), on the same random tokens throughout. The layers below the exit run once.

    Returns:
        The factor, and the acceptance there.
    """
    strength = _Strength()
    family = family_of(model)
    layers = getattr(base_of(model, family), family.layers)
    ends = [_end(layer, *names) for layer in layers[exit_layer:] for names in BRANCHES]
    with _hooked(ends, strength):
        stack = Stack(model)
        agree = _Agreement(stack, exit_layer, seed)
        if wanted is None:
            return 1.0, agree()
        low, high, best = LOWEST, HIGHEST, (2.0, 1.0, 0.0)  # (distance, factor, acceptance)
        for _ in range(steps):
            strength.value = _between(low, high, wanted)
            found = agree()
            best = min(best, (abs(found - wanted), strength.value, found))
            if best[0] <= CLOSE:
                break
            here = (strength.value, min(LOWEST[1], max(HIGHEST[1], found)))
            low, high = (here, high) if found > wanted else (low, here)
    for end in ends:
        end.weight.mul_(best[1])
    return best[1], best[2]


def _between(low: tuple[float, float], high: tuple[float, float], wanted: float) -> float:
    """The factor between two (factor, acceptance) at which acceptance should be as wanted."""
    (a, at_a), (b, at_b) = [(math.log(factor), _logit(rate)) for factor, rate in (low, high)]
    share = (at_a - _logit(min(LOWEST[1], wanted))) / (at_a - at_b) if at_a > at_b else 0.5
    return math.exp(a + (b - a) * min(0.85, max(0.15, share)))


def _logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


def _end(layer: nn.Module, branch: str, name: str) -> nn.Linear:
    end = getattr(getattr(layer, branch, None), name, None)
    if end is None:
        raise ValueError(
            f"{type(layer).__name__} has no {branch}.{name} to scale, so its acceptance cannot be set; "
            "choose a Llama-shaped configuration"
        )
    return end


@contextmanager
def _hooked(ends: Sequence[nn.Linear], strength: _Strength) -> Iterator[None]:
    hooks = [end.register_forward_hook(lambda module, given, output: output * strength.value) for end in ends]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Agreement:
    """How often an exit's pick is the whole model's, over random prompts read in one call."""

    def __init__(self, stack: Stack, exit_layer: int, seed: int) -> None:
        self.stack, self.exit_layer = stack, exit_layer
        prompts = random_prompts(stack.vocab_size, PROMPTS, PROMPT_TOKENS, seed)
        cache = PagedCache(PROMPTS, PROMPT_TOKENS)
        spans = [Span([row], 0, PROMPT_TOKENS) for row in range(PROMPTS)]
        self.rows = PackedRows(cache, spans, stack.device)
        tokens = torch.tensor(prompts, device=stack.device).flatten()
        self.hidden = stack.run(self.rows, 0, exit_layer, tokens)
        at = torch.arange(PROMPTS * PROMPT_TOKENS, device=stack.device)
        self.judged = at[at % PROMPT_TOKENS >= SKIPPED]
        self.picks = stack.logits(self.hidden[self.judged], exit_layer).argmax(-1)

    def __call__(self) -> float:
        last = self.stack.run(self.rows, self.exit_layer, self.stack.num_layers, self.hidden)
        return float((self.stack.logits(last[self.judged]).argmax(-1) == self.picks).float().mean())


def random_prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, the same on every device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def acceptance_of(
    target: Target, exit_layer: int, *, prompts: int = 4, tokens: int = 48, draft_tokens: int = 4, seed: int = 0
) -> float:
    """Acceptance while decoding: the share of judged drafted tokens that the target itself picks, greedily."""
    given = random_prompts(target.stack.vocab_size, prompts, PROMPT_TOKENS, seed)
    done = Endless(target).generate(
        given, exit_layer=exit_layer, num_draft_tokens=draft_tokens, max_new_tokens=tokens, max_batch_size=prompts
    )
    counts = [item for one in done for item in one.stats.acceptance_histogram_by_draft_length.items()]
    judged = sum(min(a + 1, drafted) * n for drafted, histogram in counts for a, n in histogram.items())
    accepted = sum(a * n for _, histogram in counts for a, n in histogram.items())
    return accepted / judged if judged else 0.0
