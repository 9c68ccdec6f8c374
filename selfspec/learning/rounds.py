"""What rounds that draft at an exit take here, over plain rounds: all kinds are measured in turns, as others work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from selfspec.core import RoundOutput
from selfspec.model.exit_heads import ExitHeads
from selfspec.params import SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from selfspec.llm import LLM

LENGTHS = (1, 2, 3)  # drafted tokens
TURNS, NUM_TOKENS = 4, 8  # the first turn does not count; tokens of each kind and turn
LONGEST_PROMPT = 16  # tokens: rounds are measured, not reading
Rounds = Mapping[tuple[int, int], float]  # by exit and drafted tokens: over a plain round


def measure_rounds(llm: LLM, heads: ExitHeads, prompt: Sequence[int], has_time: Callable[[], bool]) -> Rounds:
    """The median seconds of rounds at the exits of `heads` over the median of plain ones.

    Args:
        heads: as the split model holds them.
        prompt: token ids.
        has_time: whether there is time for another turn; two are made in any case.
    """
    split, found = llm.target.split, defaultdict[tuple[int, int], list[float]](list)
    kinds = [kind for layer in heads.layers for kind in ((0, 0), *((layer, length) for length in LENGTHS))]
    ways = {}
    for layer, length in kinds:
        own: dict[str, Any] = {"exit_layer": layer, "num_speculative_tokens": length} if layer else {"policy": "plain"}
        ways[layer, length] = llm.with_speculative(SpeculativeConfig(**own))
    kept, split.exit_heads = split.exit_heads, heads
    try:
        for turn in range(TURNS):
            if turn > 1 and not has_time():
                break
            if turn == 1:
                found.clear()
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:

                def note(done: RoundOutput, kind: tuple[int, int] = kind) -> None:
                    if done.rows and all(row.num_drafted == kind[1] for row in done.rows):
                        found[kind].append(done.seconds.decoding)

                params = SamplingParams(
                    max_tokens=max(NUM_TOKENS, 3 * (kind[1] + 1)),
                    temperature=0.0,
                    ignore_eos=True,
                    generation_config=False,
                )
                ways[kind].generate([list(prompt[-LONGEST_PROMPT:])], params, on_round=note)
    finally:
        split.exit_heads = kept
    plain = median(found.pop((0, 0)))
    return {kind: median(each) / plain for kind, each in found.items()}


def expected_gain(rounds: Rounds, exit_layer: int, right: float) -> tuple[float, int]:
    """Expected tokens per second over those of plain decoding with drafts of the best length, and that length.

    A draft of d tokens gives 1 + a + .. + a^d tokens (arXiv 2211.17192), where a is the exit's agreement.

    Args:
        right: the exit's agreement.
    """
    gains = [
        (sum(right**place for place in range(length + 1)) / ratio, length)
        for (layer, length), ratio in rounds.items()
        if layer == exit_layer
    ]
    return max(gains, default=(0.0, 1))
