"""Stops: text is certain before it is shown, and a row ends at its first end, wherever in a block it lies."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfspec.decoding.stopping import SequenceText, Stopper, TextStream
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from tests.executors.requests import BYTES
from tests.helpers import Always, Run, Schedule, decode, engine_of, generate, make_prompts, request
from tests.models import build, tiny
from tests.tokenizers import byte_tokenizer, spaced_tokenizer

TOKENIZERS = {"bytes": byte_tokenizer(), "spaced": spaced_tokenizer()}


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def blocks_of(tokens, sizes):
    tokens, out = list(tokens), []
    for size in itertools.cycle(sizes):
        if not tokens:
            return out
        out, tokens = [*out, tokens[:size]], tokens[size:]
    return out


def stream(tokenizer, prompt, tokens, sizes=(1,), stop=()):
    """The pieces of text as they come, in blocks of the given sizes."""
    made = TextStream(tokenizer, prompt, stop)
    blocks = blocks_of(tokens, sizes)
    return [made.push(block, last=i == len(blocks) - 1) for i, block in enumerate(blocks)]


def check_adds_up(tokenizer, tokens, sizes):
    prompt = ids_of(tokenizer, "once upon")
    whole, pieces = tokenizer.decode([*prompt, *tokens]), stream(tokenizer, prompt, tokens, sizes)
    assert tokenizer.decode(prompt) + "".join(pieces) == whole
    assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in whole), "a character was split"


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 255), min_size=1, max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_any_bytes_at_all_add_up_to_what_the_tokenizer_decodes(tokens, sizes):
    check_adds_up(TOKENIZERS["bytes"], tokens, sizes)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@example(text="x\u4f60\u597d \U0001f999\U0001f469\u200d\U0001f466  a", sizes=[3, 1, 4])
@given(text=st.text(min_size=1, max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_any_text_adds_up_to_what_the_tokenizer_decodes(kind, text, sizes):
    check_adds_up(TOKENIZERS[kind], ids_of(TOKENIZERS[kind], text), sizes)


def test_a_half_received_character_is_held_back_until_it_is_whole():
    tokenizer = TOKENIZERS["bytes"]
    llama = ids_of(tokenizer, "🦙")
    assert len(llama) == 4
    assert stream(tokenizer, [], [*llama, *llama]) == ["", "", "", "🦙", "", "", "", "🦙"]


def test_a_character_cut_off_by_the_end_is_shown_as_the_tokenizer_shows_it():
    tokenizer = TOKENIZERS["bytes"]
    tokens = ids_of(tokenizer, "ab🦙")[:-1]
    assert "".join(stream(tokenizer, [], tokens)) == tokenizer.decode(tokens) == "ab\ufffd"


def test_the_space_after_the_prompt_is_kept_and_the_first_space_of_a_text_is_not():
    tokenizer = TOKENIZERS["spaced"]
    once, upon = ids_of(tokenizer, "once"), ids_of(tokenizer, "upon")
    assert "".join(stream(tokenizer, once, upon)) == " upon"
    assert "".join(stream(tokenizer, [], [*once, *upon])) == "once upon"


def test_special_tokens_have_no_text_and_hide_none():
    tokenizer = TOKENIZERS["spaced"]
    once, upon = ids_of(tokenizer, "once"), ids_of(tokenizer, "upon")
    pieces = stream(tokenizer, once, [*upon, 2, *upon, 2, 2])
    assert "".join(pieces) == tokenizer.decode([*once, *upon, *upon], skip_special_tokens=True).removeprefix("once")


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (100,)])
@pytest.mark.parametrize("stops", [("stop",), ("zzz", "stop", "stopper"), ("p now", "stop")])
def test_a_stop_string_across_tokens_is_held_back_and_cut(stops, sizes):
    tokenizer = TOKENIZERS["bytes"]
    made = TextStream(tokenizer, [], stops)
    pieces = [
        made.push(block) for block in blocks_of(ids_of(tokenizer, "go sto stop now"), sizes) if made.found is None
    ]
    assert "".join(pieces) == "go sto "
    assert made.found == "stop"


def test_text_that_only_begins_like_a_stop_string_is_released_when_it_is_not_one():
    tokenizer = TOKENIZERS["bytes"]
    pieces = stream(tokenizer, [], ids_of(tokenizer, "a<en<end"), stop=("<end>",))
    assert pieces == ["a", "", "", "", "<en", "", "", "<end"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(
    text=st.text("ab ", max_size=20), stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_stopped_text_is_the_text_before_the_first_stop_string_for_any_blocks(kind, text, stops, data):
    tokenizer = TOKENIZERS[kind]
    prompt, tokens = ids_of(tokenizer, "b"), ids_of(tokenizer, "b" + text)
    tokens = tokens[len(prompt) :]
    whole = tokenizer.decode([*prompt, *tokens])[1:]
    made, out = TextStream(tokenizer, prompt, stops), ""
    for i, token in enumerate(tokens):
        out += made.push([token], last=i == len(tokens) - 1)
        assert whole.startswith(out)
        if made.found is not None:
            break
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if ends:  # tokens are one character each: the row ends with the first stop string that is complete
        first = min(ends)
        cuts = [at for stop in stops if (at := whole[:first].find(stop)) >= 0]
        assert out == whole[: min(cuts)]
    else:
        assert out == whole
        assert made.found is None


# --------------------------------------------------------------------------------------------- text that is read later


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=80)
@given(
    tokens=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    text=st.text(max_size=8),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_text_is_the_same_piece_by_piece_whenever_it_is_read(kind, tokens, text, sizes, data):
    tokenizer = TOKENIZERS[kind]
    prompt = ids_of(tokenizer, "once")
    tokens = [*ids_of(tokenizer, text), *tokens] if data.draw(st.booleans()) else ids_of(tokenizer, "x" + text)
    expected = stream(tokenizer, prompt, tokens, sizes)
    blocks = blocks_of(tokens, sizes)
    made = SequenceText(tokenizer, prompt)
    pieces = []
    for i, block in enumerate(blocks):
        pieces.append(made.add(block, last=i == len(blocks) - 1))
        if data.draw(st.booleans()):
            read = data.draw(st.integers(0, i))
            assert str(pieces[read]) == expected[read]
    for i in data.draw(st.permutations([*range(len(blocks)), None])):
        assert str(made if i is None else pieces[i]) == ("".join(expected) if i is None else expected[i])


class Counting:
    """A tokenizer that counts how often it is asked for text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, 0

    def decode(self, token_ids, **options):
        self.asked += 1
        return self.tokenizer.decode(token_ids, **options)


def test_text_that_nobody_reads_is_not_made():
    tokenizer = Counting(TOKENIZERS["bytes"])
    run = Run(engine_of(Target(build("llama", **BYTES), tokenizer), Always(2, 3), final_only=True))
    run.add([5, 6, 7], SamplingParams(max_tokens=20))
    for _ in range(3):
        run.step()
    assert tokenizer.asked == 0
    assert all(isinstance(str(row.text), str) for row in run.rows("0"))
    assert tokenizer.asked > 0


# ------------------------------------------------------------------------------------------------------- the stopper


def test_a_block_is_cut_at_the_limit_and_an_end_before_it_is_a_stop():
    assert Stopper(10).cut([1], 8, [7, 8, 9, 6]) == (2, "", "length")
    assert Stopper(10, frozenset([5])).cut([1], 7, [7, 8, 5]) == (3, "", "stop")


class Diary:
    """A stopping criterion that writes down what it was asked, and stops at a length."""

    def __init__(self, length=None):
        self.asked, self.length = [], length

    def __call__(self, input_ids, scores):
        assert scores is None
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([self.length is not None and input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("policy", [Always(None, 0), Schedule(1, 4)], ids=["plain", "drafts"])
@pytest.mark.parametrize("end", ["length", "criterion", "eos"])
def test_stopping_criteria_are_asked_exactly_once_per_kept_token(end, policy):
    target, [prompt] = tiny("llama"), make_prompts([9], seed=5)
    free = generate(target.model, prompt, 14)
    diaries = Diary(len(prompt) + 6 if end == "criterion" else None), Diary()
    eos = frozenset([free[7]]) if end == "eos" else frozenset()
    asked = request(prompt, SamplingParams(max_tokens=14), eos_token_ids=eos, stopping_criteria=diaries)
    [done] = decode(target, [asked], policy)
    kept = {"length": 14, "criterion": 6, "eos": free.index(free[7]) + 1}[end]
    assert (done.token_ids, done.stop_reason) == (free[:kept], None)
    assert done.finish_reason == ("length" if end == "length" else "stop")
    for diary in diaries:
        assert diary.asked == [[*prompt, *free[: i + 1]] for i in range(kept)]


def test_stopping_criteria_may_ask_a_model_and_nothing_is_kept_for_gradients():
    target, [prompt], asked = tiny("llama"), make_prompts([9], seed=5), []

    def is_likely(input_ids, scores):
        asked.append(float(target.model(input_ids).logits[0, -1].softmax(-1).max().numpy()))
        return asked[-1] > 2

    one = request(prompt, SamplingParams(max_tokens=14), stopping_criteria=(is_likely,))
    [done] = decode(target, [one], Always(2, 4))
    assert done.token_ids == generate(target.model, prompt, 14) and len(asked) == 14


def test_streamed_text_is_the_tokenizers():
    """Of a random model of bytes, whose output is hardly ever valid UTF-8; `Run` adds up what steps return."""
    babbler = Target(build("llama", **BYTES), TOKENIZERS["bytes"])
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=seed) for seed in range(8)]
    for one in decode(babbler, ["once upon"] * 8, Schedule(0, 4), params):
        whole = [*ids_of(babbler.tokenizer, "once upon"), *one.token_ids]
        assert "once upon" + one.text == babbler.tokenizer.decode(whole, skip_special_tokens=True)


def test_a_stop_string_inside_a_block_ends_a_row_there(stories):
    """Text ends before the stop string, tokens with the one that completes it, and nothing follows."""
    prompt = "Once upon a time, there was"
    [free] = decode(stories, [prompt], "plain", SamplingParams(max_tokens=40))
    for at in range(3, len(free.text) - 4, 25):
        text = free.text[at : at + 4]
        seen = []
        for policy in (Always(None, 0), Always(4, 6), Schedule(0, 5)):
            for stop in (text, ("never to be read", text)):
                [done] = decode(stories, [prompt], policy, SamplingParams(max_tokens=40, stop=stop))
                assert done.text == free.text[: free.text.find(text)]
                assert (done.finish_reason, done.stop_reason) == ("stop", text)
                seen.append(done.token_ids)
        assert all(tokens == seen[0] for tokens in seen)


@pytest.mark.parametrize("backend", ["compiled", "views"])
def test_end_of_text_goes_before_a_stop_token_unless_it_is_ignored(backend):
    target, [prompt] = Target(build("llama"), backend=backend), make_prompts([9], seed=1)
    [free] = decode(target, [prompt], "plain", SamplingParams(max_tokens=20, ignore_eos=True))
    end = free.token_ids[5]
    kept = free.token_ids[: free.token_ids.index(end) + 1]
    target.defaults.config.eos_token_id = end
    for policy in (Always(None, 0), Always(2, 4, num_rounds=99)):
        for ends, ignores, wanted in (
            ((end,), False, (kept, "stop", None)),
            ((), True, (free.token_ids, "length", None)),
            ((95, end), True, (kept, "stop", end)),
        ):
            params = SamplingParams(max_tokens=20, stop_token_ids=ends, ignore_eos=ignores)
            [done] = decode(target, [prompt], policy, params)
            assert (done.token_ids, done.finish_reason, done.stop_reason) == wanted


def test_the_token_that_ends_a_row_goes_before_its_stop_string():
    target, [prompt] = Target(build("llama", **BYTES), byte_tokenizer()), make_prompts([9], seed=1)
    [free] = decode(target, [prompt], "plain", SamplingParams(max_tokens=30, ignore_eos=True))
    ends = free.token_ids[4]
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop=free.text[6:8], stop_token_ids=(ends,))
    [done] = decode(target, [prompt], Always(2, 4), params)
    assert (done.finish_reason, done.stop_reason) == ("stop", ends)


@pytest.mark.parametrize("made", [byte_tokenizer, spaced_tokenizer], ids=["bytes", "byte fallback"])
@pytest.mark.parametrize(
    "text", ["\U0001f600\U0001f600\U0001f600a b", "ab\U0001f600cd\U0001f600", "\u65e5\u672c\u8a9eab"]
)
def test_a_prompt_may_end_anywhere_even_inside_a_character(made, text):
    tokenizer = made()
    ids = ids_of(tokenizer, text)
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        got = "".join([*(stream.push([token]) for token in ids[cut:]), stream.push([], last=True)])
        assert "\ufffd" not in got
        assert text.endswith(got)


def test_a_stop_string_is_found_after_a_prompt_of_byte_tokens():
    tokenizer = spaced_tokenizer()
    emoji = ids_of(tokenizer, "\U0001f600\U0001f600")
    stream = TextStream(tokenizer, emoji, ["\U0001f600"])
    rest = ids_of(tokenizer, "\U0001f600\U0001f600\U0001f600a")[len(emoji) :]
    got = "".join(stream.push([token]) for token in rest if stream.found is None)
    assert (got, stream.found) == ("", "\U0001f600")


def test_a_copy_of_text_to_come_is_the_text():
    tokenizer = byte_tokenizer()
    text = SequenceText(tokenizer, [])
    late = [text.add(ids_of(tokenizer, part)) for part in ("ab", "cd")]
    assert [pickle.loads(pickle.dumps(one)) for one in late] == ["ab", "cd"]
    assert copy.deepcopy(late[0]) == "ab"
