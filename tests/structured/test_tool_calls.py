"""Tools: grammars of calls in every format, how calls are found again, and templates that know no tools."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import validate

from selfspec import LLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from selfspec.structured.formats import FORMATS, CallReader, format_of, told_of_tools, with_short_ids
from selfspec.structured.grammars import Grammars
from selfspec.structured.tool_calls import ToolUse, gathered
from tests.helpers import Schedule
from tests.models import build
from tests.structured.grammars import bits_of
from tests.tokenizers import byte_tokenizer

EOS = 256
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}, "who": {"type": "string", "maxLength": 4}}}
SCHEMA["required"] = ["n"]
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_all"}},
]
CALLS = [("get", '{"n": 22, "who": "}\\"{"}'), ("get_all", "{}"), ("get", '{"n": 1}')]
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "llama3_json": '{{"name": "{}", "parameters": {}}}',
    "mistral": '{{"name": "{}", "arguments": {}}}',
    "mistral_args": "[TOOL_CALLS]{}[ARGS]{}",
}
JOINED = {"hermes": "\n", "llama3_json": "; ", "mistral": ", ", "mistral_args": ""}


def tokenizer_of(has_marks):
    made = byte_tokenizer()
    if has_marks:
        made.add_tokens(MARKS[:2])
        made.add_special_tokens({"additional_special_tokens": MARKS[2:]})
    return made


def use_of(parser, has_marks=True, choice=None, parallel=None, text=None):
    tokenizer = tokenizer_of(has_marks)
    own = {"tokenizer": tokenizer, "template": "", "eos": frozenset([EOS]), "parser": parser, "text": text}
    return tokenizer, ToolUse.of(TOOLS, choice, parallel, **own)


def row_of(tokenizer, use):
    return Grammars(tokenizer).row(use.outputs, frozenset([EOS]), len(tokenizer))


def written(parser, calls, text=""):
    joined = JOINED[parser].join(WRITTEN[parser].format(*call) for call in calls)
    return text + (f"[TOOL_CALLS][{joined}]" if parser == "mistral" else joined)


def follows(row, tokens):
    """Whether a grammar allows the tokens, and an end after them."""
    count = row.num_allowed(tokens)
    return count == len(tokens) and (row.has_ended or EOS in bits_of(row.mask(tokens), 512))


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("parser", FORMATS)
def test_calls_in_the_models_format_are_of_the_grammar_and_found_again(parser, has_marks):
    tokenizer, use = use_of(parser, has_marks)
    before = "" if parser == "llama3_json" else "Well <tool [TOOL: "
    whole = written(parser, CALLS, before)
    assert follows(row_of(tokenizer, use), tokenizer(whole)["input_ids"])
    dice = random.Random(0)
    for _ in range(20):  # however it comes
        reader, pieces, at = use.reader(), [], 0
        while at < len(whole):
            size = dice.randint(1, 9)
            pieces += reader.read(whole[at : at + size], at + size >= len(whole))
            at += size
        assert gathered(pieces) == (before, CALLS) and reader.has_called
    for cut in range(len(whole)):  # what came of the last call is kept, and nothing is made up
        text, calls = gathered(use.reader().read(whole[:cut], True))
        assert whole.startswith(text) and len(text) < whole.index(CALLS[0][1])
        for (name, arguments), (own, all_of) in zip(calls, CALLS, strict=False):
            assert name == own and all_of.startswith(arguments)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("parser", FORMATS)
def test_free_text_is_free_and_a_mark_leaves_nothing_but_a_call(parser, has_marks):
    tokenizer, use = use_of(parser, has_marks)
    text = "A <tool, {not} [TOOL] call: ü" + ("<think>x" if has_marks else "")
    assert follows(row_of(tokenizer, use), tokenizer(text)["input_ids"])
    assert gathered(use.reader().read(text, True)) == (text, [])
    begun = written(parser, CALLS[:1])
    begun = begun[: begun.index("get")]
    row, tokens = row_of(tokenizer, use), tokenizer(begun)["input_ids"]
    assert row.num_allowed(tokens) == len(tokens)
    assert bits_of(row.mask(tokens), 512) == tokenizer("g")["input_ids"]
    assert row.forced(3, tokens) == tokenizer("get")["input_ids"]
    assert not follows(row_of(tokenizer, use), tokenizer(written(parser, [("put", "{}")]))["input_ids"])
    assert not follows(row_of(tokenizer, use), tokenizer(written(parser, [("get", '{"n": 3}')]))["input_ids"])
    assert not follows(row_of(tokenizer, use), tokenizer(written(parser, [("get", '{"n": 1, "x": 1}')]))["input_ids"])


@pytest.mark.parametrize("parser", FORMATS)
def test_a_required_call_is_all_there_is(parser):
    named = {"type": "function", "function": {"name": "get_all"}}
    for choice in ("required", named):
        tokenizer, use = use_of(parser, choice=choice)
        assert not follows(row_of(tokenizer, use), tokenizer("text")["input_ids"])
        assert follows(row_of(tokenizer, use), tokenizer(written(parser, CALLS[1:2]))["input_ids"])
        several = tokenizer(written(parser, CALLS[1:2] * 2))["input_ids"]
        assert follows(row_of(tokenizer, use), several) == (choice == "required")
    assert not follows(row_of(tokenizer, use), tokenizer(written(parser, CALLS[2:]))["input_ids"])
    tokenizer, use = use_of(parser, parallel=False)
    row, one = row_of(tokenizer, use), tokenizer(written(parser, CALLS[:1]))["input_ids"]
    assert follows(row, one) and row.has_ended
    tokenizer, use = use_of(parser, choice="none")
    assert use is None


@pytest.mark.parametrize("parser", ["hermes", "mistral", "mistral_args"])
def test_an_answer_without_a_call_may_have_to_be_json(parser):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tokenizer, use = use_of(parser, text=StructuredOutputs(json=schema))
    for text in ('{"name": "get"}', written(parser, CALLS)):
        assert follows(row_of(tokenizer, use), tokenizer(text)["input_ids"])
    assert gathered(use.reader().read('{"name": "get"}', True)) == ('{"name": "get"}', [])
    assert not follows(row_of(tokenizer, use), tokenizer("text")["input_ids"])
    with pytest.raises(ValueError, match="cannot be asked for with tools"):
        use_of("llama3_json", text=StructuredOutputs(json=schema))


TURNS = """{% for m in messages %}{% if m.tool_calls %}CALLS{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}
{% endfor %}"""
# Of the shapes of published templates: system texts in one or the other kind of quotes, and turns with calls.
TEMPLATES = {
    "hermes": [
        r"""{%- if tools %}{{- "<|system|>Tools are within <tools></tools>:" }}{%- for t in tools %}{{- t | tojson }}
{%- endfor %}{{- "A call:\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}{%- endif %}"""
        + TURNS.replace("CALLS", "<tool_call>{{ m.tool_calls[0] | tojson }}</tool_call>"),
        "{% if tools %}<tools>{{ tools }}</tools>{{ '<tool_call>\n{\"name\": <name>}\n</tool_call>' }}{% endif %}"
        + TURNS,
    ],
    "llama3_json": [
        """{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}{{- 'Respond in the format
{"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
        + TURNS.replace("CALLS", """{{- '{"name": "' + m.name + '", ' }}{{- '"parameters": ' }}"""),
        r"""{%- if builtin_tools is defined %}{{- "Environment: ipython\n" }}{{- "<|python_tag|>" }}{%- endif %}
{%- if tools %}{{- "Respond as {\"name\": name, \"parameters\": dictionary}" }}{%- endif %}"""
        + TURNS,
    ],
    "mistral": [
        "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | string + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        + TURNS.replace("CALLS", "{{ '[TOOL_CALLS]' + m.content | string + eos_token }}"),
        TURNS.replace("CALLS", """{{- "[TOOL_CALLS] [" }}{{- '{"name": "' }}{{- "]" }}{% if tools %}{% endif %}"""),
    ],
    "mistral_args": [
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        + TURNS.replace("CALLS", "{{- '[TOOL_CALLS]' + m.tool_calls[0].function.name + '[ARGS]' }}"),
    ],
}


def test_formats_are_found_by_the_template():
    for name, several in TEMPLATES.items():
        assert [format_of(text) for text in several] == [FORMATS[name]] * len(several), name
    assert format_of("{{ messages }}") is FORMATS["hermes"]
    for unknown in (
        "{{ tools }} <tool_call>\n<function=",
        "{{ tools }} <tool_call>name\n<arg_key>",
        "{{ tools }} [f(x=1)]",
    ):
        assert format_of(unknown) is None


def test_a_template_without_tools_is_given_texts():
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"n": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]
    system, user, said, told = told_of_tools(messages, TOOLS, "")
    assert system["role"] == "system" and json.dumps(TOOLS[0]) in system["content"]
    assert said == {"role": "assistant", "content": "So\n" + WRITTEN["hermes"].format("get", '{"n": 1}')}
    assert told == {"role": "user", "content": "<tool_response>\none\n</tool_response>"} and user == messages[0]
    [own, *_] = told_of_tools([{"role": "system", "content": "Be brief."}], TOOLS, "")
    assert own["content"].startswith("Be brief.\n\n# Tools")
    assert told_of_tools(messages, [], "{{ message.tool_calls }}") == messages
    short = with_short_ids(messages)
    assert len(short[1]["tool_calls"][0]["id"]) == 9 and short[2]["tool_call_id"] == short[1]["tool_calls"][0]["id"]


@pytest.fixture(scope="module")
def llm():
    model = build("llama", vocab_size=257, eos_token_id=EOS, pad_token_id=EOS, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    return LLM(model, tokenizer=tokenizer, speculative=SpeculativeConfig(policy=Schedule(0, 4)))


def test_chats_have_calls_whose_arguments_validate(llm):
    asked = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]
    params = [SamplingParams(max_tokens=150, temperature=1.0, seed=seed) for seed in (1, 2)]
    outputs = llm.chat(asked, params, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    for output in outputs:
        [call] = output.outputs[0].tool_calls
        assert call["id"].startswith("call_") and output.outputs[0].text == ""
        if call["function"]["name"] == "get":
            validate(json.loads(call["function"]["arguments"]), SCHEMA)
    [none] = llm.chat(asked[0], SamplingParams(max_tokens=4), tools=TOOLS, tool_choice="none")
    assert none.outputs[0].tool_calls is None
    with pytest.raises(ValueError, match="tool_call_parser must be one of hermes, llama3_json"):
        llm.chat(asked[0], tools=TOOLS, tool_call_parser="xml")
    with pytest.raises(ValueError, match="the chat template's format of calls is not known here"):
        llm.chat(asked[0], tools=TOOLS, chat_template="{{ tools }} [f(x=1)]")


def test_a_mark_that_is_a_special_token_is_found():
    """Texts leave special tokens out, and calls with them, where nobody asks for them."""
    tokenizer = tokenizer_of(True)
    tokenizer.chat_template = TEMPLATES["mistral"][0] + "{{ messages[0].content }}"
    model = build("llama", vocab_size=len(tokenizer), eos_token_id=EOS, pad_token_id=EOS, max_position_embeddings=512)
    llm = LLM(model, tokenizer=tokenizer)
    for choice in ("required", "auto"):
        params = SamplingParams(max_tokens=150, temperature=1.0, logit_bias={tokenizer.vocab["[TOOL_CALLS]"]: 100})
        [output] = llm.chat([{"role": "user", "content": "Hi"}], params, tools=TOOLS[1:], tool_choice=choice)
        assert output.outputs[0].tool_calls[0]["function"] == {"name": "get_all", "arguments": "{}"}
    bias = {EOS: 100}
    [output] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(logit_bias=bias), tools=TOOLS)
    assert (output.outputs[0].text, output.outputs[0].tool_calls) == ("", None)
    assert CallReader(None).read("x") == [(None, "x", None)]
