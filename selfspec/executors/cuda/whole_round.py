"""One round, from drafting to acceptance, as one recording that never waits for the host.

Every row has `width` places: one for its last token and one per drafted token, used or not. With second choices it has
some more. Drafts stop by masks, not by control flow. One upload writes the rows, and one copy to the host returns the
results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES
from selfspec.executors.cuda.round_inputs import FIELDS, RoundInputs
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import DraftTree, Layout, SamplingTensors, Trees
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PagedCache

Fields = dict[str, Tensor]  # the columns of `RoundInputs.rows`, `[slots]` each


class Drafted(NamedTuple):
    """The nodes of all drafts, `[slots, nodes]`, ready to be verified."""

    tokens: Tensor  # int64 [slots, nodes], the last token of each row first
    hidden: Tensor  # [slots * nodes, hidden_size] after the exit layer; the tokens themselves if no layer drafted
    counts: Tensor  # int64 [slots], nodes that are used
    tree: DraftTree | None = None  # None: the drafts are chains


class WholeRound:
    """The body of a recorded round. It holds the constants that the recording reads.

    Args:
        stack: runs layers (`run_here`) and heads (`logits`, `subset_logits`).
        cache: the KV cache.
        kernels: attend, pick, accept, and grow, follow and move second choices.
        inputs: the input buffers.
    """

    def __init__(self, stack: Any, cache: PagedCache, kernels: Kernels, inputs: RoundInputs) -> None:
        self.stack, self.cache, self.kernels, self.inputs, self.key = stack, cache, kernels, inputs, inputs.key
        device = inputs.rows.device
        self._slots = torch.arange(self.key.slots, device=device)
        self._places = torch.arange(self.key.nodes, device=device)
        edges = torch.tensor(CONFIDENCE_EDGES, dtype=torch.float64)
        self._edges = edges.to(device)

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a round, and turn the inputs into those of the next round.

        Returns the record, int64 `[slots, fields]`; see `round_inputs.read_record`.
        """
        key = self.key
        fields = dict(zip(FIELDS, self.inputs.rows.unbind(1), strict=False))
        fields |= {name: fields[name].int().view(torch.float32) for name in ("temperature", "top_p", "min_p")}
        fields["drafts"] = torch.minimum(fields["drafts"], fields["room"] - 1)
        live = fields["content"] > 0
        sure = torch.zeros((key.slots, key.width - 1), dtype=torch.float32, device=live.device)
        if key.exit_layer:
            draft = self._draft(fields, live, sure)
        else:
            fed = torch.cat([fields["last"][:, None], self.inputs.rows[:, -key.width : -1]], 1)
            draft = Drafted(fed, fed.flatten(), (fields["drafts"] + 1) * live)
        rows, positions = self._drafted_rows(fields, draft)
        last = self.stack.run_here(rows, key.exit_layer, self.stack.num_layers, draft.hidden)
        picks, _ = self.kernels.pick(self.stack.logits(last), self._sampling(fields, positions + 1))
        record = [sure.view(torch.int32).long()]
        tokens, starts, counts = draft.tokens.flatten(), rows.layout.starts, rows.layout.counts
        if draft.tree is not None:
            tree, branches = draft.tree, self.kernels.follow(draft.tree, picks, key.width)
            self._settle(fields["content"], branches.nodes, branches.depths)
            line = torch.stack((tree.counts, tree.chains, branches.nodes), 1)
            record.append(torch.cat((line, tree.tokens, tree.parents), 1))
            tokens, picks, counts = branches.tokens, branches.picks, branches.counts
            starts = (self._slots * key.width).int()
        eos = self.inputs.rows[:, len(FIELDS) : len(FIELDS) + key.most_eos].contiguous()
        done = self.kernels.accept(tokens, picks, starts, counts, fields["room"].int(), eos, key.width)
        self.kernels.advance(self.inputs.rows, done.num_kept, done.ended, done.last)
        return (torch.cat((done.record, *record), 1),)

    def _draft(self, fields: Fields, live: Tensor, sure: Tensor) -> Drafted:
        """Draft, and write confidences to `sure`, fp32 `[slots, width - 1]`.

        As in `selfspec.drafting.early_exit`, a row that stops still feeds the token that it has just drafted; with
        second choices, it feeds that token together with them.
        """
        key, token, going = self.key, fields["last"], live
        wanted, survival = fields["drafts"], torch.ones(key.slots, dtype=torch.float64, device=live.device)
        fed, hidden, others = list[Tensor](), list[Tensor](), list[Tensor]()
        counts = torch.zeros_like(wanted)
        for step in range(key.width):
            if key.seconds:
                if step == key.width - 1:
                    break
                going = going & (wanted > step)
            hidden.append(self._feed(fields, step, going, token))
            fed.append(token)
            counts = counts + going
            if step == key.width - 1:
                break
            going = going & (wanted > step)
            token, others_here = self._pick_draft(fields, step, hidden[-1], going, token, sure)
            others += others_here
            if key.stop != "none":
                continues, survival = self._continues(sure[:, step].double(), going, survival)
                wanted = torch.where(going & ~continues, step + 1, wanted)
        if key.seconds:
            chains = torch.where(live, counts, -1)
            drafted = torch.stack([*fed[1:], token], 1)
            return self._with_seconds(fields, drafted, torch.stack(others, 1), sure, chains, hidden)
        return Drafted(torch.stack(fed, 1), torch.stack(hidden, 1).flatten(0, 1), counts)

    def _feed(self, fields: Fields, step: int, going: Tensor, token: Tensor) -> Tensor:
        """Run one token of each row that is going through the early layers; `[slots, hidden_size]`."""
        content = fields["content"] + step
        rows = self._rows(content[:, None] - 1, going[:, None], going.long(), content * going)
        state: Tensor = self.stack.run_here(rows, 0, self.key.exit_layer, token)
        return state

    def _pick_draft(
        self, fields: Fields, step: int, state: Tensor, going: Tensor, token: Tensor, sure: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The rows' next tokens, `[slots]`, where they are going, and second choices, if the plan has any."""
        key, part = self.key, self.inputs.part
        sampling = self._sampling(fields, (fields["content"] + step)[:, None])
        if part is None:
            logits, names = self.stack.logits(state, key.exit_layer), {}
        else:
            logits, names = self.stack.subset_logits(state, key.exit_layer, part), {"names": part.tokens}
        picks, confidence, *others = (self.kernels.pick_two if key.seconds else self.kernels.pick)(
            logits, sampling, **names
        )
        sure[:, step] = confidence
        return torch.where(going, picks, token), others

    def _continues(self, sure: Tensor, going: Tensor, survival: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows draft one more token, bool `[slots]`, and the rows' survival; see `SurvivalStop`."""
        stops = self.inputs.stops
        if self.key.stop == "confidence":
            return sure >= stops[0], survival
        bins = torch.bucketize(sure, self._edges, right=True)
        survival = torch.where(going, survival * stops[2:][bins], survival)
        enough = torch.where(going, survival, 0).sum() >= stops[1] * going.sum()
        return enough.expand_as(going), survival

    def _with_seconds(
        self, fields: Fields, drafted: Tensor, others: Tensor, sure: Tensor, chains: Tensor, hidden: list[Tensor]
    ) -> Drafted:
        """Choose second choices, and run them with the last token of every chain through the early layers.

        `hidden` has the states of the chains' other tokens, `[slots, hidden_size]` per step.
        """
        key, places = self.key, torch.clamp(chains, min=0)[:, None]
        last, content, room = (fields[name].contiguous() for name in ("last", "content", "room"))
        tree = self.kernels.grow(
            last, drafted, others, sure, chains, content, room, self.inputs.rule, self._edges, key.seconds
        )
        offsets = self._places[: 1 + key.seconds]
        nodes = places + offsets  # [slots, 1 + seconds]: the last one of the chain, then second choices
        used = nodes < tree.counts[:, None]
        counts = (tree.counts - tree.chains) * (tree.counts > 0)
        ancestors = tree.ancestors.gather(1, nodes).flatten()
        positions = tree.positions.gather(1, nodes).long()
        rows = self._rows(
            fields["content"][:, None] - 1 + nodes, used, counts, fields["content"] - 1 + tree.counts,
            positions, self._trees(fields, tree, ancestors),
        )  # fmt: skip
        state = self.stack.run_here(rows, 0, key.exit_layer, tree.tokens.gather(1, nodes).flatten())
        states = torch.cat((torch.stack(hidden, 1), state.view(key.slots, len(offsets), -1)), 1)
        at = torch.where(self._places < places, self._places, self._places - places + key.width - 1)
        at = torch.clamp(at, max=states.shape[1] - 1)
        index = self._slots[:, None] * states.shape[1] + at
        return Drafted(tree.tokens, states.flatten(0, 1)[index.flatten()], tree.counts.long(), tree)

    def _drafted_rows(self, fields: Fields, draft: Drafted) -> tuple[StaticRows, Tensor]:
        """The rows of the verification, and the positions of its places, `[slots, nodes]`."""
        content, tree = fields["content"], draft.tree
        used = self._places < draft.counts[:, None]
        at = content[:, None] - 1 + self._places
        if tree is None:
            return self._rows(at, used, draft.counts, content - 1 + draft.counts), at
        positions = tree.positions[:, : self.key.nodes].long()
        trees = self._trees(fields, tree, tree.ancestors.flatten())
        return self._rows(at, used, draft.counts, content - 1 + draft.counts, positions, trees), positions

    def _trees(self, fields: Fields, tree: DraftTree, ancestors: Tensor) -> Trees:
        return Trees((fields["content"] - 1).clamp(min=0).int(), tree.positions, ancestors)

    def _settle(self, content: Tensor, nodes: Tensor, depths: Tensor) -> None:
        """Move keys and values of accepted second choices to their positions. `nodes`: int32 `[slots]`; 0: none."""
        places = [self._slots_of((content - 1 + one)[:, None], (nodes > 0)[:, None])[:, 0] for one in (nodes, depths)]
        source, target = (one.contiguous() for one in places)
        for keys, values in self.cache.storages:
            self.kernels.move(keys, values, source, target)

    def _slots_of(self, places: Tensor, used: Tensor) -> Tensor:
        """Where tokens `places` of each row lie in the cache, int64 `[slots, n]`; -1 where they are not used."""
        size = self.cache.page_size
        places = torch.where(used, places, 0)
        pages = self.inputs.pages.gather(1, places // size).long()
        return torch.where(used, pages * size + places % size, -1)

    def _rows(
        self,
        places: Tensor,
        used: Tensor,
        counts: Tensor,
        lengths: Tensor,
        positions: Tensor | None = None,
        trees: Trees | None = None,
    ) -> StaticRows:
        """The rows of a call with n places per slot.

        Args:
            places: int64 `[slots, n]`, which token of its row each is.
            used: bool `[slots, n]`.
            counts: `[slots]`, used places.
            lengths: `[slots]`, tokens that the row then holds.
            positions: int64 `[slots, n]`, if they are other than `places`: in trees.
        """
        key, n = self.key, places.shape[1]
        slots = self._slots_of(places, used)
        positions = torch.where(used, places if positions is None else positions, 0)
        owners = torch.where(used, self._slots[:, None], -1)
        layout = Layout(
            (self._slots * n).int(), counts.int(), (lengths * (counts > 0)).int(), self.inputs.pages,
            owners.flatten().int(), slots.flatten(), positions.flatten(), n, key.most_tokens, trees,
        )  # fmt: skip
        return StaticRows(self.cache, layout, self.kernels)

    def _sampling(self, fields: Fields, positions: Tensor) -> SamplingTensors:
        """The sampling of `slots * n` picks at `positions`, `[slots, n]`: the n places of a slot share theirs."""
        n = positions.shape[1]
        # `contiguous`: for one slot or one place, `flatten` returns a view with strides that the kernel does not read.
        each = {name: fields[name][:, None].expand(-1, n).flatten().contiguous() for name in FIELDS[4:]}
        return SamplingTensors(
            each["temperature"], each["top_k"].int(), each["top_p"], each["min_p"], each["seed"], positions.flatten(),
            self.key.sampled, self.key.filtered,
        )  # fmt: skip
