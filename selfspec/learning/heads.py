"""Initial exit heads for online learning: those of the target, and new ones, which are the identity."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

from selfspec.errors import whole
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.fingerprint import hidden_size_of, intermediate_size_of, weights_of
from selfspec.model.split_model import SplitModel


def first_layers(num_layers: int, own: int | None) -> set[int]:
    """A fifteenth, an eighth and a quarter of the layers, and the model's own exit layer."""
    some = {max(1, round(num_layers * depth)) for depth in (1 / 15, 1 / 8, 1 / 4)}
    return some | ({own} if own is not None and 1 <= own < num_layers else set())


def inner_size_of(split: SplitModel) -> int:
    """The inner width of new heads: half of that of the model's MLPs. Twice of it adds .01 to agreement."""
    return max(1, intermediate_size_of(split) // 2)


def extended(
    heads: ExitHeads | None, layers: Iterable[int], split: SplitModel, inner_size: int | None, seed: int
) -> ExitHeads:
    """A copy of `heads`, with new heads for further layers."""
    hidden_size = hidden_size_of(split)
    own = {} if heads is None else heads.state_dict()
    wanted = {whole("layers", layer, 1) for layer in layers}
    if heads is not None:
        inner_size, wanted = heads.inner_size, wanted | set(heads.layers)
    inner_size = inner_size_of(split) if inner_size is None else whole("inner_size", inner_size, 1)
    with torch.random.fork_rng(devices=[]):  # keeps the global generator's state
        torch.manual_seed(seed)
        made = ExitHeads(wanted, hidden_size, inner_size, weights_of(split))
    made.check(split.num_layers, hidden_size)
    made.load_state_dict(copy.deepcopy(own), strict=False)
    return made.requires_grad_(False)
