"""Acceptance statistics for a model's folder: python -m train.prior MODEL [--config configs/train/demo.yaml]

They hold the acceptance rate of every early exit by confidence, on greedy and sampled continuations of texts like those
that the model was trained on. `adaptive` starts from them on a machine on which the model was not used before.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from selfspec.calibrate import profile
from selfspec.control.acceptance import Tracker
from selfspec.control.plan import Policy, ShadowPlan
from selfspec.core import Plan, RoundOutput
from selfspec.core import Sequence as Row
from selfspec.errors import UnsupportedModelError, whole
from selfspec.llm import LLM
from selfspec.loading.names import folder_of
from selfspec.params import SamplingParams, SpeculativeConfig
from train.config import load_config
from train.corpus import read_corpus

TEMPERATURES = (0.0, 0.8)  # in turns
PROMPT_CHARS = 400


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model, in which the file is written; or demo")
    parser.add_argument(
        "--config", default="configs/train/demo.yaml", help="configuration with the corpus; default: %(default)s"
    )
    parser.add_argument("--num-texts", type=int, default=32, help="number of texts; default: 32")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens per text; default: 128")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of texts; default: 0")
    given = parser.parse_args(arguments)
    try:
        print(store(given))
    except (ValueError, UnsupportedModelError) as error:
        print(f"train.prior: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train.prior: {error}", file=sys.stderr)
        return 1
    return 0


class Watch(Policy):
    """Plain decoding with shadow picks of all layers at every position, which `tracker` counts."""

    def __init__(self, num_layers: int) -> None:
        self.tracker = Tracker(num_layers)
        self._layers = tuple(range(1, num_layers))

    def plan(self, rows: list[Row]) -> Plan:
        lengths, shadow = (0,) * len(rows), ShadowPlan(self._layers, tuple(range(len(rows))), 1)
        return Plan(None, lengths, shadow=shadow if self._layers else None)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for round_ in rounds:
            for outcome in round_.rows:
                if outcome.shadow is not None:
                    self.tracker.add_shadow(outcome.shadow)
            self.tracker.pass_time(1)


def store(given: argparse.Namespace) -> Path:
    """Continue texts and write the statistics; returns the file.

    Raises:
        ValueError: an option is out of range, or the corpus has no suitable files.
        OSError: a file cannot be read or written.
    """
    for name in ("num_texts", "max_new_tokens"):
        whole(f"--{name.replace('_', '-')}", getattr(given, name), 1)
    folder = folder_of(given.model)
    if not folder.is_dir():
        raise ValueError(f"the model must be a folder, where the file is written, or demo, got {given.model!r}")
    llm = LLM(given.model)
    split = llm.target.split
    watch = Watch(split.num_layers)
    llm = llm.with_speculative(SpeculativeConfig(policy=watch))
    for i, prompt in enumerate(itertools.islice(_prompts(given.config, given.seed), given.num_texts)):
        temperature = TEMPERATURES[i % len(TEMPERATURES)]
        length = given.max_new_tokens
        llm.generate(
            prompt, SamplingParams(max_tokens=length, temperature=temperature, seed=i, generation_config=False)
        )
        print(f"text {i + 1} of {given.num_texts}", file=sys.stderr, flush=True)
    return profile.store_prior(folder, split, watch.tracker.state())


def _prompts(config: str, seed: int) -> Iterator[str]:
    """Parts of files that the model was trained on."""
    corpus = read_corpus(load_config(config).corpus)
    dice = random.Random(seed)
    files = [file.text for file in corpus.train if len(file.text) > 2 * PROMPT_CHARS]
    if not files:
        raise ValueError(f"the corpus of {config} must have files of more than {2 * PROMPT_CHARS} characters, got none")
    while True:
        text = dice.choice(files)
        start = text.find("\n", dice.randrange(len(text) - PROMPT_CHARS)) + 1
        yield text[start : start + PROMPT_CHARS]


if __name__ == "__main__":
    raise SystemExit(main())
