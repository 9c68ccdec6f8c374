"""The training loss of exit heads, and their agreement with the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.model.draft_vocabulary import Frequencies, Subset
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel
from train.heads_states import Batch, chunks, run_texts, with_rest
from train.samples import Sample

OVERLAP_WEIGHT = 0.9  # of 1 - sum min(p, q) in the loss; the rest is cross-entropy


class Agreement(NamedTuple):
    """Agreement of one exit with the whole model over held-out positions."""

    top1: float
    """Share of positions with the same most probable token: greedy acceptance."""
    accepted: float
    """Mean of the sum over tokens of min(p, q), at temperature 1: acceptance when sampling (arXiv 2211.17192)."""


def draft_subset(split: SplitModel, texts: Sequence[Sample]) -> Subset | None:
    """The tokens that drafts are over by default, from their frequencies in texts; None: the whole vocabulary."""
    size = split.default_draft_vocab
    if size is None:
        return None
    frequencies = Frequencies(split.vocab_size)
    for text in texts:
        frequencies.add(text.tokens[text.num_prompt :])
    return split.subset_of(frequencies.top(size))


def exit_losses(split: SplitModel, heads: ExitHeads, batch: Batch, subset: Subset | None, by_kl: bool) -> list[Tensor]:
    """The loss of each exit of the heads, a float32 scalar each.

    p is the whole model's distribution, q the exit's over the draft vocabulary. Both are known for the most probable
    tokens of p; all other tokens together, and those outside of the draft vocabulary, count as one token. So the sum of
    min(p, q) is at most min(p, q) of this token too high.

    The cross-entropy is with the model's greedy pick: that is what a greedy draft must equal, and without the noise of
    a sampled token.

    Args:
        subset: the draft vocabulary; None: the whole vocabulary.
        by_kl: forward KL divergence from p to q (arXiv 2310.07177), which has a gradient where p and q share nothing.
            Else 0.9 (1 - sum min(p, q)) + 0.1 cross-entropy: acceptance itself (arXiv 2310.08461).
    """
    places, is_draft = batch.ids, torch.ones_like(batch.ids, dtype=torch.bool)
    log_p = batch.log_probs
    if subset is not None:
        found = torch.full((split.vocab_size,), -1, device=batch.ids.device)
        found[subset.tokens] = torch.arange(len(subset.tokens), device=found.device)
        places = found[batch.ids]
        is_draft = places >= 0
        log_p = with_rest(log_p[:, :-1].masked_fill(~is_draft, float("-inf")))
    losses = []
    for layer, hidden in zip(heads.layers, batch.hidden, strict=True):
        # The heads are float32; norm and head are the model's own, in its dtype, as in drafting.
        adapted = heads(hidden, layer).to(split.dtype)
        logits = split.logits(adapted, layer) if subset is None else split.subset_logits(adapted, layer, subset)
        log_q = logits.log_softmax(-1).gather(-1, places.clamp(min=0))
        log_q = with_rest(log_q.masked_fill(~is_draft, float("-inf")))
        if by_kl:
            losses.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            continue
        overlap = torch.minimum(log_p, log_q).exp().sum(-1).mean()
        cross_entropy = -(log_q[:, 0] * is_draft[:, 0]).mean()
        losses.append(OVERLAP_WEIGHT * (1 - overlap) + (1 - OVERLAP_WEIGHT) * cross_entropy)
    return losses


@torch.no_grad()
def measure(
    split: SplitModel, heads: ExitHeads | None, texts: Sequence[Sample], exits: Sequence[int], subset: Subset | None
) -> dict[int, Agreement]:
    """Agreement of exits with the whole model on texts, at positions that the model wrote, as in drafting.

    Args:
        heads: they are measured in the model's dtype. None: exits without heads.
        subset: the draft vocabulary; None: the whole vocabulary.
    """
    ready = None if heads is None else copy.deepcopy(heads).to(split.device, split.dtype)
    same, shared = torch.zeros(len(exits)), torch.zeros(len(exits))
    number = 0
    for seen in run_texts(split, texts, exits):
        number += len(seen.final)
        for chunk in chunks(split, len(seen.final)):
            p = split.logits(seen.final[chunk]).softmax(-1)
            target, drafted = p.argmax(-1), p if subset is None else p[:, subset.tokens]
            for index, layer in enumerate(exits):
                hidden = seen.hidden[index, chunk]
                hidden = hidden if ready is None else ready(hidden, layer)
                logits = split.logits(hidden, layer) if subset is None else split.subset_logits(hidden, layer, subset)
                q = logits.softmax(-1)
                picks = q.argmax(-1) if subset is None else subset.tokens[q.argmax(-1)]
                same[index] += (picks == target).sum().cpu()
                shared[index] += torch.minimum(drafted, q).sum().cpu()
    found = zip(exits, (same / number).tolist(), (shared / number).tolist(), strict=True)
    return {layer: Agreement(top1, accepted) for layer, top1, accepted in found}
