"""A model's head over a shortlist of tokens, chosen per position, instead of its whole vocabulary.

To know whether a layer would have picked the target's token, the whole vocabulary is not needed: where the layer is
wrong, its own pick is nearly always among the target's likeliest tokens, and a fixed sample of the others tells how
much probability lies elsewhere. That is tens of tokens where a vocabulary has tens of thousands.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.target.quantized import is_dense

NUM_TOP = 32  # of the target's likeliest tokens
NUM_OTHERS = 64


def sample_of(vocab_size: int, device: torch.device) -> Tensor:
    """The fixed sample of the vocabulary, int64 `[at most 64]`."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    return order[:NUM_OTHERS].to(device)


class ShortHead(nn.Module):
    """Stands where the vocabulary product stood; gives logits of `top` (per position), then of `others` (fixed)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = [linear]  # in a list: its weights are the model's, and stay so when they are edited
        self.others = sample_of(linear.out_features, linear.weight.device)
        self.call = threading.local()  # `top`, int64 [N, T], set for the call

    def forward(self, hidden: Tensor) -> Tensor:
        """`[1, K * N, hidden_size]` -> `[1, K * N, T + len(others)]`, for K layers at the same N positions."""
        top: Tensor = self.call.top
        linear, size = self._linear[0], hidden.shape[-1]
        weight, bias = linear.weight, linear._parameters["bias"]
        x = hidden.view(-1, len(top), size).to(weight.dtype)  # [K, N, size]
        out = torch.matmul(x.transpose(0, 1), weight[top].transpose(1, 2)).transpose(0, 1)  # [K, N, T]
        rest = F.linear(x, weight[self.others], None if bias is None else bias[self.others])
        if bias is not None:
            out = out + bias[top]
        return torch.cat((out, rest), -1).view(1, hidden.shape[1], -1)


def short_head(head: Any, linear: Any) -> tuple[Any, ShortHead] | None:
    """The head view with its vocabulary product replaced; None where that is no plain, direct `nn.Linear` of it."""
    names = [name for name, module in head._modules.items() if module is linear]
    if type(linear) is not nn.Linear or len(names) != 1 or not is_dense(linear.weight):
        return None
    short, part = ShortHead(linear), copy.copy(head)
    part.__dict__["_modules"] = {**head._modules, names[0]: short}
    return part, short
