"""`Job`: tokenized prompts and how to continue them, ready to run as often as wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import inf
from tempfile import TemporaryFile
from typing import Any

from selfspec import hub
from selfspec.commands.datastore import reading
from selfspec.commands.failure import RUN, Failure, as_sentences
from selfspec.commands.options import Generate
from selfspec.commands.prompts import Prompt, tokenize, wants_chat
from selfspec.control.plan import LOOKUP
from selfspec.control.registry import CHOOSES_EXIT, DEFAULT_POLICY
from selfspec.control.rows import StageSeconds
from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round
from selfspec.decoding.stats import SpecStats
from selfspec.drafting.datastore import Datastore
from selfspec.learn import Learner
from selfspec.model.exit_heads import FILE as EXIT_HEADS_FILE
from selfspec.model.exit_heads import ExitHeads
from selfspec.target import Target

MAX_ROWS = 64  # of a file of prompts decoded together; the others join as rows end
DRAFTING = ("exit_layer", "num_draft_tokens", "drafts", "datastore", "learn", "exact", "burst")
PARTS = {"decided"}  # of other stages
STAGES = tuple(field.name for field in fields(StageSeconds) if not (field.name in PARTS or field.name.startswith("_")))


@dataclass(frozen=True, slots=True)
class Run:
    """What a job gave: completions in the prompts' order, where the time went, and how it was planned."""

    completions: list[Completion]
    stages: dict[str, float]
    plans: dict[str, int]  # rounds by "lookup", by exit layer, ascending, then those by the whole model: "plain"

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def tokens(self) -> list[int]:
        """Every row's new tokens, end to end."""
        return [token for completion in self.completions for token in completion.tokens]

    @property
    def stats(self) -> SpecStats:
        return sum((completion.stats for completion in self.completions), SpecStats())


@dataclass(frozen=True, slots=True)
class Job:
    """The same rows every time it runs; only the policy may change, which must not change a token.

    Every run starts from what was known of the model before the first: none has seen the texts it is about to write.
    """

    target: Target
    prompts: list[Prompt]
    ids: list[list[int]]
    policy: str
    chat: bool
    options: dict[str, Any]
    prior: dict[str, Any] | None
    learner: Learner | None = None

    @classmethod
    def make(cls, options: Generate, prompts: list[Prompt]) -> Job:
        """Load the model and tokenize; what does not fit it is refused here, before anything is written."""
        with as_sentences():
            names = ("dtype", "device", "adapter", "exit_heads", "engine", "quantize")
            parts: dict[str, Any] = {name: getattr(options, name) for name in names}
            if _has_learned(options):
                parts["exit_heads"] = "none"
            target = hub.open_target(options.model, **parts)
        chat = wants_chat(target.tokenizer, options)
        with hub.quiet():
            ids = tokenize(prompts, target.tokenizer, options.system, chat, target.stack.context_limit)
        sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        given = {name: value for name, value in sampling.items() if value is not None}
        given |= {"exit_layer": options.exit_layer, "num_draft_tokens": options.num_draft_tokens, "stop": options.stop}
        given |= {"drafts": options.sources, "exact": options.exact, "datastore": _datastore(options, target)}
        given["seed"] = [options.seed if p.seed is None else p.seed for p in prompts]
        given["generation_config"] = False if options.ignore_generation_config else None
        given["max_new_tokens"] = [p.max_new_tokens or options.max_new_tokens for p in prompts]
        policy = _policy_name(options, target)
        learner = None if options.learn is None or policy == "plain" else _learner(target, options)
        prior = target.prior if policy == "adaptive" else None
        return cls(target, prompts, ids, policy, chat, given, prior, learner)

    def rounds(self, policy: str | None = None, **changes: Any) -> Iterator[Round]:
        """The rounds of one run; refuses bad options at the call. `learn=job.learner` has it learn meanwhile."""
        options, policy = self.options | changes, policy or self.policy
        if policy == "adaptive":
            self.target.prior = self.prior
        with as_sentences():
            drafting = {name: options.pop(name) for name in DRAFTING if name in options}
            requests = self.target.requests(self.ids, options)
            return self.target.rounds(requests, policy=policy, max_batch_size=MAX_ROWS, **drafting)

    def run(self, policy: str | None = None, **changes: Any) -> Run:
        """One run that shows nothing."""
        return consume(self.rounds(policy, **changes), lambda round_: None)


def consume(rounds: Iterator[Round], show: Callable[[Round], None]) -> Run:
    """Show every round; the time that showing takes is not counted."""
    done: list[Completion] = []
    stages: Counter[str] = Counter()
    exits: Counter[float] = Counter()
    for round_ in rounds:
        show(round_)
        done += [row.completion for row in round_.rows if row.completion is not None]
        for stage in STAGES:
            stages[stage] += getattr(round_.seconds, stage)
        if round_.plan is not None:
            exits[inf if round_.exit_layer is None else round_.exit_layer] += 1
    names = {inf: "plain", LOOKUP: "lookup"}
    plans = {names.get(exit_layer, str(exit_layer)): count for exit_layer, count in sorted(exits.items())}
    return Run(sorted(done, key=lambda completion: completion.request_id), dict(stages), plans)


def _datastore(options: Generate, target: Target) -> Datastore | None:
    """The corpus to look drafts up in, open; one that is damaged or of another tokenizer is refused."""
    file = options.datastore
    if file is None:
        return None
    with reading(file):
        store = Datastore.open(file, target.tokenizer)
        store.check_fits(target.stack.vocab_size)
    return store


def _has_learned(options: Generate) -> bool:
    """Whether the folder to learn in has heads already: the run goes on with them."""
    if options.learn is None or not (options.learn / EXIT_HEADS_FILE).is_file():
        return False
    if options.exit_heads is not None:
        raise Failure(f"--learn {options.learn} goes on with the heads that are there; leave --exit-heads out")
    return True


def _learner(target: Target, options: Generate) -> Learner:
    """Who learns; a folder that will not do is found out before anything has been decoded."""
    folder = options.learn
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise Failure(f"--learn {folder} cannot be written to ({problem.strerror}); choose another", RUN) from problem
    with as_sentences():
        try:
            if _has_learned(options):
                target.exit_heads = ExitHeads.load(folder)
        except ValueError as problem:
            raise Failure(f"--learn {folder}: {problem}") from problem
        return Learner(target, folder=folder, layers=None if options.exit_layer is None else [options.exit_layer])


def _policy_name(options: Generate, target: Target) -> str:
    """The policy that the target is going to follow."""
    length = options.num_draft_tokens
    name: str = options.policy or (DEFAULT_POLICY if options.exit_layer is None and length is None else "fixed")
    if length is None and name not in CHOOSES_EXIT:
        length = target.default_num_draft_tokens
    return "plain" if length == 0 else name
