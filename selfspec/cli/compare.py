"""Times drafting against plain decoding and transformers' `generate` in one process, and compares their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from selfspec import hub
from selfspec.cli.job import Job, Run

WARM_UP_TOKENS = 8
PAIRS = (2, 31)  # fewest and most timed runs of each: those of a small model take hundredths of a second
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")  # that `generate` has, too, by the same names
UNLIKE = ("stop", "generation_config", "presence_penalty", "frequency_penalty")  # options that it has not, or otherwise
ENOUGH_SECONDS = 3.0  # no further pair is begun after this


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of every timed run, end to end, prompt included.

    Of the acceptance statistics a run that drafts knows what was known before the first, and it has no response of
    another run: none has seen the text that it is about to write.
    """

    drafted_runs: list[float]
    plain_runs: list[float]
    first_difference: int | None  # index of the first token, over all rows, that plain decoding chose differently
    generate_runs: list[float] = field(default_factory=list)  # by transformers' generate; none where it is not asked
    generate_difference: int | None = None  # index of the first token that it chose differently

    @property
    def drafted(self) -> float:
        return median(self.drafted_runs)

    @property
    def plain(self) -> float:
        return median(self.plain_runs)

    @property
    def about(self) -> str:
        """What the figures are of."""
        counts = f"{len(self.drafted_runs)} runs with drafts and {len(self.plain_runs)} without"
        return f"medians of {counts}, in turns; each starts from the acceptance statistics from before this call"

    @property
    def speedup(self) -> float:
        return self.plain / self.drafted

    @property
    def generate(self) -> float | None:
        return median(self.generate_runs) if self.generate_runs else None

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        generate: dict[str, object] = {
            "generate_seconds": self.generate_runs,
            "generate_speedup": None if self.generate is None else self.generate / self.drafted,
            "generate_first_difference": self.generate_difference,
        }
        return generate | {
            "speedup": self.speedup,
            "tokens_identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "drafted_seconds": self.drafted_runs,
            "plain_seconds": self.plain_runs,
        }


def compare(job: Job, shown: Run, before: Any) -> Comparison:
    """Warm all up, then run them in turns, each first in every other pair, until medians mean something.

    `generate` is slow where the compiled engine is not, so it runs twice, or once where that is enough. What these runs
    see of the model's acceptance is forgotten: the text counts once for later programs, too.

    Args:
        before: the acceptance statistics from before the shown run.
    """
    after = job.target.prior
    try:
        return _timed(job, shown, before)
    finally:
        if job.policy == "adaptive":
            job.target.prior = after


def _timed(job: Job, shown: Run, before: Any) -> Comparison:
    def run(policy: str, **changes: Any) -> Run:
        if policy == "adaptive":
            job.target.prior = before
        job.target.responses.clear()
        return job.run(policy, **changes)

    drafted: list[float] = []
    plain: list[float] = []
    generate: list[float] = []
    pair = [(job.policy, drafted), ("plain", plain)]
    for policy, _ in pair:
        run(policy, max_new_tokens=WARM_UP_TOKENS)
    asks = _generate_is_alike(job) and len(shown.tokens) > 0
    if asks:
        _generate(job, WARM_UP_TOKENS)
    written, theirs = [shown.tokens], [shown.tokens]
    while len(plain) < PAIRS[0] or (len(plain) < PAIRS[1] and sum(drafted) + sum(plain) < ENOUGH_SECONDS):
        pair = pair[::-1]
        for policy, seconds in pair:
            done = run(policy)
            seconds.append(done.seconds)
            written.append(done.tokens)
        if asks and (not generate or (len(generate) < PAIRS[0] and sum(generate) < ENOUGH_SECONDS)):
            tokens, taken = _generate(job, len(shown.tokens))
            generate.append(taken)
            theirs.append(tokens)
    return Comparison(drafted, plain, _earliest_difference(written), generate, _earliest_difference(theirs))


def _generate_is_alike(job: Job) -> bool:
    """Whether transformers' `generate` can be asked the same: one prompt, greedy, no option that it lacks.

    In sampling it draws other random numbers.
    """
    options, own = job.options, getattr(job.target.model, "generation_config", None)
    temperature = options.get("temperature")
    greedy = temperature == 0 or (temperature is None and not getattr(own, "do_sample", False))
    return len(job.ids) == 1 and greedy and not any(name in options for name in UNLIKE)


def _generate(job: Job, count: int) -> tuple[list[int], float]:
    """Up to `count` new tokens by transformers' `generate`, and the seconds it took."""
    model: Any = job.target.model
    penalties = {name: job.options[name] for name in PENALTIES if name in job.options}
    ids = torch.tensor([job.ids[0]], device=job.target.stack.device)
    with hub.quiet():
        start = perf_counter()
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **penalties
        ).tolist()
        return out[0][len(job.ids[0]) :], perf_counter() - start


def _earliest_difference(texts: list[list[int]]) -> int | None:
    differences = [at for other in texts[1:] if (at := first_difference(texts[0], other)) is not None]
    return min(differences, default=None)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two lists differ; None when they are equal."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
