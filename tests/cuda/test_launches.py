"""Which kernels run with which shapes, for plans of every kind; written down in launches.json.

A change of the code that runs the same kernels leaves the file as it is. `python -m tests.cuda.test_launches` writes
it anew; the difference then belongs into the review of the change.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from selfspec.control.plan import NUM_BINS, Plan, Policy, SecondChoices, ShadowPlan, SurvivalStop
from selfspec.decoding.engine import Engine
from tests.cuda.standin import with_runner
from tests.helpers import make_prompts
from tests.kernels.samples import layout_of
from tests.models import build
from tests.target import Target

FILE = Path(__file__).with_name("launches.json")
HOT = {"temperature": 0.8, "seed": 3}
FILTERED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4}
CALIBRATED = SurvivalStop((0.9,) * NUM_BINS, 0.3)
RULE = SecondChoices((0.5,) * NUM_BINS, (0.5,) * NUM_BINS, 0.1, 4)


def layout(rows, device="cpu"):
    """The layout of a call of (tokens held before, new tokens) per row, in pages of 16."""
    return layout_of(rows, 16, 0, False, 0, device)[0]


# name: (number of rows, how they pick, a function of the number of rows that makes the plan)
PLANS = {
    "plain, one row": (1, {}, lambda n: Plan(None, (0,) * n)),
    "plain, three rows": (3, {}, lambda n: Plan(None, (0,) * n)),
    "plain, nine rows": (9, {}, lambda n: Plan(None, (0,) * n)),
    "plain, sampled, one row": (1, HOT, lambda n: Plan(None, (0,) * n)),
    "plain, filtered, two rows": (2, FILTERED, lambda n: Plan(None, (0,) * n)),
    "fixed, one row": (1, {}, lambda n: Plan(1, (3,) * n)),
    "fixed, a deeper exit": (1, {}, lambda n: Plan(3, (3,) * n)),
    "fixed, long drafts": (1, {}, lambda n: Plan(1, (8,) * n)),
    "fixed, four rows": (4, {}, lambda n: Plan(2, (2,) * n)),
    "fixed, eight rows": (8, {}, lambda n: Plan(2, (2,) * n)),
    "fixed, nine rows": (9, {}, lambda n: Plan(2, (2,) * n)),
    "fixed, ragged": (3, {}, lambda n: Plan(2, (4, 0, 1))),
    "fixed, sampled, one row": (1, HOT, lambda n: Plan(2, (2,) * n)),
    "fixed, filtered, two rows": (2, FILTERED, lambda n: Plan(2, (2,) * n)),
    "stopped by confidence": (2, {}, lambda n: Plan(1, (4,) * n, 0.5)),
    "stopped by survival": (2, {}, lambda n: Plan(1, (4,) * n, stop=CALIBRATED)),
    "stopped by confidence, sampled": (2, HOT, lambda n: Plan(1, (4,) * n, 0.5, keep_confidence=True)),
    "looks at layers": (2, {}, lambda n: Plan(2, (2,) * n, shadow=ShadowPlan((1, 3), (0, 1), 4))),
    "second choices": (1, {}, lambda n: Plan(2, (3,) * n, second_choices=RULE)),
    "second choices, sampled, three rows": (3, HOT, lambda n: Plan(2, (3,) * n, second_choices=RULE)),
    "a part of the vocabulary": (2, HOT, lambda n: Plan(1, (3,) * n, draft_vocab=40)),
    "a part of the vocabulary, second choices": (
        1,
        {},
        lambda n: Plan(1, (2,) * n, second_choices=RULE, draft_vocab=40),
    ),
}
FUSED = ("plain, one row", "fixed, four rows", "fixed, nine rows")  # plans that are run by fused layers, too
NAMES = (*PLANS, *(f"fused layers: {name}" for name in FUSED))


class Once(Policy):
    """The plan of a name, in every round."""

    def __init__(self, make):
        self.make = make

    def plan(self, rows):
        return self.make(len(rows))


def launches(name):
    """The kernels of every recording that two rounds make, in order; those of equal layers in one line."""
    plan = name.removeprefix("fused layers: ")
    count, how, make = PLANS[plan]
    target = with_runner(Target(build("llama"), engine="views"), packing=None if plan == name else "copy")
    engine = Engine(target, policy=Once(make), max_batch_size=count, max_cached_tokens=64 * count, page_size=16)
    for prompt in make_prompts([5 + i for i in range(count)]):
        engine.submit(prompt, max_new_tokens=20, **how)
    engine.step()
    engine.step()
    tape = target.stack.runner.graphs.capture
    size = 2 if plan == name else 5  # kernels of a layer, without products
    return [lines(made.kernels, size) for made in tape.made]


def lines(kernels, size):
    """Kernels in order; groups of `size` that repeat (those of one layer after another) are counted."""
    done, at = [], 0
    while at < len(kernels):
        group = kernels[at : at + size]
        count = 1
        while len(group) == size and kernels[at + size * count : at + size * (count + 1)] == group:
            count += 1
        taken = group if count > 1 else group[:1]
        done.append(f"{count} x {' '.join(taken)}")
        at += count * len(taken)
    return done


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_runs_the_kernels_that_are_written_down(name):
    assert launches(name) == json.loads(FILE.read_text("utf-8"))[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({name: launches(name) for name in NAMES}, indent=1) + "\n", "utf-8")
