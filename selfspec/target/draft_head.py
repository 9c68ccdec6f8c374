"""A draft's head over the tokens that occur most: a small part of a large vocabulary covers nearly all of a text.

In a model of a large vocabulary the head costs as much as several layers, and a draft pays for it at every token. A
draft that is picked among fewer tokens is right nearly as often, and the target judges it over all of them, so that the
output is the same (frequency-ranked drafts: FR-Spec, arXiv 2502.14856). Ranks are learned while running; until then
they are the order of token ids, in which tokenizers number their merges: the most frequent come first.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.kernels.room import Room
from selfspec.target.compiled import CompiledBody
from selfspec.target.lean import LeanBody, Linear
from selfspec.target.packed import Packed

AT_LEAST = 256  # new tokens before ranks are learned anew; later, as many as a quarter of all seen


class Frequencies:
    """How often tokens were seen in prompts and outputs."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._counts: Counter[int] = Counter()
        self._seen = self._ranked = 0
        self.version = 0
        """Grows when it is time to rank anew."""

    def add(self, tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        self._counts.update(tokens)
        self._seen += len(tokens)
        if self._seen - self._ranked >= max(AT_LEAST, self._ranked // 4):
            self._ranked, self.version = self._seen, self.version + 1

    def top(self, size: int) -> Tensor:
        """The most frequent tokens, int64 `[size]`, ascending; those never seen by their ids."""
        seen = sorted(self._counts, key=lambda token: (-self._counts[token], token))[:size]
        known = set(seen)
        rest = (token for token in range(self.vocab_size) if token not in known)
        return torch.tensor(sorted([*seen, *(next(rest) for _ in range(size - len(seen)))]))


class Subset(NamedTuple):
    """Some tokens of a vocabulary, and the head's rows for them."""

    tokens: Tensor  # int64 [size], ascending
    linear: Linear  # copies
    packed: Packed | None  # where the compiled body runs
    made_of: tuple[int, int]  # the ranks' version and the head's, when it was made


class DraftHead(nn.Module):
    """Stands where the vocabulary product stood in a view of the model's head; gives logits of a subset's tokens."""

    def __init__(self, head: Any, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self._linear = [linear]  # in a list: its weights are the model's
        self._subsets: dict[int, Subset] = {}
        self.view = copy.copy(head)
        self.view.__dict__["_modules"] = {**head._modules, name: self}
        self._call = threading.local()  # the weights of the call in progress

    @classmethod
    def of(cls, head: Any, linear: Any) -> DraftHead | None:
        """None where the vocabulary product is no plain `nn.Linear` of the head."""
        names = [name for name, module in head._modules.items() if module is linear]
        return cls(head, linear, names[0]) if type(linear) is nn.Linear and len(names) == 1 else None

    def subset(self, size: int, frequencies: Frequencies, packs: bool) -> Subset:
        """The most frequent tokens as ranked now, with the head's weights as they are now."""
        linear, known = self._linear[0], self._subsets.get(size)
        edits = 0 if linear.weight.is_inference() else linear.weight._version
        made_of = (frequencies.version, edits)
        if known is None or known.made_of != made_of or (known.packed is not None) != packs:
            tokens = frequencies.top(size).to(linear.weight.device)
            with torch.inference_mode(False), torch.no_grad():
                bias = linear._parameters["bias"]
                rows = Linear(linear.weight.detach()[tokens], None if bias is None else bias.detach()[tokens])
            known = self._subsets[size] = Subset(tokens, rows, Packed([rows], Room()) if packs else None, made_of)
        return known

    def logits(self, hidden: Tensor, subset: Subset, normed: Any, body: LeanBody | None) -> Tensor:
        """Logits `[N, size]` in fp32 of a subset, from hidden states `[N, hidden_size]` before the final norm."""
        if isinstance(body, CompiledBody) and subset.packed is not None:
            return body.product(subset.packed, hidden, norm=True)
        if body is not None:
            return F.linear(normed(hidden), *subset.linear).float()
        self._call.linear = subset.linear
        return self.view(inputs_embeds=normed(hidden)[None]).logits[0].float()

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, *self._call.linear)
