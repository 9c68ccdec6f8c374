"""What a caller's code raises, interrupts, and too little memory: no other row suffers, and no token is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec.cli.failure import ending
from selfspec.core import LOOKUP, Draft, Sequence
from selfspec.decoding.outputs import SpecStats
from selfspec.drafting.lookup import RowLookup
from selfspec.executors.cpu.executor import CompiledRounds
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.executors.eager import EagerExecutor
from selfspec.kernels import compiled_call
from selfspec.model.draft_vocabulary import Frequencies
from selfspec.params import SamplingParams
from tests.executors.requests import RECORDED, assert_same, engine_of, most_executors, plain
from tests.executors.test_conformance import Both
from tests.helpers import Always, Run, make_prompts, request
from tests.helpers import engine_of as engine_on
from tests.models import tiny

# After what an executor's fast path has done.
LATE = {"cpu": (CompiledRounds, "run"), **dict.fromkeys(RECORDED, (RecordedRounds, "take"))}


class Fails:
    """A processor or criterion that raises once a row holds so many tokens."""

    def __init__(self, at: int, problem: BaseException) -> None:
        self.at, self.problem = at, problem

    def __call__(self, ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= self.at:
            raise self.problem
        return False if scores is None else scores


@most_executors
@pytest.mark.parametrize("name", ["processor", "criterion"])
@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_what_a_callers_code_raises_in_a_later_round_costs_no_other_row_a_token(kind, name, problem):
    (asked, wanted), (other, others) = plain(kind, 0), plain(kind, 7)
    policy = Always(2, 2, num_rounds=1000)
    run = Run(engine_of(kind, policy))
    fails = Fails(len(asked.prompt_token_ids) + 5, problem("no"))  # within the first plan
    bad = replace(asked, stopping_criteria=(fails,))
    if name == "processor":
        bad = replace(asked, params=replace(asked.params, logits_processors=fails))
    first, second = run.add(other), run.add(bad)
    with pytest.raises(problem, match="no"):
        while True:
            run.step()
    assert name != "processor" or not run.rounds, "it was the first plan"
    before = len(run.rounds)
    run.finish()
    assert len(run.rounds[0].rows) == 2 and len(run.rounds) > before, "what was decoded before is reported"
    observed = [id(one.seconds) for _, rounds in policy.seen for one in rounds]
    assert observed == [id(one.seconds) for one in run.rounds if one.plan is not None], "every round, once"
    assert_same(run.output(first), others)
    got = run.output(second)
    assert got.finish_reason == "abort"
    assert len(got.token_ids) > 0 and got.token_ids == wanted.token_ids[: len(got.token_ids)]


def go_on(run: Run, problem: type[BaseException]) -> int:
    """Steps until nothing is left to do; how often one raised."""
    raised = 0
    while run.engine.has_unfinished_requests():
        try:
            run.step()
        except problem:
            raised += 1
    run.finish(check=False)
    return raised


@most_executors
@pytest.mark.parametrize(("problem", "at"), [(KeyboardInterrupt, 1), (KeyboardInterrupt, 2), (MemoryError, 4)])
def test_an_interrupt_after_a_call_whose_result_is_lost_costs_no_token(kind, problem, at, monkeypatch):
    owner, name = LATE.get(kind, (EagerExecutor, "accept"))
    honest, calls = getattr(owner, name), []

    def interrupted(*given, **named):
        made = honest(*given, **named)
        calls.append(made)
        if len(calls) == at:
            raise problem
        return made

    asked = [plain(kind, one) for one in (0, 3, 6, 7)]
    monkeypatch.setattr(owner, name, interrupted)
    run = Run(engine_of(kind, Both(5), max_num_seqs=3))
    for one, _ in asked:
        run.add(one)
    assert go_on(run, problem) == 1
    for output, (_, wanted) in zip(run.outputs, asked, strict=True):
        assert_same(output, wanted)


@most_executors
@pytest.mark.parametrize(("owner", "name"), [(Sequence, "append"), (Frequencies, "add"), (SpecStats, "add_round")])
def test_a_row_that_is_interrupted_while_it_takes_its_last_tokens_is_aborted_alone(kind, owner, name, monkeypatch):
    """Were it to go on, it would have no capacity, and write where others do."""
    (asked, wanted), (other, others) = plain(kind, 0), plain(kind, 7)
    run, honest, calls = Run(engine_of(kind, Always(2, 2, num_rounds=4))), getattr(owner, name), []
    first, second = run.add(asked), run.add(other)

    def interrupted(*given, **named):
        made = honest(*given, **named)
        if not calls and any(row.request_id == first and row.num_remaining == 0 for row in run.engine.running):
            calls.append(made)
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(owner, name, interrupted)
    assert go_on(run, KeyboardInterrupt) == 1
    assert run.output(first).finish_reason == "abort"
    assert run.sequences[first].completion_token_ids == wanted.token_ids
    assert_same(run.output(second), others)


# --------------------------------------------------------------------------------------------------- too little memory


class Full:
    """The compiled functions, of which the one that runs plans finds no memory while it is told so."""

    def __init__(self, library: Any) -> None:
        self.library, self.is_full = library, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def selfspec_program(self, *given: Any) -> Any:
        return 1 if self.is_full else self.library.selfspec_program(*given)


def test_too_little_memory_is_an_error_that_costs_no_token(monkeypatch):
    asked, wanted = plain("cpu", 7)
    library = Full(compiled_call.functions())
    monkeypatch.setattr(compiled_call, "functions", lambda: library)
    run = Run(engine_of("cpu", max_step_seconds=0.0))
    run.add(asked)
    run.step()
    library.is_full = True
    with pytest.raises(MemoryError, match="too little memory for a round of 1 tokens; decode fewer rows at once"):
        run.step()
    library.is_full = False
    assert_same(run.finish().outputs[0], wanted)


@pytest.mark.parametrize(("problem", "said"), [(MemoryError("too little"), "too little"), (MemoryError(), "memory")])
def test_the_command_says_so_in_one_sentence(capsys, problem, said):
    assert ending(problem) == 1
    assert capsys.readouterr().err.startswith(f"selfspec: {said}")


# ------------------------------------------------------------------------------- no token is left that can be sampled

AT = 12  # a prompt of 9 tokens: its 4th new one cannot be sampled
SENTENCE = r"^no token can be sampled at position 12, where all logits are -inf or one of them is no number; let "
SENTENCES = {
    float("-inf"): SENTENCE,
    float("nan"): r"^logits_processors\[0\] \(emptied.*\) must return .* NaN at position 12;",
}
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, seed=3)


def emptied(value: float) -> SamplingParams:
    """Leaves no token after a prefix of `AT` tokens or more."""
    return replace(
        SAMPLED, logits_processors=lambda ids, scores: torch.full_like(scores, value) if ids.shape[1] >= AT else scores
    )


def sampled(prompt: list[int], params: SamplingParams) -> list[int]:
    run = Run(engine_on(tiny("llama")))
    run.add(request(prompt, params))
    return run.finish().outputs[0].token_ids


@pytest.mark.parametrize("value", SENTENCES)
@pytest.mark.parametrize("policy", ["plain", Always(3, 5), Always(0, 5)], ids=["plain", "exit", "lookup"])
def test_a_row_without_a_token_to_sample_is_aborted_and_no_other_suffers(policy, value):
    prompts, run = make_prompts([9, 7]), Run(engine_on(tiny("llama"), policy))
    bad, good = run.add(request(prompts[0], emptied(value))), run.add(request(prompts[1], SAMPLED))
    with pytest.raises(ValueError, match=SENTENCES[value]):
        while True:
            run.step()
    run.finish(check=False)
    assert run.output(good).token_ids == sampled(prompts[1], SAMPLED)
    assert (run.output(bad).finish_reason, len(run.output(bad).token_ids)) == ("abort", AT - 9)


@pytest.mark.parametrize("policy", ["plain", Always(3, 5)], ids=["plain", "exit"])
def test_positions_that_are_drafted_beyond_the_end_raise_nothing(policy):
    [prompt] = make_prompts([9])
    run = Run(engine_on(tiny("llama"), policy))
    run.add(request(prompt, replace(emptied(float("-inf")), max_tokens=AT - 9)))
    assert run.finish().outputs[0].token_ids == sampled(prompt, SAMPLED)[: AT - 9]


def test_a_row_that_ends_before_raises_nothing(monkeypatch):
    """Its end lies in the same block as the position where nothing is left."""
    [prompt] = make_prompts([9])
    wanted = sampled(prompt, SAMPLED)[: AT - 9]
    text = [*prompt, *wanted, 5, 5]
    monkeypatch.setattr(RowLookup, "match", 1)
    monkeypatch.setattr(RowLookup, "draft", lambda self, n: Draft(text[run.engine.running[0].num_tokens :][:n], 1))
    run = Run(engine_on(tiny("llama"), Always(LOOKUP, 5)))
    stop = (lambda ids, scores: ids.shape[1] == AT,)
    run.add(request(prompt, emptied(float("-inf")), stopping_criteria=stop))
    [output] = run.finish(check=False).outputs
    assert (output.token_ids, output.finish_reason) == (wanted, "stop")
    assert output.stats.num_accepted_draft_tokens > 0
