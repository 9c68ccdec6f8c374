"""Check at load of the kernels of second choices, which a round rarely needs and which no other check would reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS
from selfspec.kernels import reference, reference_trees
from selfspec.kernels.layout import SamplingTensors
from selfspec.kernels.suite import Kernels

SLOTS, LENGTH, MOST, TOKENS = 8, 4, 3, 500


@torch.inference_mode()
def second_choices_problem(kernels: Kernels, device: torch.device) -> str | None:
    """The name of a kernel that differs from its reference on a fixed example; None if none does."""
    rng = torch.Generator().manual_seed(0)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=rng).to(device)

    zeros = torch.zeros(SLOTS, device=device)
    sampling = SamplingTensors(
        zeros + 1, zeros.int(), zeros + 1, zeros, whole(99, SLOTS), whole(99, SLOTS), True, False
    )
    logits, names = torch.randn(SLOTS, TOKENS, generator=rng).to(device), 2 * torch.arange(TOKENS, device=device)
    picked = [one(logits, sampling, None, names) for one in (kernels.pick_two, reference.pick_two)]
    rates = torch.rand(2 + 2 * NUM_BINS, generator=rng, dtype=torch.float64)
    rates[:2] = torch.tensor([0.05, 0.1])
    edges = torch.tensor(CONFIDENCE_EDGES, dtype=torch.float64)
    chains = torch.arange(SLOTS, device=device) % (LENGTH + 2) - 1
    given = (
        whole(9, SLOTS), whole(9, SLOTS, LENGTH), 9 + whole(9, SLOTS, LENGTH),
        torch.rand(SLOTS, LENGTH, generator=rng).to(device), chains, 1 + whole(90, SLOTS), 2 + chains + whole(5, SLOTS),
        rates.to(device), edges.to(device), MOST,
    )  # fmt: skip
    grown = [one(*given) for one in (kernels.grow, reference_trees.grow)]
    tree = grown[1]
    parents = torch.where(tree.parents < 0, tree.tokens.shape[1] - 1, tree.parents).long()
    right = torch.zeros_like(tree.tokens).scatter(1, parents, tree.tokens)  # of a node's children, one is right
    followed = [one(tree, right.flatten(), LENGTH + 1) for one in (kernels.follow, reference_trees.follow)]
    pages = [torch.arange(2 * 64 * 8.0, device=device).view(2, 4, 16, 2, 4).clone() for _ in range(2)]
    source, target = torch.tensor([[40, 3, 63], [7, -1, 0]]).to(device)
    for one, held in zip((kernels.move, reference_trees.move), pages, strict=True):
        one(held[0], held[1], source, target)
    pairs: dict[str, list[Any]] = {
        "pick_two": [one[::2] for one in picked], "grow": grown, "follow": followed, "move": [[one] for one in pages]
    }  # fmt: skip
    for name, (got, wanted) in pairs.items():
        if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
            return name
    return None
