"""What structured outputs are refused, and in which words; what is bounded."""

from __future__ import annotations

import sys

import pytest

from selfspec import SamplingParams, StructuredOutputs
from selfspec.structured.grammars import MOST_KEPT, Grammars
from selfspec.structured.outputs import MAX_EXPRESSION, MAX_SCHEMA
from tests.structured.grammars import EOS, VOCAB, bits_of
from tests.tokenizers import byte_tokenizer, word_tokenizer

LOOP = {}
LOOP["properties"] = {"a": LOOP}
NAMES = "json, json_object, regex, choice, grammar"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, f"must have one of {NAMES}, got none"),
        ({"json_object": False}, f"must have one of {NAMES}, got none"),
        ({"regex": "a", "json": {}}, "got json and regex"),
        ({"json": "{"}, "json must be a JSON schema, and it is no JSON"),
        ({"json": LOOP}, "it is no JSON"),
        ({"json": {"const": b"a"}}, "it is no JSON"),
        ({"json": "false"}, "a mapping or its text, got False"),
        ({"json": [1]}, r"json must be a JSON schema, a mapping or its text, got \[1\]"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"regex": 3}, "regex must be a text, got 3"),
        ({"grammar": b"start: x"}, "grammar must be a text"),
        ({"choice": "yes"}, "choice must be a list of texts, got 'yes'"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must hold non-empty texts"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
        ({"json": '{"a": "' + "x" * (1 << 20) + '"}'}, f"json must have at most {MAX_SCHEMA} characters, got 10485"),
        ({"regex": "a?" * (1 << 15)}, f"regex must have at most {MAX_EXPRESSION} characters, got 65536"),
        ({"grammar": "start: " + "a" * (1 << 15)}, f"grammar must have at most {MAX_EXPRESSION} characters"),
        ({"json": {"items": [{"pattern": "a?" * (1 << 15)}]}}, f"patterns of at most {MAX_EXPRESSION} characters"),
        ({"json": {"patternProperties": {"a?" * (1 << 15): {}}}}, f"patterns of at most {MAX_EXPRESSION} characters"),
        ({"choice": [f"{i:08d}" for i in range(50_000)]}, f"choice must have at most {MAX_SCHEMA} characters"),
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(given, said):
    with pytest.raises(ValueError, match=said) as refused:
        StructuredOutputs(**given)
    assert "\n" not in str(refused.value)


def test_parameters_take_structured_outputs_alone():
    with pytest.raises(ValueError, match=r"structured_outputs must be a selfspec.StructuredOutputs or None, got \{"):
        SamplingParams(structured_outputs={"regex": "a"})


def refusal(tokenizer=None, **given):
    with pytest.raises(ValueError) as refused:
        Grammars(tokenizer or byte_tokenizer()).row(StructuredOutputs(**given), frozenset([EOS]), VOCAB)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 300
    return said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {"type": "objekt"}}, "json is refused by llguidance: Invalid type: objekt"),
        ({"json": {"$ref": "#/$defs/a"}}, "Pointer '/$defs/a' does not exist"),
        ({"json": {"$ref": "#"}}, "no text follows it"),
        ({"json": {"allOf": [{"$ref": "#"}]}}, "no text follows it"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable schema"),
        ({"regex": "(a"}, "regex is refused by llguidance: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"grammar": "start: foo"}, 'grammar is refused by llguidance: at 1(8): unknown name: "foo"'),
        ({"grammar": "start: start"}, "no text follows it"),
        ({"grammar": "no grammar at all"}, "grammar is refused by llguidance: "),
    ],
)
def test_a_grammar_that_cannot_be_honoured_is_refused_with_its_reason(given, said):
    assert said in refusal(**given)


A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [
        ({}, False),
        ({"additionalProperties": False}, False),
        ({"additionalProperties": True}, True),
        ({"minProperties": 2}, True),
        ({"required": ["a", "b"]}, True),
    ],
)
def test_an_object_has_no_properties_that_its_schema_does_not_name_unless_it_says_or_needs_them(given, goes_on):
    asked = StructuredOutputs(json={"type": "object", **A, **given}, disable_any_whitespace=True)
    row = Grammars(byte_tokenizer()).row(asked, frozenset([EOS]), VOCAB)
    written, [comma] = (byte_tokenizer()(text)["input_ids"] for text in ('{"a":1', ","))
    assert row.num_allowed(written) == len(written)
    assert (comma in bits_of(row.mask(written))) == goes_on


def test_a_tokenizer_that_cannot_be_read_is_named():
    assert "cannot be decoded with this tokenizer" in refusal(word_tokenizer(), regex="a")
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer; load with tokenizer="):
        Grammars(None).row(StructuredOutputs(regex="a"), frozenset(), VOCAB)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'selfspec\[structured\]'"):
        Grammars(byte_tokenizer()).row(StructuredOutputs(regex="a"), frozenset([EOS]), VOCAB)


EXPLODING = ["(.*a){30}.*b.{200}", "[01]*1[01]{20}", "(a{1,1000}){1,1000}", "((a|b)*c){1,500}d", "(a|aa|aaa)*b{900}"]


@pytest.mark.parametrize("regex", EXPLODING)
def test_an_exploding_regex_is_followed_or_refused_but_never_waited_for(regex):
    """Each step has a budget, whatever the automaton's size."""
    row = Grammars(byte_tokenizer()).row(StructuredOutputs(regex=regex), frozenset([EOS]), VOCAB)
    for at in range(60):
        allowed = bits_of(row.mask())
        assert allowed
        _, has_ended = row.take([allowed[at % len(allowed)]])
        if has_ended:
            break


def test_ten_thousand_choices_and_a_recursive_schema_are_followed():
    texts = [f"choice number {i}" for i in range(10_000)]
    row = Grammars(byte_tokenizer()).row(StructuredOutputs(choice=texts), frozenset([EOS]), VOCAB)
    wanted = byte_tokenizer()("choice number 4711")["input_ids"]
    assert row.forced(20) == wanted[:14] and row.num_allowed(wanted) == len(wanted)
    tree = {
        "type": "object",
        "properties": {"of": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["of"],
        "additionalProperties": False,
    }
    asked = StructuredOutputs(json=tree, disable_any_whitespace=True)
    row = Grammars(byte_tokenizer()).row(asked, frozenset([EOS]), VOCAB)
    deep = byte_tokenizer()('{"of":[' * 50 + "]}" * 50)["input_ids"]
    assert row.take(deep) == (len(deep), True)


def test_a_schema_that_refers_three_thousand_deep_does_not_end_the_process():
    """llguidance follows references by recursion, which a usual stack would not hold."""
    parts = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**parts, "d3000": {"type": "null"}}}
    row = Grammars(byte_tokenizer()).row(StructuredOutputs(json=schema), frozenset([EOS]), VOCAB)
    tokens = byte_tokenizer()("[" * 3000)["input_ids"]
    assert row.num_allowed(tokens) == 3000


@pytest.mark.parametrize("depth", [300, 5000])
def test_a_deep_schema_is_refused(depth):
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(ValueError, match="recursion"):
        Grammars(byte_tokenizer()).row(StructuredOutputs(json=text), frozenset([EOS]), VOCAB)


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch):
    grammars, made = Grammars(byte_tokenizer()), []
    honest = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *given: made.append(1) or honest(*given))

    def ask(text, eos=EOS):
        return grammars.row(StructuredOutputs(regex=text), frozenset([eos]), VOCAB)

    first, second = ask("ab+"), ask("ab+")
    first.take([byte_tokenizer()("a")["input_ids"][0]])
    assert len(made) == 1 and bits_of(second.mask()) != bits_of(first.mask())
    ask("ab+", eos=3)
    assert len(made) == 2
    for i in range(MOST_KEPT):
        ask(f"a{i}")
    ask("ab+")
    assert len(made) == 3 + MOST_KEPT
