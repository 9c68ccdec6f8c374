"""Structured outputs that tests ask for, and walks through their grammars."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np

from selfspec.structured.grammars import Grammars
from selfspec.structured.outputs import StructuredOutputs
from selfspec.structured.row_grammar import RowGrammar
from selfspec.structured.tool_calls import ToolUse
from tests.tokenizers import byte_tokenizer

VOCAB, EOS = 257, 256
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["red", "reddish", "green"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "see", "parameters": PERSON}},
    {"type": "function", "function": {"name": "end"}},
]


def tools_of(choice: str, parser: str) -> StructuredOutputs:
    """Text and calls of tools, or calls alone."""
    own = {"tokenizer": byte_tokenizer(), "template": "", "eos": frozenset([EOS]), "parser": parser}
    made = ToolUse.of(TOOLS, choice, **own)
    assert made is not None
    return made.outputs


ASKED = {
    "schema": StructuredOutputs(json=PERSON, disable_any_whitespace=True),
    "spaces": StructuredOutputs(json=PERSON),
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="([a-f]{2}-){2,3}[0-9]*(end|ending)?"),
    "choice": StructuredOutputs(choice=["one of these", "one of those", "another"]),
    "lark": StructuredOutputs(grammar='start: item+ "."\nitem: "ab" | "abc" | /[x-z]{1,3}/'),
    "calls": tools_of("required", "mistral_args"),
    "text or calls": tools_of("auto", "hermes"),
    "gbnf": StructuredOutputs(grammar='root ::= ("a" | "b" root "c")+ "; "'),
}


def bits_of(mask: Any, vocab: int = VOCAB) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.frombuffer(np.asarray(mask).tobytes(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab]).tolist()


class Judge:
    """Masks by a fresh matcher for every question, which knows no drafts."""

    def __init__(self, asked: StructuredOutputs, tokenizer: Any, eos: frozenset[int], vocab: int) -> None:
        self._row = Grammars(tokenizer).row(asked, eos, vocab)

    def after(self, tokens: list[int]) -> tuple[list[int], bool]:
        """What may follow, and whether the grammar has ended."""
        fresh = self._row._matcher.deep_copy()
        assert fresh.consume_tokens(tokens), fresh.get_error()
        return bits_of(fresh.compute_bitmask()), fresh.is_stopped()


def new_row(name: str) -> RowGrammar:
    return Grammars(byte_tokenizer()).row(ASKED[name], frozenset([EOS]), VOCAB)


def judge_of(asked: StructuredOutputs) -> Judge:
    return Judge(asked, byte_tokenizer(), frozenset([EOS]), VOCAB)


assert llguidance.__name__
