"""Exit heads for a model, from prompts of a file or its own: a configuration of `LLM.tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from selfspec.errors import UnsupportedModelError
from selfspec.llm import LLM
from selfspec.params import SamplingParams
from train.configuration import check, check_least, check_positive, option
from train.samples import UserTurn
from train.sections import DataConfig
from train.texts import content_of, read_records


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Which model gets exit heads, from how many prompts, and in which time."""

    model: str = option("demo", "Model to train heads for: demo, smollm2, a folder, a .gguf file, or a hub id.")
    device: str = option("", "Where the model runs; empty means cuda if there is one, else cpu.")
    dtype: str = option("", "Its dtype; empty means float32 on the CPU, the checkpoint's own elsewhere.")
    exits: tuple[int, ...] = option((), "Layers that are tried; empty means five of the first half.")
    output: str = option("runs/exit_heads", "Heads, card and, until they are done, what a stopped run goes on from.")
    minutes: float = option(10.0, "Minutes of answering, training and measuring.")
    num_prompts: int = option(768, "Prompts that the model writes itself where data.path is empty.")
    prompt_tokens: int = option(64, "Tokens of such a prompt, at most.")
    max_new_tokens: int = option(128, "Tokens of an answer, at most.")
    seed: int = option(0, "Seed of prompts, their order and first weights.")

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "demo, smollm2, a folder, a .gguf file or a hub id", self.model)
        check(bool(self.output), "output", "a folder", self.output)
        check(min(self.exits, default=1) >= 1, "exits", "a list of layer counts from 1", list(self.exits))
        check_least(self, 1, "num_prompts", "prompt_tokens", "max_new_tokens")
        check_least(self, 0, "seed")
        check_positive(self, "minutes")


@dataclass(frozen=True, slots=True)
class HeadsRun:
    """One run that trains exit heads."""

    heads: HeadsConfig = field(default_factory=HeadsConfig)
    data: DataConfig = field(default_factory=DataConfig)


def train_heads(run: HeadsRun) -> None:
    """Train exit heads and write them, whatever they gain.

    Raises:
        ValueError: bad input.
        OSError: a file cannot be read or written.
    """
    config = run.heads
    try:
        llm = LLM(config.model, device=config.device or None, dtype=config.dtype or None, exit_heads="none")
    except (OSError, UnsupportedModelError) as error:
        raise ValueError(str(error)) from error
    prompts = (
        [content_of(one, run.data) for one in read_records(run.data)] if run.data.path else own_prompts(llm, config)
    )
    llm.tune(
        prompts,
        Path(config.output),
        minutes=config.minutes,
        exits=config.exits or None,
        max_tokens=config.max_new_tokens,
        keep=True,
        seed=config.seed,
        report=lambda line: print(line, flush=True),
    )


def own_prompts(llm: LLM, config: HeadsConfig) -> list[list[int]]:
    """Prompts that the model samples at temperature 1: user turns of its chat template or, without one, texts."""
    turn = UserTurn.of(llm.tokenizer)
    begin = getattr(llm.target.split.config, "bos_token_id", None)
    opening = [int(begin or 0)] if turn is None else turn.opening
    params = [
        SamplingParams(
            max_tokens=config.prompt_tokens,
            temperature=1.0,
            seed=config.seed * 1_000_003 + number,
            stop_token_ids=[] if turn is None else turn.ends,
            generation_config=False,
        )
        for number in range(config.num_prompts)
    ]
    texts = [one.outputs[0].token_ids for one in llm.generate([opening] * config.num_prompts, params)]
    found = [opening + text if turn is None else turn.prompt(text) for text in texts if text]
    return [prompt for prompt in found if prompt]
