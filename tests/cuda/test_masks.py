"""Rows with grammars beside free rows, in the same recordings."""

from __future__ import annotations

import pytest

from selfspec import SamplingParams
from selfspec.control.plan import GRAMMAR
from selfspec.core import LOOKUP, Request
from selfspec.executors.eager import EagerExecutor
from tests.executors.requests import alone, assert_same, engine_of, new_target
from tests.helpers import Always, Run, make_prompts
from tests.structured.grammars import ASKED, EOS

NAMES = ("regex", None, "schema", "lark")  # None: a free row
SAMPLINGS = ({}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 1}, {"repetition_penalty": 1.2})


@pytest.mark.parametrize("exit_layer", [None, LOOKUP, 2])
def test_rows_with_grammars_share_the_recordings_of_free_rows(exit_layer, monkeypatch):
    asked = []
    for i, (name, own) in enumerate(zip(NAMES, SAMPLINGS, strict=True)):
        [prompt] = make_prompts([6 + i], seed=i)
        given = None if name is None else ASKED[name]
        params = SamplingParams(max_tokens=30, seed=i, structured_outputs=given, **own)
        asked.append(Request(prompt, params, frozenset([EOS])))
    wanted = [alone("eager", one) for one in asked]
    made = new_target("cuda")
    monkeypatch.setattr(EagerExecutor, "round", None)
    run = Run(engine_of("cuda", Always(exit_layer, 3, num_rounds=9, most_forced=9), made))
    for one in asked:
        run.add(one)
    for output, plain in zip(run.finish().outputs, wanted, strict=True):
        assert_same(output, plain)
    assert any(row.source == GRAMMAR for round_ in run.rounds for row in round_.rows), "forced tokens are drafted"
    keys = {key for _, key in made.split.runner.graphs._kept}
    assert any(key.slots == len(asked) for key in keys) and {key.exit_layer for key in keys} <= {0, exit_layer or 0}
