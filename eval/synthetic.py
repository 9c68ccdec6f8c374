"""Synthetic targets: the shape of any model with random weights, whose early exit is right as often as is wanted.

Speed depends on shapes, number format and acceptance, not on the text. So models whose weights are not at hand can be
measured: a forward takes as long as the real one's. How often an exit agrees with the whole model is set by how much
the layers above it add to the residual stream. Every table made with such a target says "synthetic".
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

from eval.models import Endless, open_model
from eval.shapes import config_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.stack import Stack
from selfspec.model.views import base_of, family_of

GAIN = 1.9  # of a random matrix on a vector of unit size: outputs then neither repeat one token nor run in a cycle
PROMPTS, PROMPT_TOKENS, SKIPPED = 8, 20, 4  # random texts that acceptance is set on, without their first tokens
LOWEST, HIGHEST = 1e-3, 4.0  # factors among which the one is searched that gives the acceptance wanted
STEPS, CLOSE = 14, 0.008  # forwards of the later layers at most, and how near is near enough
BRANCHES = (("self_attn", "o_proj"), ("mlp", "down_proj"))  # the last projection of a layer's two branches


@dataclass(frozen=True, slots=True)
class Made:
    """How a synthetic target was made."""

    shape: str
    dtype: str
    seed: int
    exit_layer: int
    wanted: float | None  # acceptance asked for; None: the layers above the exit are left as they are drawn
    scale: float  # factor on what the layers above the exit add
    acceptance: float  # of the exit over random tokens


class Synthetic(Endless):
    """A target with random weights; `made` says how, and belongs into whatever is reported of it."""

    def __init__(self, model: nn.Module, made: Made) -> None:
        super().__init__(open_model(model))
        self.made = made

    def about(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"synthetic": True, **asdict(self.made), "num_layers": self.stack.num_layers}


def synthetic_target(
    shape: str | Path | PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    exit_layer: int | None = None,
    acceptance: float | None = 0.8,
    seed: int = 0,
    **overrides: Any,
) -> Synthetic:
    """A target of a known shape with random weights, drawn on the device; the same one for the same seed and device.

    Every weight is a bfloat16 number whatever the dtype, as in most published checkpoints: engines that pack weights
    read half as much of those.

    Args:
        shape: a name of `eval.shapes.SHAPES`, a `config.json`, or a configuration.
        exit_layer: where acceptance is set; default: an eighth of the layers.
        acceptance: how often the exit's pick shall be the whole model's, 0.05..1, to about 0.03; None: as it comes,
            nearly never.
        overrides: keys of the configuration to replace.

    Raises:
        ValueError: an unknown shape, an exit layer or an acceptance out of range, or a family whose layers do not end
            in the usual projections.
    """
    config = shape if isinstance(shape, PretrainedConfig) else config_of(shape, **overrides)
    layers = int(config.num_hidden_layers)
    exit_layer = max(1, layers // 8) if exit_layer is None else exit_layer
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer must lie in 1..{layers - 1} for this shape, got {exit_layer}")
    if acceptance is not None and not 0.05 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie in 0.05..1, or be None to leave it as it is, got {acceptance}")
    model = random_model(config, dtype, torch.device(device), seed)
    scale, found = _set_acceptance(model, exit_layer, acceptance, seed)
    _round_weights(model)  # those that were scaled
    name = config.model_type if isinstance(shape, PretrainedConfig) else str(shape)
    made = Made(name, str(dtype).removeprefix("torch."), seed, exit_layer, acceptance, scale, found)
    return Synthetic(model, made)


def random_prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, the same on every device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


@torch.no_grad()
def random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A causal LM whose weights are drawn on the device, in its dtype, without the default initialisation before."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(seed)
    known: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in known:
                real = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                known[id(parameter)] = nn.Parameter(_fill(real, config, name, generator), requires_grad=False)
            module._parameters[name] = known[id(parameter)]
        if any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            _compute_buffers(module, config, device)
    _round_weights(model)
    return model


def _fill(weight: Tensor, config: PretrainedConfig, name: str, generator: torch.Generator) -> Tensor:
    """Uniform of a spread by fan-in, norms 1, biases 0."""
    if weight.dim() > 1:
        bound = GAIN * (3 / weight.shape[-1]) ** 0.5
        return weight.uniform_(-bound, bound, generator=generator)
    adds_one = str(config.model_type).startswith("gemma")  # its norms multiply by 1 + weight
    return weight.fill_(0.0 if name.endswith("bias") or adds_one else 1.0)


def _compute_buffers(module: nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """Buffers are computed, not drawn, by a fresh module of the same kind, as rotary embeddings are made."""
    try:
        fresh = type(module)(config=config).to(device)
    except TypeError as problem:
        raise ValueError(
            f"{config.model_type}: cannot compute the buffers of {type(module).__name__} anew; "
            "choose a Llama-shaped configuration"
        ) from problem
    module._buffers.update(fresh._buffers)


@torch.no_grad()
def _round_weights(model: nn.Module) -> None:
    """Make every weight the bfloat16 number next to it, in place and in its own dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.inference_mode()
def _set_acceptance(model: Any, exit_layer: int, wanted: float | None, seed: int) -> tuple[float, float]:
    """Scale what the layers above an exit add, in place, until the exit agrees with the model as often as wanted.

    All factors are tried on the same random tokens; the layers below the exit run once.

    Returns:
        The factor, and the acceptance there.
    """
    family = family_of(model)
    layers = getattr(base_of(model, family), family.layers)
    ends = [_end(layer, *names) for layer in layers[exit_layer:] for names in BRANCHES]
    factor = [0.0 if wanted == 1 else 1.0]
    with _scaled(ends, factor):
        agree = _Agreement(Stack(model), exit_layer, seed)
        found = agree() if wanted is None or wanted == 1 else _search(agree, factor, wanted)
    for end in ends:
        end.weight.mul_(factor[0])
    return factor[0], found


def _search(agree: _Agreement, factor: list[float], wanted: float) -> float:
    """Set the factor at which acceptance is nearest to what is wanted, by halving an interval; the acceptance there."""
    low, high, tried = math.log(LOWEST), math.log(HIGHEST), []
    for _ in range(STEPS):
        factor[0] = math.exp((low + high) / 2)
        found = agree()
        tried.append((abs(found - wanted), factor[0], found))
        if tried[-1][0] <= CLOSE:
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
    """The projections' outputs are multiplied by `factor[0]` inside."""
    hooks = [end.register_forward_hook(lambda module, given, output: output * factor[0]) for end in ends]
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
