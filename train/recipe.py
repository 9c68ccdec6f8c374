"""The LayerSkip recipe (arXiv 2404.16710): which exits count, how much, and which layers are dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from train.config import ExitConfig


def rotating_exits(step: int, num_layers: int, period: int) -> tuple[int, ...]:
    """Exits trained at this step: every `period`-th layer, shifted by one each step, and always the last.

    An exit is named by the number of layers before it, 1..num_layers.
    """
    return tuple(sorted({*range(1 + step % period, num_layers + 1, period), num_layers}))


def exit_weights(exits: Sequence[int], num_layers: int, scale: float, shape: str) -> list[float]:
    """Weights of the exits' losses, summing to 1; early ones are multiplied by `scale`, the last is not.

    `shape` is how a weight grows with depth: uniform, linear (l), or cumulative (1 + ... + l, as in the paper).
    """
    grow: dict[str, Callable[[int], float]] = {
        "uniform": lambda layer: 1.0,
        "linear": lambda layer: layer / num_layers,
        "cumulative": lambda layer: layer * (layer + 1) / (num_layers * (num_layers + 1)),
    }
    raw = [grow[shape](layer) * (1.0 if layer == num_layers else scale) for layer in exits]
    return [weight / sum(raw) for weight in raw]


def dropout_probability(layer: int, num_layers: int, maximum: float, progress: float = 1.0) -> float:
    """Chance that a sequence skips a layer (0-based): D(l) = exp(l ln2 / (L-1)) - 1, times S(t), times `maximum`.

    `progress` runs from 0 to 1 and gives S(t) = exp(t ln2) - 1; left at 1 there is no ramp.
    """
    depth = math.expm1(layer * math.log(2) / (num_layers - 1))
    return maximum * depth * math.expm1(progress * math.log(2))


class LayerDropout:
    """Skip layers per sequence while training, without rescaling, by forward hooks on the layers.

    The hooks belong to the run and not to the model: a saved model knows nothing of them. A dropped layer is computed
    and thrown away, which keeps shapes fixed for compiled layers and costs the few percent dropout would have saved.
    """

    def __init__(self, layers: nn.ModuleList, maximum: float) -> None:
        self.num_layers, self.maximum, self.progress = len(layers), maximum, 1.0
        self.handles = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]

    def _hook(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def drop(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            probability = dropout_probability(index, self.num_layers, self.maximum, self.progress)
            if not module.training or probability <= 0:
                return output
            rows = torch.rand(output.shape[0], 1, 1, device=output.device)
            return torch.where(rows < probability, args[0], output)

        return drop

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextmanager
def layer_outputs(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states `[B, T, H]` after the wanted layers (1-based) of the forward run inside."""
    states: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            states[number] = output

        return hook

    handles = [layers[number - 1].register_forward_hook(keep(number)) for number in wanted]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def last_loss(hidden: Tensor, norm: nn.Module, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the last layer, and its logits for others to learn from. hidden `[N, H]`, labels `[N]`."""
    logits = F.linear(norm(hidden), head)
    return F.cross_entropy(logits.float(), labels), logits.detach()


def early_loss(
    hidden: Tensor, norm: nn.Module, head: Tensor, labels: Tensor, teacher: Tensor, distill: float
) -> Tensor:
    """Cross entropy of an early exit through the shared norm and head, hidden `[N, H]`, labels `[N]`.

    The target is the true next token mixed with the share `distill` of the last layer's distribution, teacher `[N, V]`
    (self-distillation, arXiv 1905.08094): drafts are judged by the model, not by the text.
    """
    log_probs = F.linear(norm(hidden), head).float().log_softmax(-1)
    loss = F.nll_loss(log_probs, labels)
    if distill:
        soft = -(teacher.float().softmax(-1) * log_probs).sum(-1).mean()
        loss = (1 - distill) * loss + distill * soft
    return loss


class EarlyExitLoss:
    """The weighted loss of a step over its exits, through the one final norm and head of a Llama-shaped model."""

    def __init__(self, config: ExitConfig, num_layers: int, compiled: bool = False) -> None:
        self.config, self.num_layers = config, num_layers
        self.last = torch.compile(last_loss, dynamic=False) if compiled else last_loss
        self.early = torch.compile(early_loss, dynamic=False) if compiled else early_loss

    def __call__(self, model: LlamaForCausalLM, tokens: Tensor, step: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the loss to minimise and the detached loss of every exit. tokens `[B, T]`."""
        config, body = self.config, model.model
        exits = rotating_exits(step, self.num_layers, config.period) if config.scale else (self.num_layers,)
        with layer_outputs(body.layers, exits) as states:
            body(input_ids=tokens, use_cache=False)
        head, labels = model.lm_head.weight, tokens[:, 1:].flatten()
        hidden = {number: state[:, :-1].flatten(0, 1) for number, state in states.items()}
        losses = {}
        losses[self.num_layers], teacher = self.last(hidden[self.num_layers], body.norm, head, labels)
        for number in exits[:-1]:
            losses[number] = self.early(hidden[number], body.norm, head, labels, teacher, config.distill)
        weights = exit_weights(exits, self.num_layers, config.scale, config.weights)
        total = torch.stack([weight * losses[number] for weight, number in zip(weights, exits, strict=True)]).sum()
        return total, {number: loss.detach() for number, loss in losses.items()}
