"""A model's head over a part of its vocabulary, for example over a shortlist of tokens per position.

A shadow pick need not be over the whole vocabulary. A layer's pick is nearly always among the target's most probable
tokens, and a fixed sample of the other tokens estimates their share of the probability. These are tens of tokens
instead of tens of thousands.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.model.gguf_blocks import multiplied
from selfspec.model.llama_weights import Linear, is_readable

NUM_TOP = 32  # the target's most probable tokens
NUM_OTHERS = 64  # size of the sample


def sample_of(vocab_size: int, device: torch.device) -> Tensor:
    """The fixed sample of the vocabulary, int64 `[at most 64]`."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    return order[:NUM_OTHERS].to(device)


class PartHead(nn.Module):
    """Replaces the vocabulary product in a view of the model's head; every call supplies its product."""

    def __init__(self, head: Any, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self._linear = [linear]  # in a list, so that it is not a submodule: it belongs to the model
        self._call = threading.local()  # the product of the current call
        self._view = copy.copy(head)
        self._view.__dict__["_modules"] = {**head._modules, name: self}

    @classmethod
    def of(cls, head: Any, linear: Any) -> Self | None:
        """The head over a part of `linear`; None where this is no plain `nn.Linear` and direct child of `head`."""
        names = [name for name, module in head._modules.items() if module is linear]
        is_plain = type(linear) is nn.Linear and len(names) == 1 and is_readable(linear.weight)
        return cls(head, linear, names[0]) if is_plain else None

    @property
    def linear(self) -> Linear:
        """The current weights of the vocabulary product."""
        linear = self._linear[0]
        return Linear(linear.weight, linear._parameters["bias"])

    def through(self, hidden: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits `[N, tokens]` in fp32 by the model's own head, with `product` as its vocabulary product.

        Args:
            hidden: `[N, hidden_size]`, after the final norm.
            product: `[1, N, hidden_size]` -> `[1, N, tokens]`.
        """
        self._call.product = product
        try:
            return self._view(inputs_embeds=hidden[None]).logits[0].float()
        finally:
            del self._call.product

    def forward(self, hidden: Tensor) -> Tensor:
        return self._call.product(hidden)


class ShortHead(PartHead):
    """The head over given tokens per position, followed by `others`, the fixed sample."""

    def __init__(self, head: Any, linear: nn.Linear, name: str) -> None:
        super().__init__(head, linear, name)
        self.others = sample_of(linear.out_features, linear.weight.device)

    def logits(self, hidden: Tensor, top: Tensor) -> Tensor:
        """`[K, N, T + len(others)]` in fp32 from hidden states `[K, N, hidden_size]` after the final norm.

        Args:
            top: int64 `[N, T]`.
        """
        weight, bias = self.linear

        def product(states: Tensor) -> Tensor:
            x = states.view(hidden.shape).to(weight.dtype)
            given = multiplied(x, weight)
            out = torch.matmul(given.transpose(0, 1), weight[top].transpose(1, 2)).transpose(0, 1)  # [K, N, T]
            rest = F.linear(x, weight[self.others], None if bias is None else bias[self.others])
            out = out if bias is None else out + bias[top]
            return torch.cat((out, rest), -1).flatten(0, 1)[None]

        return self.through(hidden.flatten(0, 1), product).view(*hidden.shape[:2], -1)
