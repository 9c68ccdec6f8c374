"""What the check at load finds: kernels that are wrong for several rows, for one, or when memory has changed hands."""

from __future__ import annotations

import pytest
import torch

from selfspec.executors.cuda.runner import install
from selfspec.executors.cuda.self_check import round_problem
from selfspec.kernels.layout import CONTENT, LAST, REMAINING
from selfspec.kernels.suite import REFERENCE
from tests.cuda.standin import runner_of, with_runner
from tests.cuda.tape import Tape
from tests.models import build
from tests.slow import slow
from tests.target import Target


def flawed(is_wrong):
    """Kernels whose picks are wrong where a call is."""

    def pick(logits, sampling):
        picks, confidences = REFERENCE.pick(logits, sampling)
        return (picks + 1) % logits.shape[1] if is_wrong(logits, sampling) else picks, confidences

    return REFERENCE._replace(pick=pick)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma2", torch.float32), slow("gpt2", torch.bfloat16)]
)
def test_right_rounds_pass(family, dtype):
    target = with_runner(Target(build(family).to(dtype)))
    assert round_problem(target.split, target.split.runner) is None
    assert target.split.runner.graphs.num_recorded > 0


@pytest.mark.parametrize(
    ("is_wrong", "problem"),
    [
        (lambda logits, sampling: bool(sampling.temperature.any()), "two sampled rows"),
        (lambda logits, sampling: not sampling.temperature.any(), "a single row"),
        (lambda logits, sampling: len(logits) > 2, "two sampled rows"),
    ],
)
def test_wrong_picks_are_found(is_wrong, problem):
    target = with_runner(Target(build("llama"), backend="views"), kernels=flawed(is_wrong))
    assert problem in round_problem(target.split, target.split.runner)


def test_wrong_acceptance_of_right_picks_is_found():
    def accept(*given):
        done = REFERENCE.accept(*given)
        drafted, accepted = done.record[:, 0], done.record[:, 1]
        done.record[:, 1:2] = torch.where(accepted == drafted, 0, drafted)[:, None]
        return done

    target = with_runner(Target(build("llama"), backend="views"), kernels=REFERENCE._replace(accept=accept))
    assert "two sampled rows" in round_problem(target.split, target.split.runner)


def test_rows_that_a_device_advances_wrongly_are_found():
    def accept(state, *given):
        done = REFERENCE.accept(state, *given)
        state[:, 1:3] += (done.num_kept > 0)[:, None] * torch.tensor([-1, 1])  # as if it had kept a token less
        return done

    target = with_runner(Target(build("llama"), backend="views"), kernels=REFERENCE._replace(accept=accept))
    assert "a second round of two sampled rows" in round_problem(target.split, target.split.runner)


@pytest.mark.parametrize("column", [LAST, CONTENT, REMAINING])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("has_drafted", [False, True])
def test_a_row_that_a_device_advances_off_by_one_is_found_whatever_the_tokens(column, by, has_drafted):
    """Tokens of a second round are often the same: this model repeats itself, and accepts all that its exit drafts."""

    def accept(state, *given):
        done = REFERENCE.accept(state, *given)
        state[(done.num_kept > 1) if has_drafted else (done.num_kept == 1), column] += by
        state[:, LAST] %= 96
        return done

    target = with_runner(Target(build("llama"), backend="views"), kernels=REFERENCE._replace(accept=accept))
    assert "a second round of two sampled rows" in round_problem(target.split, target.split.runner)


class Forgetful(Tape):
    """Its recordings are right once; after that, what they read belongs to others."""

    def record(self, body):
        made = super().record(body)
        replay = made.replay

        def later():
            replay()
            if made.num_replays > 1:
                made.outputs[0].add_(1)

        made.replay = later
        return made


def test_a_recording_that_is_right_only_at_first_is_found():
    target = Target(build("llama"), backend="views")
    target.split.runner = runner_of(target.split, tape=Forgetful())
    assert "when it was replayed" in round_problem(target.split, target.split.runner)


def test_a_runner_whose_rounds_are_wrong_is_taken_away(caplog):
    split = Target(build("llama"), backend="views").split
    install(split, lambda one: runner_of(one, flawed(lambda logits, sampling: sampling.sampled)))
    assert split.runner is None
    assert "a round of two sampled rows picks other tokens" in caplog.text
