"""Speeds on held-out prompts, in turns: plain decoding, `adaptive` without exit heads, and with them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfspec.core import RoundOutput
from selfspec.learning.card import PLAIN, WITH, WITHOUT
from selfspec.learning.written import Task
from selfspec.loading.policy_store import PolicyStore
from selfspec.model.exit_heads import ExitHeads
from selfspec.params import SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from selfspec.llm import LLM

PLACES = 4  # of a draft, whose agreement is measured


@dataclass
class Measured:
    """What was measured, prompt by prompt; `seconds` and `tokens` by the names of `card`."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_prompts: int = 0
    num_different: int = 0

    @property
    def speeds(self) -> dict[str, float]:
        """Tokens per second."""
        return {name: sum(self.tokens[name]) / sum(self.seconds[name]) for name in self.seconds}


def measure_speeds(
    llm: LLM, heads: ExitHeads, prior: Any, tasks: Sequence[Task], has_time: Callable[[], bool]
) -> Measured:
    """Decode prompts one at a time, each in all three ways, whose order changes.

    Args:
        heads: as the split model holds them, on its device and in its dtype.
        prior: acceptance statistics that `adaptive` with the heads starts from.
        has_time: whether there is time for another prompt; the first one is measured in any case.
    """
    split, found = llm.target.split, Measured()
    ways: list[tuple[str, LLM, ExitHeads | None]] = []
    kept = split.exit_heads
    try:
        for name, policy, own in ((PLAIN, "plain", None), (WITHOUT, None, None), (WITH, None, heads)):
            split.exit_heads = own
            way = llm.with_speculative(SpeculativeConfig(policy=policy))
            way.target.policies = PolicyStore(split)
            way.target.policies.prior = prior if own is not None else None
            way.prefix_cache_tokens = 0  # every way reads every prompt
            way.target.costs()
            ways.append((name, way, own))
            _decode(way, tasks[0]._replace(limit=min(8, tasks[0].limit)))  # what is compiled or packed at first use
        for number, task in enumerate(tasks):
            if number and not has_time():
                break
            outputs = {}
            for at in range(len(ways)):
                name, way, split.exit_heads = ways[(number + at) % len(ways)]
                begun = time.perf_counter()
                outputs[name] = _decode(way, task)
                found.seconds[name].append(time.perf_counter() - begun)
                found.tokens[name].append(len(outputs[name]))
            found.num_prompts += 1
            found.num_different += any(own != outputs[PLAIN] for own in outputs.values())
    finally:
        split.exit_heads = kept
    return found


def _decode(llm: LLM, task: Task, **options: Any) -> list[int]:
    params = SamplingParams(
        max_tokens=task.limit, temperature=task.temperature, seed=task.seed, generation_config=False
    )
    [output] = llm.generate([list(task.prompt)], params, **options)
    return output.outputs[0].token_ids


def agreement_by_place(
    llm: LLM, heads: ExitHeads, layer: int, tasks: Sequence[Task], has_time: Callable[[], bool]
) -> list[float]:
    """The share of right tokens at each of the first places of drafts by an exit, where all before them were right."""
    judged, right = [0] * PLACES, [0] * PLACES

    def count(round_: RoundOutput) -> None:
        for row in round_.rows:
            for place in range(min(row.num_drafted, row.num_accepted + 1)):
                judged[place] += 1
                right[place] += place < row.num_accepted

    split = llm.target.split
    kept = split.exit_heads
    try:
        split.exit_heads = heads
        fixed = llm.with_speculative(SpeculativeConfig(exit_layer=layer, num_speculative_tokens=PLACES))
        for number, task in enumerate(tasks):
            if number and not has_time():
                break
            _decode(fixed, task, on_round=count)
    finally:
        split.exit_heads = kept
    return [hits / seen for hits, seen in zip(right, judged, strict=True) if seen]
