"""The training loss of an exit head, and how often its picks are the whole model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.control.acceptance import Tracker
from selfspec.learning.states import Positions, chunks, run_texts, with_rest
from selfspec.learning.written import Sample
from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel

OWN_SHARE, ZERO_SHARE = 0.3, 0.1  # of training positions; see `with_own_states`
OVERLAP_WEIGHT = 0.9  # of 1 - sum min(p, q) in the loss; the rest is cross-entropy
PRIOR_POSITIONS = 512  # of the acceptance prior


def logits_of(split: SplitModel, adapted: Tensor, subset: Subset | None) -> Tensor:
    """Logits in fp32 of hidden states `[N, hidden_size]` after a head, over the draft vocabulary or, None, all."""
    return split.head_logits(adapted, True) if subset is None else split.subset_logits(adapted, None, subset)


def with_own_states(
    split: SplitModel, heads: ExitHeads, layer: int, index: int, seen: Positions, at: Tensor, generator: torch.Generator
) -> Positions:
    """Positions of one exit for a step of training, whose `last` are those of drafts.

    At a first drafted token that is the final state. At later ones it is the head's own output one token before, after
    the final norm, for `OWN_SHARE` of the positions; zeros, where no state is known, for `ZERO_SHARE`.

    Args:
        index: the exit's place in `seen.hidden`.
        at: int64 `[N]`, the positions.
        generator: draws which is which.
    """
    batch, dice = seen.pick(index, at, split.device), torch.rand(len(at), generator=generator)
    is_later = (dice < OWN_SHARE) & (at > 0) & ~seen.is_first[at]
    own = is_later.nonzero()[:, 0]
    with torch.no_grad():
        if len(own):
            earlier = seen.pick(index, at[own] - 1, split.device)
            changed = heads(earlier.hidden, layer, earlier.last).to(split.dtype)
            batch.last[own.to(split.device)] = split.normed(changed).float()
        batch.last[(dice > 1 - ZERO_SHARE).to(split.device)] = 0
    return batch


def exit_loss(
    split: SplitModel, heads: ExitHeads, layer: int, seen: Positions, subset: Subset | None, by_kl: bool
) -> Tensor:
    """The loss of one exit, a float32 scalar.

    p is the whole model's distribution, q the exit's over the draft vocabulary. Both are known for the most probable
    tokens of p; all other tokens together, and those outside of the draft vocabulary, count as one token. So the sum of
    min(p, q) is at most min(p, q) of this token too high.

    The cross-entropy is with the model's greedy pick: that is what a greedy draft must equal, and without the noise of
    a sampled token.

    Args:
        seen: float32 and int64, `hidden` of this exit.
        subset: the draft vocabulary; None: the whole vocabulary.
        by_kl: forward KL divergence from p to q (arXiv 2310.07177), which has a gradient where p and q share nothing.
            Else 0.9 (1 - sum min(p, q)) + 0.1 cross-entropy: acceptance itself (arXiv 2310.08461).
    """
    places, is_draft = seen.ids, torch.ones_like(seen.ids, dtype=torch.bool)
    log_p = seen.log_probs
    if subset is not None:
        found = torch.full((split.vocab_size,), -1, device=seen.ids.device)
        found[subset.tokens] = torch.arange(len(subset.tokens), device=found.device)
        places = found[seen.ids]
        is_draft = places >= 0
        log_p = with_rest(log_p[:, :-1].masked_fill(~is_draft, float("-inf")))
    # The heads are float32; norm and head are the model's own, in its dtype, as in drafting.
    adapted = heads(seen.hidden, layer, seen.last).to(split.dtype)
    log_q = logits_of(split, adapted, subset).log_softmax(-1).gather(-1, places.clamp(min=0))
    log_q = with_rest(log_q.masked_fill(~is_draft, float("-inf")))
    if by_kl:
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    overlap = torch.minimum(log_p, log_q).exp().sum(-1).mean()
    cross_entropy = -(log_q[:, 0] * is_draft[:, 0]).mean()
    return OVERLAP_WEIGHT * (1 - overlap) + (1 - OVERLAP_WEIGHT) * cross_entropy


@torch.no_grad()
def agreement(
    split: SplitModel, heads: ExitHeads | None, layer: int, index: int, seen: Positions, subset: Subset | None
) -> float:
    """The share of positions at which the exit's greedy pick is the whole model's: acceptance of a first drafted token.

    Args:
        heads: None: the exit without a head.
        index: the exit's place in `seen.hidden`.
        subset: the draft vocabulary; None: the whole vocabulary.
    """
    same = 0
    for chunk in chunks(split, seen.number):
        own = seen.pick(index, chunk, split.device)
        hidden = own.hidden if heads is None else heads(own.hidden, layer, own.last)
        picks = logits_of(split, hidden.to(split.dtype), subset).argmax(-1)
        picks = picks if subset is None else subset.tokens[picks]
        same += int((picks == own.ids[:, 0]).sum())
    return same / seen.number


@torch.no_grad()
def acceptance_prior(split: SplitModel, texts: Sequence[Sample]) -> dict[str, Any]:
    """Statistics of all layers on texts, those with heads through them: the `prior` of a `Tracker`.

    Args:
        texts: their first positions are used, `PRIOR_POSITIONS` or a few more.
    """
    layers, tracker, number = tuple(range(1, split.num_layers)), Tracker(split.num_layers), 0
    for text in texts:
        for states in run_texts(split, [text], layers):
            picks = torch.cat(
                [split.logits(states.final[chunk]).argmax(-1) for chunk in chunks(split, len(states.final))]
            )
            for layer, hidden in zip(layers, states.hidden, strict=True):
                for chunk in chunks(split, len(hidden)):
                    changed = split.through_heads(hidden[None, chunk], (layer,), states.last[chunk])[0]
                    confidence, own = split.head_logits(changed, True).softmax(-1).max(-1)
                    tracker.add(layer, (own == picks[chunk]).tolist(), confidence.tolist())
            number += len(picks)
        if number >= PRIOR_POSITIONS:
            break
    return tracker.state()
