"""Structured outputs, constrained and free, plain and drafted: `python -m eval structured`.

Half of the prompts ask for facts of a text as JSON, half for a call of one of three functions. Every method decodes all
of them, one at a time, greedily. Speeds are those of rounds, without reading prompts and making texts. Outputs must be
the same for plain and drafted decoding, and constrained ones that end must validate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eval.config import config_of, parser_of
from eval.questions import read_questions
from selfspec import LLM, RequestOutput, RoundOutput, SamplingParams, SpeculativeConfig, StructuredOutputs
from selfspec.control.plan import GRAMMAR
from train.configuration import check_least, flags_given, option

TEXT = {"type": "string", "maxLength": 60}
FACTS = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "people": {"type": "array", "items": TEXT, "maxItems": 3},
        "place": TEXT,
        "year": {"anyOf": [{"type": "integer", "minimum": 1000, "maximum": 2100}, {"type": "null"}]},
        "topic": {"enum": ["politics", "sports", "science", "business", "culture", "crime", "other"]},
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
    },
    "required": ["title", "people", "place", "year", "topic", "sentiment"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "search_web": {"query": TEXT, "max_results": {"type": "integer", "minimum": 1, "maximum": 50}},
    "send_message": {"recipient": TEXT, "text": TEXT, "priority": {"enum": ["low", "normal", "high"]}},
    "create_event": {"title": TEXT, "date": {"type": "string", "pattern": r"^20\d\d-[01]\d-[0-3]\d$"}, "place": TEXT},
}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CALLS = {
    "anyOf": [
        _object({"name": {"const": name}, "arguments": _object(parameters)}) for name, parameters in FUNCTIONS.items()
    ]
}
METHODS = {"free plain": "plain", "free adaptive": None, "constrained plain": "plain", "constrained adaptive": None}


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """The configuration of `python -m eval structured`."""

    model: str = option("smollm2", "Model: a name, a folder, a file or a hub id.")
    questions: str = option("", "Spec-Bench's question file, of which texts and questions are taken.")
    prompts: int = option(30, "Prompts, half of them of each kind.")
    tokens: int = option(160, "Most tokens of an output.")
    characters: int = option(700, "Characters of a text.")
    repeats: int = option(3, "How often every method decodes all prompts; the median counts.")
    whitespace: bool = option(False, "Allow spaces and line breaks between JSON's parts.")

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens", "characters", "repeats")
        check_least(self, 2, "prompts")


@dataclass(slots=True)
class Measured:
    """What a method did with all prompts."""

    outputs: list[list[int]] = field(default_factory=list)
    texts: list[tuple[str, str | None]] = field(default_factory=list)  # and why they ended
    seconds: float = 0.0  # of rounds
    num_forced: int = 0
    num_rounds: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


def asked(config: StructuredConfig) -> list[tuple[str, dict[str, Any]]]:
    """Prompts and their schemas."""
    questions = read_questions(config.questions or "spec_bench", path=config.questions)
    texts = [one.turns[0] for one in questions if one.category == "summarization"]
    tasks = [one.turns[0] for one in questions if one.category in ("qa", "writing", "roleplay")]
    half = config.prompts // 2
    facts = [f"Extract the facts of this text as JSON.\n\n{text[: config.characters]}" for text in texts[:half]]
    listed = "\n".join(f"{name}({', '.join(own)})" for name, own in FUNCTIONS.items())
    calls = [f"Functions:\n{listed}\n\nAnswer with a function call as JSON. {text}" for text in tasks[:half]]
    return [*((text, FACTS) for text in facts), *((text, CALLS) for text in calls)]


def measure(llm: LLM, several: Sequence[tuple[str, dict[str, Any]]], config: StructuredConfig, free: bool) -> Measured:
    """Decode all prompts, one after the other."""
    done = Measured()

    def count(round_: RoundOutput) -> None:
        done.seconds += round_.seconds.total - round_.seconds.prefill
        done.num_rounds += 1
        done.num_forced += sum(row.num_accepted for row in round_.rows if row.source == GRAMMAR)

    for text, schema in several:
        grammar = None if free else StructuredOutputs(json=schema, disable_any_whitespace=not config.whitespace)
        params = SamplingParams(max_tokens=config.tokens, temperature=0, structured_outputs=grammar)
        [output] = llm.chat([{"role": "user", "content": text}], params, on_round=count)
        _add(done, output)
    return done


def _add(done: Measured, output: RequestOutput) -> None:
    [own] = output.outputs
    done.outputs.append(own.token_ids)
    done.texts.append((own.text, own.finish_reason))


def check_outputs(found: dict[str, Measured], several: Sequence[tuple[str, dict[str, Any]]]) -> int:
    """How many constrained outputs have ended, all of them valid.

    Raises:
        ValueError: an output is not valid, or drafts have changed it.
    """
    from jsonschema import validate

    for kind in ("free", "constrained"):
        if found[f"{kind} plain"].outputs != found[f"{kind} adaptive"].outputs:
            raise ValueError(f"{kind} outputs differ between plain and adaptive")
    num_ended = 0
    for (text, reason), (_, schema) in zip(found["constrained plain"].texts, several, strict=True):
        if reason == "stop":
            validate(json.loads(text), schema)
            num_ended += 1
    return num_ended


def render(found: dict[str, list[Measured]], num_ended: int, num_prompts: int) -> str:
    """The table."""
    speeds = {name: [one.num_tokens / one.seconds for one in of] for name, of in found.items()}
    lines = [
        "| method | tokens | tokens/s (range) | of free plain | of constrained plain | tokens per round | forced |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, of in found.items():
        one, own = of[-1], median(speeds[name])
        shares = [f"{own / median(speeds[base]):.2f}" for base in ("free plain", "constrained plain")]
        spread = f"{own:.0f} ({min(speeds[name]):.0f} to {max(speeds[name]):.0f})"
        per_round, forced = f"{one.num_tokens / max(1, one.num_rounds):.2f}", f"{one.num_forced / one.num_tokens:.0%}"
        lines.append(f"| {name} | {one.num_tokens} | {spread} | {' | '.join(shares)} | {per_round} | {forced} |")
    return "\n".join(
        [*lines, "", f"{num_ended} of {num_prompts} constrained outputs ended, and all of these validate."]
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser_of("structured", StructuredConfig, __doc__).parse_args(arguments)
    config = config_of(StructuredConfig, options.config, flags_given(options))
    several, llm = asked(config), LLM(config.model)
    methods = {name: llm.with_speculative(SpeculativeConfig(policy=policy)) for name, policy in METHODS.items()}
    found: dict[str, list[Measured]] = {name: [] for name in METHODS}
    for repeat in range(1 + config.repeats):
        for name, one in methods.items():
            # Finished responses of an earlier repeat would hold every answer.
            own = one.with_speculative(SpeculativeConfig(policy=METHODS[name])) if name.endswith("adaptive") else one
            done = measure(own, several, config, free=name.startswith("free"))
            found[name] += [done] if repeat else []
    latest = {name: of[-1] for name, of in found.items()}
    print(render(found, check_outputs(latest, several), len(several)))
    return 0
