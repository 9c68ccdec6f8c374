"""`Job`: tokenized prompts and how to continue them, ready to run as often as wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from math import inf
from tempfile import TemporaryFile
from typing import Any, cast

from selfspec import hub
from selfspec.cli.corpus import reading
from selfspec.cli.failure import RUN, Failure, as_sentences
from selfspec.cli.options import Decoding, Drafting, Generate
from selfspec.cli.prompts import Prompt, has_template, tokenize
from selfspec.cli.talk import Talk
from selfspec.control.plan import LOOKUP
from selfspec.control.registry import CHOOSES_EXIT, DEFAULT_POLICY
from selfspec.control.rows import StageSeconds
from selfspec.decoding.outputs import SpecStats
from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round
from selfspec.drafting.datastore import Datastore
from selfspec.learn import Learner
from selfspec.model.exit_heads import FILE as EXIT_HEADS_FILE
from selfspec.model.exit_heads import ExitHeads
from selfspec.target import Target

MAX_ROWS = 64  # of a file of prompts decoded together; the others join as rows end
DRAFTING = ("exit_layer", "num_draft_tokens", "drafts", "datastore", "reuse_responses", "learn", "exact")
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
    """The same rows every time it runs; only the policy may change, which must not change a token."""

    target: Target
    talk: Talk
    prompts: list[Prompt]
    ids: list[list[int]]
    policy: str
    chat: bool
    options: dict[str, Any]
    learner: Learner | None = None

    @classmethod
    def make(cls, options: Generate, prompts: list[Prompt], talk: Talk) -> Job:
        """Load the model and tokenize; what does not fit it is refused here, before anything is written."""
        target = open_target(options, talk)
        chat = has_template(target.tokenizer, options.model) and options.chat is not False
        for flag, wanted in (("--chat", options.chat), ("--system", options.system is not None)):
            if wanted and not chat:
                raise Failure(
                    f"{flag} needs a chat template, and the tokenizer of {options.model} has none; leave it out"
                )
        with hub.quiet():
            ids = tokenize(prompts, target.tokenizer, options.system, chat, target.stack.context_limit)
        given = decoding(options, target) | {
            "seed": [options.seed + p.index if p.seed is None else p.seed + p.index for p in prompts],
            "max_new_tokens": [p.max_tokens or options.max_tokens for p in prompts],
        }
        policy = policy_name(options, target)
        return cls(target, talk, prompts, ids, policy, chat, given, learner_of(options, target, policy))

    def rounds(self, policy: str | None = None, **changes: Any) -> Generator[Round]:
        """The rounds of one run; refuses bad options at the call. `learn=job.learner` has it learn meanwhile."""
        with as_sentences(), self.talk.waiting("preparing to decode"):
            options = self.options | changes
            drafting = {name: options.pop(name) for name in DRAFTING if name in options}
            requests = self.target.requests(self.ids, options)
            several = any(prompt.of > 1 for prompt in self.prompts)
            if several and any(request.sampling.temperature == 0 for request in requests):
                raise ValueError(
                    "--n must be 1 with greedy decoding, whose outputs are all the same; add --temperature"
                )
            rounds = self.target.rounds(requests, policy=policy or self.policy, max_batch_size=MAX_ROWS, **drafting)
            return cast(Generator[Round], rounds)

    def run(self, policy: str | None = None, **changes: Any) -> Run:
        """One run that shows nothing."""
        return _consumed(self.rounds(policy, **changes), lambda round_: None)

    def shown(self, rounds: Generator[Round], show: Callable[[Round], None]) -> Run:
        """Show every round; the time that showing takes is not counted."""

        def told(round_: Round) -> None:
            if round_.plan is not None:
                reading_prompts.close()
            show(round_)

        with ExitStack() as reading_prompts:
            reading_prompts.enter_context(self.talk.waiting("reading what to continue"))
            return _consumed(rounds, told)


def _consumed(rounds: Generator[Round], show: Callable[[Round], None]) -> Run:
    done: list[Completion] = []
    stages: Counter[str] = Counter()
    exits: Counter[float] = Counter()
    with closing(rounds):  # also where showing is interrupted: what was seen until then is kept
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


def open_target(options: Decoding, talk: Talk) -> Target:
    """The model, opened up."""
    with as_sentences(), talk.waiting(f"loading {options.model}"):
        return hub.open_target(options.model, **opening(options))


def opening(options: Drafting) -> dict[str, Any]:
    """What opening the model is told beside its name; heads that were learned take the place of those in its folder."""
    return options.parts | ({"exit_heads": "none"} if _has_learned(options) else {})


def decoding(options: Decoding, target: Target) -> dict[str, Any]:
    """How to draft and how to choose tokens, as the library names it."""
    drafting: dict[str, Any] = {"exit_layer": options.exit_layer, "num_draft_tokens": options.num_speculative_tokens}
    drafting |= {"drafts": options.sources, "exact": options.exact, "datastore": corpus_of(options, target)}
    drafting |= {"reuse_responses": options.reuse_responses}
    return drafting | options.sampling


def policy_name(options: Drafting, target: Target) -> str:
    """The policy that the target is going to follow."""
    length = options.num_speculative_tokens
    name: str = options.policy or (DEFAULT_POLICY if options.exit_layer is None and length is None else "fixed")
    if length is None and name not in CHOOSES_EXIT:
        length = target.default_num_draft_tokens
    return "plain" if length == 0 else name


def keep(target: Target, policy: str, learner: Learner | None, options: Drafting, talk: Talk) -> None:
    """Save what was learned: acceptance statistics, and with --learn exit heads, which is said."""
    if policy == "adaptive":
        target.save_prior()
    if learner is None:
        return
    try:
        learner.save()
    except OSError as problem:
        raise Failure(f"--learn {options.learn} cannot be written to ({problem.strerror})", RUN) from problem
    share = learner.seconds / max(learner.decoding_seconds, 1e-9)
    line = f"learned from {learner.num_examples} refused drafts in {learner.num_updates} updates, "
    line += f"{learner.seconds:.2f} s ({share:.1%} of decoding); saved in {options.learn}"
    talk.console.print(line, style="dim", soft_wrap=True)


def learner_of(options: Drafting, target: Target, policy: str) -> Learner | None:
    """Who learns; a folder that will not do is found out before anything has been decoded."""
    folder = options.learn
    if folder is None or policy == "plain":
        return None
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


def corpus_of(options: Drafting, target: Target) -> Datastore | None:
    """The corpus to look drafts up in, open; one that is damaged or of another tokenizer is refused."""
    file = options.corpus
    if file is None:
        return None
    with reading(file):
        store = Datastore.open(file, target.tokenizer)
        store.check_fits(target.stack.vocab_size)
    return store


def _has_learned(options: Drafting) -> bool:
    """Whether the folder to learn in has heads already: the run goes on with them."""
    if options.learn is None or not (options.learn / EXIT_HEADS_FILE).is_file():
        return False
    if options.exit_heads is not None:
        raise Failure(f"--learn {options.learn} goes on with the heads that are there; leave --exit-heads out")
    return True
