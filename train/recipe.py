"""The LayerSkip recipe (arXiv 2404.16710): losses at early exits, and layer dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.backbone import find_parts
from train.sections import ExitConfig

IGNORED = -100  # label of a token that does not count, as everywhere in transformers


def rotating_exits(step: int, num_layers: int, period: int) -> tuple[int, ...]:
    """The exits trained at this step: every `period`-th layer, shifted by one each step, and always the last.

    An exit is the number of layers before it, 1..num_layers.
    """
    return tuple(sorted({*range(1 + step % period, num_layers + 1, period), num_layers}))


def exit_weights(exits: Sequence[int], num_layers: int, scale: float) -> list[float]:
    """Weights of the exits' losses, which sum to 1; that of an early exit is `scale` times that of the last layer."""
    raw = [1.0 if layer == num_layers else scale for layer in exits]
    return [weight / sum(raw) for weight in raw]


def dropout_probability(layer: int, num_layers: int, maximum: float) -> float:
    """Probability that a sequence skips a 0-based layer: D(l) `maximum`, with D(l) = exp(l ln2 / (L-1)) - 1."""
    return maximum * math.expm1(layer * math.log(2) / (num_layers - 1))


class LayerDropout:
    """Layer dropout per sequence, without rescaling, by forward hooks on the layers.

    It acts in training, and there only in forwards with gradients: not in those of a teacher.
    The hooks are not part of a saved model. The output of a dropped layer is computed and replaced, so that shapes
    are constant for compiled layers.
    """

    def __init__(self, layers: nn.ModuleList, maximum: float) -> None:
        self.num_layers, self.maximum = len(layers), maximum
        self.handles = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]

    def _hook(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        probability = dropout_probability(index, self.num_layers, self.maximum)

        def drop(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not module.training or not torch.is_grad_enabled() or probability <= 0:
                return output
            rows = torch.rand(output.shape[0], 1, 1, device=output.device)
            return torch.where(rows < probability, args[0], output)

        return drop

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextmanager
def layer_outputs(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states `[B, T, H]` after the wanted layers (1-based) of a forward inside the block."""
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


def last_loss(hidden: Tensor, norm: nn.Module, head: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the last layer, and its detached distribution `[N, V]`; hidden `[N, H]`, labels `[N]`."""
    logits = head(norm(hidden)).float()
    return F.cross_entropy(logits, labels), logits.detach().softmax(-1)


def distilled_loss(
    hidden: Tensor, norm: nn.Module, head: nn.Module, labels: Tensor, teacher: Tensor, distill: float
) -> Tensor:
    """Cross entropy of an exit through the shared norm and head; hidden `[N, H]`, labels `[N]`.

    The target is the next token, mixed with the share `distill` of the distribution `teacher` `[N, V]`, that of a
    last layer (self-distillation, arXiv 1905.08094).
    """
    log_probs = head(norm(hidden)).float().log_softmax(-1)
    loss = F.nll_loss(log_probs, labels)
    if distill:
        soft = -(teacher * log_probs).sum(-1).mean()
        loss = (1 - distill) * loss + distill * soft
    return loss


class EarlyExitLoss:
    """The weighted loss of a step over its exits, through the final norm and head of a Llama-like model.

    With the teacher "last", the last layer learns from the tokens, and the early exits partly from its distribution.
    With the teacher "base", every exit learns partly from the distribution of the model without its adapters.
    """

    def __init__(self, config: ExitConfig, num_layers: int, compiled: bool = False) -> None:
        self.config, self.num_layers = config, num_layers
        self.last = torch.compile(last_loss, dynamic=False) if compiled else last_loss
        self.distilled = torch.compile(distilled_loss, dynamic=False) if compiled else distilled_loss

    def __call__(
        self, model: nn.Module, tokens: Tensor, step: int, labels: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the loss to minimise and the detached loss of every exit, float32 scalars in nats per token.

        Args:
            tokens: int64 `[B, T]`.
            labels: int64 `[B, T]`, the tokens or -100 where one does not count; default: the tokens. A batch in which
                no token counts has loss 0 and no exits.
        """
        parts, config = find_parts(model), self.config
        exits = rotating_exits(step, self.num_layers, config.period) if config.scale else (self.num_layers,)
        targets = (tokens if labels is None else labels)[:, 1:].flatten()
        counted = (targets != IGNORED).nonzero()[:, 0]  # the head runs over tokens that count only
        targets = targets if labels is None else targets[counted]
        losses: dict[int, Tensor] = {}
        if config.teacher == "base":
            teacher = base_distribution(model, tokens, counted)
        with layer_outputs(parts.layers, exits) as states:
            parts.body(input_ids=tokens, use_cache=False)
        hidden = {number: state[:, :-1].flatten(0, 1) for number, state in states.items()}
        if labels is not None:
            hidden = {number: state[counted] for number, state in hidden.items()}
            if not len(counted):
                return hidden[self.num_layers].float().sum(), {}
        if config.teacher == "last":
            losses[self.num_layers], teacher = self.last(hidden[self.num_layers], parts.norm, parts.head, targets)
        for number in exits:
            if number not in losses:
                state = hidden[number]
                losses[number] = self.distilled(state, parts.norm, parts.head, targets, teacher, config.distill)
        weights = exit_weights(exits, self.num_layers, config.scale)
        total = torch.stack([weight * losses[number] for weight, number in zip(weights, exits, strict=True)]).sum()
        return total, {number: loss.detach() for number, loss in losses.items()}


def base_distribution(model: Any, tokens: Tensor, counted: Tensor) -> Tensor:
    """The next-token distribution of a PEFT model without its adapters, float32 `[N, V]`.

    Args:
        tokens: int64 `[B, T]`.
        counted: int64 `[N]`, places among the B (T - 1) positions that have a next token.
    """
    parts = find_parts(model)
    with torch.no_grad(), model.disable_adapter():
        hidden = parts.body(input_ids=tokens, use_cache=False).last_hidden_state
        probs: Tensor = parts.head(hidden[:, :-1].flatten(0, 1)[counted]).float().softmax(-1)
    return probs
