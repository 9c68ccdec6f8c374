"""`tune`: exit heads for one's own prompts, within a given time.

The model answers the prompts; its states after several early layers are collected; a head is trained for each of these
exits for a short time; the exit that would gain most by the machine's costs is trained on; and what it gains is
measured on prompts that were held out.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from selfspec.calibrate import profile
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.errors import flag, whole
from selfspec.files import write_whole
from selfspec.learning.agreement import acceptance_prior, agreement
from selfspec.learning.answering import answer_and_collect
from selfspec.learning.card import PLAIN, WITH, WITHOUT, Tuned, card, write_card
from selfspec.learning.rounds import Rounds, expected_gain, measure_rounds
from selfspec.learning.speeds import agreement_by_place, measure_speeds
from selfspec.learning.states import Positions, collect
from selfspec.learning.trainer import ExitTrainer
from selfspec.learning.workload import Given, answer, rounds_of, split_prompts
from selfspec.learning.written import Sample, Task, Written, count_positions
from selfspec.model.draft_vocabulary import Frequencies, Subset
from selfspec.model.exit_heads import FORMAT, ExitHeads
from selfspec.model.fingerprint import hidden_size_of, weights_of
from selfspec.model.gguf_blocks import BlockWeight

if TYPE_CHECKING:
    from selfspec.llm import LLM

ANSWERS, CHECKPOINT = "tune.answers.jsonl", "tune.checkpoint.pt"  # from which a stopped run goes on
ANSWER_SHARE, TRIAL_SHARE = 0.5, 0.57  # of the time: when the last answers begin, and when the trial of exits ends
MEASURE_SHARE, MEASURE_FACTOR = 0.2, 4.0  # for measuring: of the time at most; of the seconds of plain decoding
LEAST_TOKENS = 64  # to learn from
TOP_K = 64  # most probable tokens to learn from, all others being one bucket
MOST_BYTES = 1 << 30  # of states
DEPTHS = (1 / 15, 1 / 8, 1 / 5, 1 / 3, 1 / 2)  # of the exits that are tried, in layers over all layers
NUM_CHECKS, SAVE_SECONDS = 10, 30.0  # measurements while training; seconds between checkpoints
LEAST_GAIN = 1.01  # over `adaptive` without heads
ROUNDS_SHARE = 0.03  # of the time, for measuring rounds
Report = Callable[[str], None]


def tune(
    llm: LLM,
    prompts: Sequence[Given],
    output: str | Path | None,
    *,
    minutes: float,
    exits: Sequence[int] | None,
    held_out: Sequence[Given] | None,
    max_tokens: int,
    keep: bool,
    seed: int,
    report: Report,
) -> Tuned:
    """See `LLM.tune`, which has the defaults."""
    split = llm.target.split
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a number above 0, got {minutes!r}")
    flag("keep", keep)
    whole("max_tokens", max_tokens, 1)
    if split.num_layers < 2:
        raise ValueError(f"tune needs a model of at least 2 layers, got {split.num_layers}")
    layers = exits_of(split.num_layers) if exits is None else sorted({whole("exits", one, 1) for one in exits})
    if not layers or layers[-1] >= split.num_layers:
        raise ValueError(f"exits must be from 1 to {split.num_layers - 1}, the model's last but one, got {layers}")
    folder = None if output is None else Path(output).expanduser()
    run = _Run(llm, prompts, folder, 60 * float(minutes), layers, max_tokens, keep, seed, held_out, report)
    before = llm.target.exit_heads
    split.exit_heads = None
    parameters = [one for one in split.model.parameters() if one.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        tuned = run.run()
    finally:
        split.exit_heads = before
        for parameter in parameters:
            parameter.requires_grad_(True)
    if tuned.gains or keep:
        llm.target.exit_heads = tuned.heads
        llm.target.policies.stored_prior = run.prior
    return tuned


def exits_of(num_layers: int) -> list[int]:
    """The exits that are tried."""
    return sorted({min(max(1, round(num_layers * depth)), num_layers - 1) for depth in DEPTHS})


class _Run:
    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Given],
        folder: Path | None,
        seconds: float,
        exits: list[int],
        max_tokens: int,
        keep: bool,
        seed: int,
        held_out: Sequence[Given] | None,
        report: Report,
    ) -> None:
        self.llm, self.target, self.split = llm, llm.target, llm.target.split
        self.folder, self.seconds, self.exits, self.keep = folder, seconds, exits, keep
        self.seed, self.say = seed, report
        self.begun, self.spent = time.monotonic(), 0.0
        self.tasks, self.held_tasks = split_prompts(llm, prompts, max_tokens, seed, held_out)
        self.weights = weights_of(self.split)
        self.is_new_folder = folder is not None and not folder.exists()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.saved = self._read()
        self.prior: dict[str, Any] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before a stop included."""
        return self.spent + time.monotonic() - self.begun

    def run(self) -> Tuned:
        self._answer()
        trainer = self._try_exits()
        try:
            self._train(trainer)
            tuned = self._measured(trainer)
        except KeyboardInterrupt:
            if trainer.best_agreement >= 0:
                self._save(trainer)
                self._written(self._tuned(trainer))
                self.say(f"stopped: the best heads so far are in {self.folder}; the same command goes on")
            raise
        if tuned.gains or self.keep:
            tuned = self._written(tuned)
        self._remove_unfinished()
        return tuned

    # -------------------------------------------------------------------------------------------------------- answers

    def _answer(self) -> None:
        """Answer prompts and collect states until their share of the time is over, or all are answered."""
        written = Written(None if self.folder is None else self.folder / ANSWERS, self.weights)
        held = list(self._answered(self.held_tasks, written))
        self.held_out = [sample for some, _ in held for sample in some]
        self.held_seen = Positions.joined([seen for _, seen in held])
        begun = time.perf_counter()
        alone = answer(self.target, self.held_tasks[:1], Written(None, ""))
        plain = (time.perf_counter() - begun) / max(1, count_positions(alone))
        wanted = MEASURE_FACTOR * plain * count_positions(self.held_out)
        self.measuring = min(wanted, MEASURE_SHARE * self.seconds)
        self.say(
            f"plan: answers to {self.elapsed:.0f} .. {ANSWER_SHARE * self.seconds:.0f} s, trial of exits "
            f"{self.exits} to {TRIAL_SHARE * self.seconds:.0f} s, training to {self.seconds - self.measuring:.0f} s, "
            f"measuring to {self.seconds:.0f} s"
        )
        parts, answers, number, shown = list[Positions](), list[Sample](), 0, time.monotonic()
        most = MOST_BYTES // (2 * (len(self.exits) + 1) * hidden_size_of(self.split) + 6 * TOP_K)
        for tasks in rounds_of(self.tasks, self.seed):
            is_enough = number >= most or (not self.saved and self.elapsed > ANSWER_SHARE * self.seconds)
            if (is_enough and number >= LEAST_TOKENS) or (self.saved and written.missing(tasks)):
                break
            for some, seen in self._answered(tasks, written):
                answers += some
                parts.append(seen)
                number += seen.number
            if time.monotonic() - shown > SAVE_SECONDS / 3:
                shown = time.monotonic()
                self.say(f"answers: {len(answers):,} with {number:,} tokens after {self.elapsed:.0f} s")
        if number < LEAST_TOKENS:
            raise ValueError(
                f"the model's answers have {number} tokens to learn from, less than {LEAST_TOKENS}; give more prompts"
                ", or raise max_tokens"
            )
        self.seen, self.num_answers = Positions.joined(parts), len(answers)
        self.counts = Counter(token for one in answers for token in one.tokens[one.num_prompt :])
        self.subset = self._subset()
        over = "all tokens" if self.subset is None else f"{len(self.subset.tokens):,} tokens"
        self.say(f"answers: {len(answers):,} with {number:,} tokens, {self.elapsed:.0f} s; drafts over {over}")

    def _answered(self, tasks: Sequence[Task], written: Written) -> Iterator[tuple[list[Sample], Positions]]:
        """Answers, none of them empty, and their positions: those of an earlier run, and new ones."""
        missing = written.missing(tasks)
        known = [task for task in tasks if task not in set(missing)]
        if some := answer(self.target, known, written):
            with torch.inference_mode(False):
                seen = collect(self.split, some, self.exits, TOP_K)
            yield some, seen
        if missing:
            ends = GenerationDefaults(self.split.model, self.target.tokenizer).eos_token_ids
            with torch.inference_mode(False):
                some, seen = answer_and_collect(self.split, missing, ends, self.exits, TOP_K)
            for task, sample in zip(missing, some, strict=True):
                written.add(task, sample.tokens[sample.num_prompt :])
            yield some, seen

    def _subset(self) -> Subset | None:
        """The draft vocabulary: the most frequent tokens of the answers; None: the whole vocabulary."""
        self.split.frequencies.add_counts(self.counts)  # drafts are over them while measuring, too
        size = self.split.default_draft_vocab
        if size is None:
            return None
        frequencies = Frequencies(self.split.vocab_size)
        frequencies.add_counts(self.counts)
        subset = self.split.subset_of(frequencies.top(size))
        weight = None if subset is None else subset.linear.weight
        if isinstance(weight, BlockWeight):
            weight.hold(True)  # every step multiplies with it
        return subset

    # ------------------------------------------------------------------------------------------------------- training

    def _try_exits(self) -> ExitTrainer:
        """Train all exits in turn for a short time; returns the trainer of the one that would gain most."""
        self.before = {
            layer: agreement(self.split, None, layer, index, self.held_seen, self.subset)
            for index, layer in enumerate(self.exits)
        }
        self.after = dict(self.before)
        trainers = [
            ExitTrainer(self.split, layer, index, self.subset, self.weights, self.seed)
            for index, layer in enumerate(self.exits)
        ]
        if self.saved:
            self.after.update(self.saved["after"])
            [trainer] = [one for one in trainers if one.layer == self.saved["trainer"]["layer"]]
            trainer.load(self.saved["trainer"])
            self.say(f"goes on at step {trainer.steps}, exit {trainer.layer}, agreement {trainer.best_agreement:.3f}")
            return trainer
        if len(trainers) == 1:
            return trainers[0]
        end = max(TRIAL_SHARE * self.seconds, self.elapsed + (TRIAL_SHARE - ANSWER_SHARE) * self.seconds)
        while self.elapsed < end or not trainers[0].steps:
            for trainer in trainers:
                trainer.step(self.seen, 0.0)
        gains, rounds = [], self._rounds(trainers)
        for trainer in trainers:
            self.after[trainer.layer] = right = trainer.measure(self.held_seen)
            gain, length = expected_gain(rounds, trainer.layer, right)
            gains.append(gain)
            self.say(
                f"exit {trainer.layer}: agreement {self.before[trainer.layer]:.3f} before, {right:.3f} after "
                f"{trainer.steps} steps; {gain:.2f}x plain expected with {length} drafted tokens"
            )
        return trainers[gains.index(max(gains))]

    def _rounds(self, trainers: Sequence[ExitTrainer]) -> Rounds:
        """What rounds take here with the heads of some exits, over plain ones."""
        first, end = trainers[0].heads, self.elapsed + ROUNDS_SHARE * self.seconds
        heads = ExitHeads([one.layer for one in trainers], first.hidden_size, first.inner_size)
        # seconds do not depend on the heads' numbers
        return measure_rounds(self.llm, self._ready(heads), self.held_tasks[0].prompt, lambda: self.elapsed < end)

    def _ready(self, heads: ExitHeads) -> ExitHeads:
        """Heads as they are read back from their file: the numbers of bfloat16, in the model's dtype."""
        made = copy.deepcopy(heads).requires_grad_(False).bfloat16()
        return made.to(self.split.device, self.split.dtype)

    def _train(self, trainer: ExitTrainer) -> None:
        """Train one exit until the time for measuring begins."""
        begun, end = self.elapsed, self.seconds - self.measuring
        first = self.saved["begun"] if self.saved else begun
        every, saved = max(1.0, (end - begun) / NUM_CHECKS), self.elapsed
        checked = begun
        while trainer.steps == 0 or self.elapsed < end:
            progress = (self.elapsed - first) / max(1e-9, end - first)
            loss = trainer.step(self.seen, progress)
            now = self.elapsed
            if now - checked >= every:
                checked = now
                found = trainer.measure(self.held_seen)
                self.say(
                    f"training: {trainer.steps:,} steps, loss {loss:.3f}, agreement {found:.3f}, "
                    f"{max(0.0, end - now):.0f} s left"
                )
            if now - saved >= SAVE_SECONDS:
                saved, self.train_begun = now, first
                self._save(trainer)
        self.train_begun = first
        trainer.measure(self.held_seen)
        self._save(trainer)

    # -------------------------------------------------------------------------------------------------------- results

    def _measured(self, trainer: ExitTrainer) -> Tuned:
        heads = self._ready(trainer.best)
        self.split.exit_heads = heads
        try:
            with torch.inference_mode():
                self.prior = acceptance_prior(self.split, self.held_out)
        finally:
            self.split.exit_heads = None
        begun, end = self.elapsed, max(self.seconds, self.elapsed + 0.5 * self.measuring)  # the latter after a stop
        self.say(f"measuring on {len(self.held_tasks)} held-out prompts, {end - begun:.0f} s")
        found = measure_speeds(
            self.llm, heads, self.prior, self.held_tasks, lambda: self.elapsed < begun + 0.85 * (end - begun)
        )
        places = agreement_by_place(self.llm, heads, trainer.layer, self.held_tasks, lambda: self.elapsed < end)
        gains = found.speeds[WITH] >= LEAST_GAIN * found.speeds[WITHOUT]
        about = {"by_position": places, "speeds": found.speeds, "gains": gains, "num_held_out": found.num_prompts}
        about |= {"num_different": found.num_different}
        return self._tuned(trainer, **about, reason="" if gains else self._reason(trainer, found.speeds))

    def _reason(self, trainer: ExitTrainer, speeds: Mapping[str, float]) -> str:
        rounds, layer, right = self._rounds([trainer]), trainer.layer, trainer.best_agreement
        gain, length = expected_gain(rounds, layer, right)
        agrees = f"exit {layer} agrees with the model at {right:.2f} of the positions"
        if gain <= 1:
            needed = rounds.get((layer, 1), math.inf) - 1
            return (
                f"{agrees}, and a round that drafts one token takes {1 + needed:.2f} times a plain one, so an "
                f"agreement above {needed:.2f} is needed to gain over plain decoding"
            )
        with_, without = (speeds[name] / speeds[PLAIN] for name in (WITH, WITHOUT))
        return (
            f"{agrees}, and rounds at it alone, with {length} drafted tokens, are expected to be {gain:.2f} times as "
            f"fast as plain decoding; {WITHOUT} without it is {without:.2f} times as fast, and with it {with_:.2f} "
            f"times, which is less than {LEAST_GAIN:.2f} times that"
        )

    def _tuned(self, trainer: ExitTrainer, **measured: Any) -> Tuned:
        self.after[trainer.layer] = trainer.best_agreement
        heads = copy.deepcopy(trainer.best).requires_grad_(False).bfloat16()
        heads.counts = dict(self.counts)
        return Tuned(
            heads=heads,
            agreement={layer: (self.before[layer], self.after[layer]) for layer in self.exits},
            num_answers=self.num_answers,
            num_tokens=self.seen.number,
            draft_vocab=None if self.subset is None else len(self.subset.tokens),
            steps=trainer.steps,
            seconds=self.elapsed,
            **{"num_held_out": 0, **measured},
        )

    def _written(self, tuned: Tuned) -> Tuned:
        """Write heads, card and acceptance statistics into the folder, if there is one."""
        if self.folder is None:
            return tuned
        device = f"{self.split.device.type}, {torch.get_num_threads()} threads, {self.split.dtype}"
        tuned.heads.save(self.folder)
        write_card(self.folder, card(tuned, type(self.split.model).__name__, self.split.num_layers, device))
        if self.prior is not None:
            self.split.exit_heads = self._ready(tuned.heads)
            try:
                profile.store_prior(self.folder, self.split, self.prior)
            finally:
                self.split.exit_heads = None
        return replace(tuned, folder=self.folder)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    @property
    def _about(self) -> list[Any]:
        """What a run that goes on must have in common with the stopped one."""
        return [FORMAT, self.weights, self.exits, self.seed, len(self.tasks), len(self.held_tasks)]

    def _read(self) -> dict[str, Any]:
        """The checkpoint of an earlier run of the same prompts; else nothing."""
        file = None if self.folder is None else self.folder / CHECKPOINT
        if file is None or not file.is_file():
            return {}
        try:
            saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as problem:  # damaged files raise various errors
            raise ValueError(f"{file} is truncated or damaged; remove it") from problem
        if saved.get("about") != self._about:
            return {}
        self.spent = saved["elapsed"]
        return saved

    def _save(self, trainer: ExitTrainer) -> None:
        if self.folder is None:
            return
        state = {"about": self._about, "elapsed": self.elapsed, "begun": getattr(self, "train_begun", self.elapsed)}
        state |= {"after": self.after, "trainer": trainer.state()}
        write_whole(self.folder / CHECKPOINT, lambda stream: torch.save(state, stream))

    def _remove_unfinished(self) -> None:
        if self.folder is None:
            return
        for name in (ANSWERS, CHECKPOINT):
            (self.folder / name).unlink(missing_ok=True)
        if self.is_new_folder and not any(self.folder.iterdir()):
            self.folder.rmdir()
