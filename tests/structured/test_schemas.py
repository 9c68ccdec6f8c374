"""Two hundred schemas of the kinds that public suites hold: what random walks through their masks write validates."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from jsonschema import Draft202012Validator

from selfspec.loading import hub
from selfspec.structured.grammars import Grammars
from selfspec.structured.outputs import StructuredOutputs
from tests.structured.grammars import bits_of

NUM_SCHEMAS, MOST = 200, 400
WORDS = ["name", "größe", "名前", "a b", 'quo"te', "back\\slash", "emoji 🦊", "id"]
KINDS = ("object", "array", "enum", "pattern", "number", "integer", "string", "anyOf", "const", "ref", "null", "format")


def schema_of(dice, depth=0):
    """A schema, whose kinds are nested up to three deep."""
    kind = dice.choice(KINDS if depth < 3 else KINDS[2:7])
    if kind == "object":
        names = dice.sample(WORDS, dice.randint(1, 4))
        properties = {name: schema_of(dice, depth + 1) for name in names}
        required = dice.sample(names, dice.randint(0, len(names)))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = dice.randint(0, 2)
        items = {"type": "array", "items": schema_of(dice, depth + 1), "minItems": least}
        return {**items, "maxItems": least + dice.randint(0, 2)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": dice.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(ab|cd)+$", "^[äöü]{1,3}$"]),
        }
    if kind in ("number", "integer"):
        low = dice.randint(-50, 50)
        bounds = dice.choice([{"minimum": low}, {"exclusiveMaximum": low + 9}, {"minimum": low, "maximum": low + 30}])
        return {"type": kind, **bounds}
    if kind == "anyOf":
        return {"anyOf": [schema_of(dice, depth + 1) for _ in range(dice.randint(2, 3))]}
    simple = {
        "enum": {"enum": dice.sample([*WORDS, 1, 2.5, None, True], 4)},
        "string": {"type": "string", "minLength": 1, "maxLength": dice.randint(2, 9)},
        "const": {"const": dice.choice([*WORDS, 7, False])},
        "ref": {"$ref": f"#/$defs/{dice.choice(['leaf', 'list'])}"},
        "null": {"type": ["null", "boolean"]},
        "format": {"type": "string", "format": dice.choice(["date", "time", "uuid", "ipv4"])},
    }
    return simple[kind]


def whole_schema(seed):
    dice = random.Random(seed)
    leaf = {"enum": ["x", "y"]}
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/list"}]}, "maxItems": 2}
    return {**schema_of(dice), "$defs": {"leaf": leaf, "list": tree}}


@cache
def demo():
    """The embedded model's tokenizer, and the grammars of it."""
    tokenizer = hub.open_model("demo")[1]
    return tokenizer, Grammars(tokenizer)


def walk(schema, seed, spaces):
    """What a walk writes, and whether it has ended; ends and closing marks are likelier than others."""
    (tokenizer, grammars), dice, tokens = demo(), random.Random(seed), []
    eos = tokenizer.eos_token_id
    asked = StructuredOutputs(json=schema, disable_any_whitespace=not spaces)
    row, has_ended = grammars.row(asked, frozenset([eos]), len(tokenizer)), False
    closing = {token for text, token in tokenizer.get_vocab().items() if text and text[0] in '"]},'} | {eos}
    while not has_ended and len(tokens) < MOST:
        allowed = bits_of(row.mask(), len(tokenizer))
        likely = [token for token in allowed if token in closing]
        token = dice.choice(likely if likely and dice.random() < 0.5 else allowed)
        tokens.append(token)
        _, has_ended = row.take([token])
    return tokenizer.decode([token for token in tokens if token != eos]), has_ended


@pytest.mark.parametrize("part", range(4))
def test_what_walks_through_masks_write_validates(part):
    num_ended = 0
    for seed in range(part, NUM_SCHEMAS, 4):
        schema = whole_schema(seed)
        text, has_ended = walk(schema, seed, spaces=seed % 8 < 4)
        if has_ended:
            Draft202012Validator(schema).validate(json.loads(text))
            num_ended += 1
    assert num_ended > 0.9 * NUM_SCHEMAS / 4
