"""The nouns of selfspec: what is asked for, what is decoded, what is planned, and what came of it.

No torch: every part imports them from here. The engine's step in these words: a policy makes a `Plan` for the running
sequences, an executor runs it and returns `RoundOutput`s, and the policy observes them. What callers set is in
`params.py`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from selfspec.params import LogitsProcessor, SamplingParams

if TYPE_CHECKING:  # for annotations alone
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from selfspec.control.ledger import Ledger
    from selfspec.control.plan import LookupTable, ShadowPlan, SurvivalStop
    from selfspec.decoding.outputs import SpecStats
    from selfspec.decoding.stopping import Stopper, TextDelta
    from selfspec.drafting.lookup import RowLookup
    from selfspec.executors.logprobs import TokenLogprobs
    from selfspec.structured.row_grammar import RowGrammar

FinishReason = Literal["stop", "length", "abort"]
StoppingCriterion = Callable[[Any, Any], Any]  # (token ids [1, length], None) -> whether the output ends here
DEFAULT_MAX_TOKENS = 128
LOOKUP = 0  # the exit layer of drafts by lookup: no layer drafts, all layers verify
UNBOUNDED_ROUNDS = 1 << 30  # `num_rounds` of a plan that never changes


@dataclass(frozen=True, slots=True)
class Request:
    """One output to decode: a prompt's tokens and how they are continued, completed by the model's defaults.

    Args:
        eos_token_ids: tokens that end the text.
        stopping_criteria: asked after every kept token.
        keep_logits: keep every new token's logits `[vocab]`, before processors, and scores, after filters.
        reserve: new tokens that pages are taken for at a time; None: for `max_tokens`, when it joins the batch.

    Raises:
        ValueError: an empty prompt.
    """

    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    keep_logits: bool = False
    reserve: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt is empty; give at least one token to continue")

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens or DEFAULT_MAX_TOKENS


@dataclass(slots=True, eq=False)
class Sequence:
    """One output being decoded. Keys and values of its first `num_cached` tokens are valid: all but the last token."""

    seq_id: int
    request: Request
    token_ids: list[int]  # prompt and output
    max_length: int  # tokens of prompt and output
    num_reserved: int = field(default=0, kw_only=True)  # tokens that its pages are taken for; 0: `max_length`
    request_id: str = ""
    index: int = 0  # which of the request's `n` outputs
    stopper: Stopper = None  # type: ignore[assignment]  # set by the scheduler
    grammar: RowGrammar | None = None  # of structured outputs
    pages: tuple[int, ...] = ()  # its KV pages, in order
    num_cached: int = 0
    num_found: int = 0  # prompt tokens whose keys and values were in the prefix cache
    finish_reason: FinishReason | None = None
    stats: SpecStats = None  # type: ignore[assignment]  # set by the scheduler
    logits: list[Tensor] = field(default_factory=list)  # of its new tokens, where the request keeps them
    scores: list[Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its new tokens, where asked
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first
    blocks: list[Any] = field(default_factory=list)  # its first pages, which other sequences may read
    num_edits: int | None = None  # of weights in place, before it joined; None: no prefix cache
    processors: dict[tuple[int, ...], list[LogitsProcessor]] = field(default_factory=dict)  # copies, by output so far
    has_pages: bool = False  # they are given back once
    problem: BaseException | None = None  # of its processor, criterion or grammar; the engine aborts it then
    final_state: Tensor | None = None  # [hidden_size], the model's, of the token `final_at`; where exit heads are used
    final_at: int = -1
    new_lookup: Callable[[abc.Sequence[int]], RowLookup] | None = None  # of its tokens; None: no lookup
    _lookup: RowLookup | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still emit."""
        return min(self.max_length, self.num_reserved or self.max_length) - len(self.token_ids)

    @property
    def lookup(self) -> RowLookup:
        """Drafts by lookup, and how often they would have been right. Its index is built at the first use."""
        if self._lookup is None:
            assert self.new_lookup is not None
            self._lookup = self.new_lookup(self.token_ids)
        return self._lookup

    @property
    def identity(self) -> tuple[int, int]:
        """Constant while the sequence lives, and different from other sequences."""
        return self.seq_id, self.max_length

    @property
    def is_prefilled(self) -> bool:
        return self.num_cached == len(self.token_ids) - 1

    @property
    def has_processors(self) -> bool:
        return bool(self.request.params.logits_processors)

    @property
    def needs_vocabulary(self) -> bool:
        """Whether drafts are over the whole vocabulary: a part of it may hold no token that is allowed."""
        return self.has_processors or self.grammar is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, row: RowRound) -> None:
        """Take a round's tokens; keys and values beyond them are left to be overwritten."""
        self.token_ids += row.token_ids
        self.num_cached = len(self.token_ids) - 1
        self.logprobs += row.logprobs or []
        if row.logits is not None and row.scores is not None:
            self.logits += row.logits[: len(row.token_ids)]
            self.scores += row.scores[: len(row.token_ids)]

    def blame(self) -> _Blame:
        """A context in which what is raised is this request's fault: its own code runs there."""
        return _Blame(self)


class _Blame(NamedTuple):
    sequence: Sequence

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.sequence.problem = self.sequence.problem or problem


class Draft(NamedTuple):
    """What a drafter proposes for one sequence without running layers."""

    token_ids: list[int]
    match_length: int = 0  # of the text that it continues; of forced tokens, their number
    source: int = 0  # one of `control.plan.SOURCES`, or `control.plan.GRAMMAR`


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: up to `num_rounds` rounds of a batch, each with one draft and one verification.

    A plan ends early when a sequence ends, when its deadline has passed, and after the round with shadow picks. At
    least one round runs.

    Both stop rules (`min_confidence`, `stop`) end a row's draft after a token; `stop` may withdraw that token, which
    changes no output. Recorded rounds (CUDA) have no stop rules.

    Args:
        exit_layer: number of layers that draft. None: plain decoding. 0 (`LOOKUP`): every row drafts the tokens that
            followed the latest earlier occurrence of its last tokens, and all layers verify.
        draft_lengths: maximum tokens to draft per row; cut to the tokens that the row may still emit.
    """

    exit_layer: int | None
    draft_lengths: tuple[int, ...]
    min_confidence: float = 0.0  # a row stops after a drafted token of lower probability; excludes `stop`
    stop: SurvivalStop | None = None
    keep_confidence: bool = False  # report confidences of drafted tokens even where no stop rule needs them
    keep_divergence: bool = False  # report KL(target || draft) at the judged positions
    shadow: ShadowPlan | None = None  # a probe after the first round that is not drafted by lookup
    draft_vocab: int | None = None  # draft over the N most frequent tokens; not with processors and grammars
    draft_bits: int | None = None  # 4: draft by 4-bit copies of the layers, where they exist; all layers verify
    lookups: LookupTable | None = None  # draft by lookup in the rounds for which the table gives lengths
    most_forced: int = 0  # tokens that a row's grammar forces are drafted first, at most so many per round
    ledger: Ledger | None = None  # what drafts may lose; a plan ends once it covers no more by layers; None: no limit
    num_rounds: int = 1
    deadline: float | None = None  # seconds after which no further round begins; None: the engine's
    speedup: float | None = None  # expected speedup over plain decoding, for display

    @property
    def reads_confidence(self) -> bool:
        """Whether confidences of drafted tokens are computed."""
        wants = self.keep_confidence or self.min_confidence > 0 or self.stop
        return bool(wants) and self.exit_layer != LOOKUP


class ShadowPicks(NamedTuple):
    """What layers that did not draft would have picked at judged positions, compared with the target's picks."""

    layers: tuple[int, ...]
    hits: NDArray[np.bool_]  # [layers, judged positions in order]: equal to the target's pick
    confidences: NDArray[np.float32]  # the same shape: probability of the shadow pick under its layer


@dataclass(slots=True)
class RowRound:
    """What one sequence got out of one round. The executor makes it; the engine cuts it where the sequence ends."""

    sequence: Sequence
    num_drafted: int  # tokens of its draft; beyond the sequence's end none counts
    num_accepted: int  # drafted tokens among `token_ids`
    token_ids: list[int]  # new tokens: accepted drafts, then the target's own pick
    drafted: list[int] = field(default_factory=list)
    confidences: tuple[float, ...] = ()  # of the drafted tokens, the withdrawn one included, where the plan reads them
    divergences: tuple[float, ...] = ()  # KL(target || draft) in nats at the judged positions, where the plan asks
    shadow: ShadowPicks | None = None
    match_length: int = 0  # of a draft by lookup; of forced tokens, their number
    source: int = 0  # of such a draft: one of `control.plan.SOURCES`, or `control.plan.GRAMMAR`
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, where the request asks for them
    logits: Tensor | None = None  # [len(token_ids), vocab], where the request keeps them
    scores: Tensor | None = None
    withdrawn: int | None = None  # a token drafted after `drafted`, of a row that was too unsure to verify it
    is_outside_vocab: bool = False  # the draft's vocabulary lacks the target's pick at the first rejection
    text: str | TextDelta = ""  # what became certain of the text
    finish_reason: FinishReason | None = None  # if the sequence ended in this round
    problem: BaseException | None = None  # that ended it

    @property
    def seq_id(self) -> int:
        return self.sequence.seq_id

    def cut(self, num_kept: int) -> None:
        """Keep the first tokens, where the sequence ends; drafted tokens beyond its end were not judged."""
        if num_kept < len(self.token_ids):
            self.token_ids = self.token_ids[:num_kept]
            self.logprobs = None if self.logprobs is None else self.logprobs[:num_kept]
        if num_kept < self.num_accepted:
            self.num_drafted = self.num_accepted = num_kept
            self.is_outside_vocab, self.withdrawn = False, None
            self.confidences = self.confidences[: self.num_drafted]
            self.divergences = self.divergences[: self.num_drafted]

    @property
    def num_emitted(self) -> int:
        """Emitted tokens, the bonus token included, which a sequence may lack that has ended."""
        return self.num_accepted + 1

    @property
    def num_judged(self) -> int:
        """Judged tokens of the draft: the accepted ones, and the first rejected one."""
        return min(self.num_accepted + 1, self.num_drafted)

    @property
    def num_right(self) -> tuple[int, int]:
        """Drafted tokens that are the target's picks, and those of which it is known: withdrawn ones are, too."""
        accepted, place = self.num_accepted, self.num_drafted
        if self.withdrawn is None or accepted < place or len(self.token_ids) <= place:
            return accepted, self.num_judged
        return accepted + (self.withdrawn == self.token_ids[place]), place + 1


@dataclass(slots=True)
class StageSeconds:
    """Wall time of a round by stage, in seconds. On CUDA, stages are not synchronised: it is the time of launching."""

    prefill: float = 0.0
    draft: float = 0.0  # early layers
    verify: float = 0.0  # remaining layers (all layers when nothing is drafted)
    head: float = 0.0  # final norm and vocabulary product
    pick: float = 0.0  # processors, filters, noise, argmax, and the copy to the host
    shadow: float = 0.0  # shadow picks
    control: float = 0.0  # plans and statistics
    rest: float = 0.0  # acceptance, stop strings, text, and overhead of compiled calls
    _last: float = field(default_factory=perf_counter, repr=False)

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to this stage."""
        now = self.now()
        self.add(stage, now - self._last)
        self._last = now

    def restart(self) -> None:
        """Start a new lap without adding the time since the last one."""
        self._last = self.now()

    def add(self, stage: str, seconds: float) -> None:
        setattr(self, stage, getattr(self, stage) + seconds)

    def now(self) -> float:
        return perf_counter()

    @property
    def decoding(self) -> float:
        """Seconds that drafting changes: all stages but prefill, shadow picks and control."""
        return self.draft + self.verify + self.head + self.pick + self.rest

    @property
    def total(self) -> float:
        stages = (self.prefill, self.draft, self.verify, self.head, self.pick, self.shadow, self.control, self.rest)
        return sum(stages)


@dataclass(slots=True)
class RoundOutput:
    """One round of a batch; sequences that only read their prompts are not in it."""

    exit_layer: int | None  # what drafted: a layer, `LOOKUP` (a grammar, too); None: nothing was drafted
    rows: list[RowRound]
    seconds: StageSeconds
    plan: Plan | None = None  # that it is a round of; None where no sequence was ready to decode
    round_index: int = 0  # its place among the rounds of its plan
    num_wasted: int = 0  # tokens that were decoded beyond the end of a sequence
