"""Inputs, outputs and memory of compiled rounds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from selfspec.control.ledger import OVERRUN, SHARE, Ledger
from selfspec.executors.cpu.body import FEW, CompiledBody
from selfspec.executors.cpu.grammars import ProgramGrammars
from selfspec.executors.cpu.packed import Packed, PackedExitHead, addresses_of
from selfspec.executors.cpu.pick_data import LogprobBuffers, PickData
from selfspec.executors.logprobs import TokenLogprobs
from selfspec.kernels import compiled_call as c
from selfspec.model.kv_cache import Span

MAX_HIDDEN_NUMBERS = 1 << 24  # hidden states and logits of a round together; 64 MiB


class StopRule(NamedTuple):
    """When rows stop drafting before their maximum draft length; see `selfspec.control.plan.Plan`."""

    min_confidence: float = 0.0
    edges: Sequence[float] = ()  # bounds between confidence bins
    calibration: Sequence[float] | None = None  # acceptance rate by confidence bin; None: each row stops on its own
    least: float = 0.0  # rows continue while their mean survival is at least this
    keep: float = 0.0  # a row's last token is withdrawn where its survival is less


class Drafter(NamedTuple):
    """The layers that draft, and their head and rules."""

    exit_layer: int
    head: tuple[Packed, Tensor | None]  # its weights, and the token ids of its outputs; None: the whole vocabulary
    stop_rule: StopRule
    with_confidence: bool  # report confidences
    rounded: bool  # draft by 4-bit copies of the layers
    exit_head: PackedExitHead | None = None  # the trained head of the exit layer


# The fields of a `selfspec.control.plan.LookupTable`: draft lengths, gains and needs.
Table = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]], Sequence[float]]


class ProgramLimits(NamedTuple):
    """When a program of rounds ends, and which of its rounds draft by lookup."""

    num_rounds: int  # maximum; a program also ends with the round in which a row ends
    seconds: float  # no round after the first begins later than this
    ends: Sequence[Sequence[int]]  # per row: tokens that end it
    indices: Sequence[int] | None = None  # per row: address of its compiled index, to which its tokens are added
    others: Sequence[tuple[int, int]] = ()  # source and address of the other texts that all rows look in
    table: Table | None = None  # draft lengths by lookup; needs `indices`
    most_forced: Sequence[int] = ()  # per row: maximum number of tokens drafted that its grammar forces; empty: none
    ledger: Ledger | None = None  # what drafts may lose; None: no limit

    @property
    def max_given_draft(self) -> int:
        """The maximum number of tokens that a row drafts by lookup or by its grammar."""
        return max(0 if self.table is None else max(map(max, self.table[0])), *self.most_forced, 0)


class RowResult(NamedTuple):
    """The result of one round for one row."""

    drafted: list[int]
    token_ids: list[int]  # new tokens: accepted drafts, then the target's own pick
    confidences: list[float]  # of the drafted tokens, the withdrawn one included; empty where they are not reported
    withdrawn: int | None  # a token drafted after them that was not verified
    match_length: int  # of a draft by lookup, else 0
    source: int  # of such a draft: one of `selfspec.control.plan.SOURCES`
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, if the row requests them


class HiddenStateBuffers(NamedTuple):
    """Where a round writes hidden states and logits of its tokens, in the order of its rows."""

    layers: Sequence[int]  # ascending
    hidden: Tensor  # fp32 [layers, at least the number of tokens, hidden_size], after each of the layers
    logits: Tensor  # fp32 [at least the number of tokens, vocab], the target's
    finals: Tensor | None  # fp32 [at least the number of tokens, hidden_size], after all layers; for exit heads

    @classmethod
    def allocate(
        cls, body: CompiledBody, layers: Sequence[int], num_tokens: int, has_heads: bool
    ) -> HiddenStateBuffers | None:
        """Buffers for `num_tokens` tokens; None if they exceed `MAX_HIDDEN_NUMBERS`."""
        size, vocab = body.embedding.shape[1], body.packed_head.num_outputs
        if num_tokens * ((len(layers) + 1) * size + vocab) > MAX_HIDDEN_NUMBERS:
            return None
        new = body.last_norm.new_empty
        finals = new(num_tokens, size) if has_heads else None
        return cls(layers, new(len(layers), num_tokens, size), new(num_tokens, vocab), finals)


class RoundResult(NamedTuple):
    """The result of one round."""

    rows: list[RowResult]
    is_given: bool  # no layer drafted
    draft_seconds: list[float]  # of layers, head and pick of the first drafted token; of the second; ...
    verify_seconds: list[float]  # of early layers on the last drafted tokens, then of all verifying layers, head, picks


class Buffers:
    """Inputs and outputs of up to `num_rounds` rounds of `count` rows that draft up to `max_draft` tokens each."""

    def __init__(self, body: CompiledBody, count: int, max_draft: int, num_rounds: int) -> None:
        self.count, self.max_draft, self.size = count, max_draft, (count, max_draft, num_rounds)
        self._positions, self._lengths, self._last, self._capacities, self._most_forced, self._leads = (
            _ints(count) for _ in range(6)
        )
        # One entry per round:
        self._drafted, self._counts, self._emitted, self._matches, self._sources = (
            _ints(num_rounds * count) for _ in range(5)
        )
        self._tokens = _ints(num_rounds * count * max_draft)
        self._picks = _ints(num_rounds * count * (max_draft + 1))
        self._confidences = (ctypes.c_float * (num_rounds * count * max_draft))()
        self._steps, self._taken = (
            (ctypes.c_double * (num_rounds * 3 * max_draft))(),
            (ctypes.c_double * (num_rounds * 4))(),
        )
        # Of the last round only:
        self._written = _ints(count * max_draft)
        self._hidden = body.last_norm.new_empty(count, max_draft, body.embedding.shape[1])
        # Inputs are kept here while the structures point to them. Equal inputs of later calls are not copied again.
        self._pages: tuple[list[tuple[int, ...]], Any] = [], None
        self._sampling: tuple[bytes, Any] = b"", None
        self._pick_data: PickData | None = None
        self._grammars: ProgramGrammars | None = None
        self._stop_rule: StopRule | None = None
        self._stop_arrays: Any = None
        self._table: tuple[Table | None, Sequence[Any]] = None, ()
        self._prices: tuple[Sequence[float] | None, Any] = None, None
        self._ends: tuple[Sequence[Sequence[int]], Any, Any] = [], None, None
        self._exit_head: PackedExitHead | None = None
        self._finals: Any = None
        self._indices = (ctypes.c_void_p * count)()
        self._texts: tuple[Any, Any] = (ctypes.c_void_p * 0)(), _ints(0)  # addresses and sources
        self.tables: tuple[Tensor, Tensor] | None = None  # the rotary angles that `draft` points to
        at = ctypes.addressof
        self.draft = c.DraftArgs(
            num_rows=count, most=max_draft, norm=body.last_norm.data_ptr(), eps=body.norm.eps,
            positions=at(self._positions), lengths=at(self._lengths), last=at(self._last), counts=at(self._drafted),
            tokens=at(self._written), hidden=self._hidden.data_ptr(), taken=at(self._steps),
        )  # fmt: skip
        self.verify = c.VerifyArgs(
            num_layers=len(body.layers), norm=body.last_norm.data_ptr(), few=FEW, most=max_draft,
            counts=at(self._counts), tokens=at(self._tokens), num_emitted=at(self._emitted), picks=at(self._picks),
            taken=at(self._taken),
        )  # fmt: skip
        self._given = _ints(num_rounds)
        self._taps = (ctypes.c_void_p * len(body.layers))()
        arrays = (one for one in vars(self).values() if isinstance(one, ctypes.Array))
        self.num_bytes = self._hidden.nbytes + sum(map(ctypes.sizeof, arrays))
        self._program = c.Program(
            rounds=1, capacities=at(self._capacities), given=at(self._given), matches=at(self._matches),
            drafted_from=at(self._sources),
        )  # fmt: skip
        self.arguments = [ctypes.byref(one) for one in (self.draft, self.verify, self._program)]

    def write_inputs(
        self, rows: Sequence[Span], lengths: list[int], last: Sequence[int], sampling: bytes, capacities: Sequence[int]
    ) -> None:
        """Write the rows of the first round; see `CompiledRounds.run` for the arguments."""
        self._positions[:] = [row.start for row in rows]
        self._lengths[:] = lengths
        self._last[:], self._capacities[:] = last, capacities
        for counts in (self._counts, self._drafted):
            counts[: self.count] = [0] * self.count
        for drafts in (self._matches, self._sources):
            ctypes.memset(drafts, 0, ctypes.sizeof(drafts))
        pages = [tuple(row.pages) for row in rows]
        if pages != self._pages[0]:
            longest = max(map(len, pages))
            flat = [page for own in pages for page in (*own, *[0] * (longest - len(own)))]
            self._pages = pages, (ctypes.c_int64 * len(flat))(*flat)
            self.draft.pages, self.draft.row_pages = ctypes.addressof(self._pages[1]), longest
        if sampling != self._sampling[0]:
            self._sampling = sampling, ctypes.create_string_buffer(sampling, len(sampling))
            self.draft.params = ctypes.addressof(self._sampling[1])

    def write_draft(self, row: int, tokens: Sequence[int]) -> None:
        """Write a draft of the first round that was made elsewhere."""
        count, at = len(tokens), row * self.max_draft
        self._counts[row] = count
        self._tokens[at : at + count] = tokens

    def set_drafter(self, drafter: Drafter) -> None:
        """Set the head and rules of the layers that draft."""
        packed, names = drafter.head
        draft, rule = self.draft, drafter.stop_rule
        draft.vocab, draft.names = packed.num_outputs, None if names is None else names.data_ptr()
        draft.confidences = ctypes.addressof(self._confidences) if drafter.with_confidence else None
        self._exit_head = exit_head = drafter.exit_head  # `draft` points to it
        draft.exit_head = None if exit_head is None else ctypes.addressof(exit_head.struct)
        if rule is not self._stop_rule:
            self._stop_rule = rule
            draft.stop, self._stop_arrays = stop_struct(rule)

    def set_finals(self, finals: Tensor | None) -> None:
        """Set the rows' final states `[count, hidden_size]`, which the program updates; None: there are none."""
        self._finals = None if finals is None else addresses_of(finals)  # `draft` points to it
        self.draft.finals = None if finals is None else ctypes.addressof(self._finals)

    def set_hidden_states(self, buffers: HiddenStateBuffers | None) -> None:
        """Set where the verification writes hidden states and logits; None: nowhere."""
        verify = self.verify
        verify.taps = verify.finals = verify.logits = None
        if buffers is not None:
            for i in range(verify.num_layers):
                self._taps[i] = None
            for layer, hidden in zip(buffers.layers, buffers.hidden, strict=True):
                self._taps[layer - 1] = hidden.data_ptr()
            verify.taps = ctypes.addressof(self._taps) if buffers.layers else None
            verify.logits = buffers.logits.data_ptr()
            verify.finals = None if buffers.finals is None else buffers.finals.data_ptr()

    def set_picks(self, data: PickData | None) -> LogprobBuffers | None:
        """Set the contents of rows with penalties or a bias. Return the buffers of log-probabilities, if any."""
        self._pick_data = data  # the program points to it
        program, verify = self._program, self.verify
        addresses = (None,) * 7 if data is None else data.texts()
        program.texts, program.text_ends, program.num_prompts = addresses[:3]
        program.bias_ends, program.bias_tokens, program.bias_until, program.bias = addresses[3:]
        logprobs = None if data is None else data.logprobs(self.max_draft, self.size[2])
        verify.num_likely = None
        if logprobs is not None:
            logprobs.set_outputs(verify)
        return logprobs

    def set_grammars(self, grammars: ProgramGrammars | None) -> None:
        """Set who follows the grammars of rows."""
        self._grammars = grammars  # the program calls it
        program = self._program
        program.follow = None if grammars is None else ctypes.cast(grammars.follow, ctypes.c_void_p).value
        program.has_grammar = None if grammars is None else grammars.has_grammar
        program.most_forced = None

    def set_limits(self, limits: ProgramLimits, is_given: bool) -> None:
        """Set when the program ends. `is_given`: no layer drafts in the first round."""
        program, table = self._program, limits.table
        self._given[0] = is_given
        program.rounds, program.seconds = limits.num_rounds, limits.seconds
        if limits.most_forced:
            self._most_forced[:] = limits.most_forced
            program.most_forced = ctypes.addressof(self._most_forced)
        self._set_ledger(limits.ledger)
        if limits.ends != self._ends[0] or self._ends[1] is None:
            flat = [token for own in limits.ends for token in own]
            offsets = [0, *accumulate(map(len, limits.ends))]
            self._ends = limits.ends, (ctypes.c_int64 * len(flat))(*flat), (ctypes.c_int64 * len(offsets))(*offsets)
        program.ends, program.stops = map(ctypes.addressof, self._ends[1:])
        program.indices = None if limits.indices is None else ctypes.addressof(self._indices)
        if limits.indices is None or table is None:
            return
        self._indices[:] = [*limits.indices]
        sources, addresses = [source for source, _ in limits.others], [address for _, address in limits.others]
        count = program.num_others = len(addresses)
        self._texts = (ctypes.c_void_p * count)(*addresses), (ctypes.c_int64 * count)(*sources)
        program.others, program.sources = [ctypes.addressof(part) for part in self._texts]
        if table is not self._table[0]:
            lengths, gains, needs = table
            flat_lengths = [min(n, self.max_draft) for own in lengths for n in own]  # they may exceed 64 bits
            flat_gains = [gain for own in gains for gain in own]
            arrays = (ctypes.c_int64 * len(flat_lengths))(*flat_lengths), doubles(flat_gains), doubles(needs)
            self._table = table, arrays
        program.lengths, program.gains, program.needs = map(ctypes.addressof, self._table[1])
        program.num_needs = len(table[2])

    def _set_ledger(self, ledger: Ledger | None) -> None:
        program = self._program
        if ledger is None:
            program.balance, program.layers_price, program.prices = 0.0, 0.0, None
            return
        if ledger.lookup_prices is not self._prices[0]:
            self._prices = ledger.lookup_prices, doubles(ledger.lookup_prices)
        program.balance, program.share, program.most_balance = ledger.balance, SHARE, ledger.most
        program.overrun = OVERRUN
        self._leads[:] = ledger.leads if len(ledger.leads) == len(self._leads) else [0] * len(self._leads)
        program.has_waiting, program.has_overrun = ledger.has_waiting, ledger.has_overrun
        program.leads = ctypes.addressof(self._leads)
        program.plain_seconds, program.layers_price = ledger.plain_seconds, ledger.layers_price
        program.prices, program.num_prices = ctypes.addressof(self._prices[1]), len(ledger.lookup_prices)

    def read_results(self, drafter: Drafter | None, logprobs: LogprobBuffers | None = None) -> list[RoundResult]:
        """The results of all rounds that ran."""
        num_rounds, count = self._program.done, self.count
        own, max_draft = num_rounds * count, self.max_draft
        with_confidence = drafter is not None and drafter.with_confidence
        counts, emitted, matches, sources = (
            part[:own] for part in (self._counts, self._emitted, self._matches, self._sources)
        )
        given, drafted, taken = self._given[:num_rounds], self._drafted[:own], self._taken[: 4 * num_rounds]
        # These are not copied as a whole: a round may have filled a small part of them.
        tokens, steps, picks, confidences = self._tokens, self._steps, self._picks, self._confidences
        rows = []
        for at, (length, num_emitted, match, source) in enumerate(zip(counts, emitted, matches, sources, strict=True)):
            first, to = at * max_draft, at * (max_draft + 1)
            token_ids = picks[to : to + num_emitted]
            # Confidences are those of layers; tokens by lookup have none.
            own_confidences = confidences[first : first + drafted[at]] if with_confidence else []
            row_logprobs = None if logprobs is None else logprobs.read(at, token_ids)
            drafted_tokens = tokens[first : first + length]
            withdrawn = tokens[first + length] if drafted[at] > length else None
            rows.append(RowResult(drafted_tokens, token_ids, own_confidences, withdrawn, match, source, row_logprobs))
        results = []
        for at in range(num_rounds):
            row, step = at * count, at * 3 * max_draft
            last, seconds = (
                step if given[at] else step + 3 * max(drafted[row : row + count]),
                taken[4 * at : 4 * at + 4],
            )
            results.append(RoundResult(rows[row : row + count], bool(given[at]), steps[step:last], seconds))
        return results


def stop_struct(rule: StopRule) -> tuple[c.Stop, Any]:
    """The structure of a stop rule, and the arrays that it points to, which the caller keeps as long."""
    edges, calibration = doubles(rule.edges), None if rule.calibration is None else doubles(rule.calibration)
    place = None if calibration is None else ctypes.addressof(calibration)
    bounds = rule.min_confidence, rule.least, rule.keep
    return c.Stop(*bounds, ctypes.addressof(edges), place, len(edges)), (edges, calibration)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """A C array of float64 numbers."""
    return (ctypes.c_double * len(values))(*values)


def _ints(count: int) -> Any:
    return (ctypes.c_int64 * count)()
