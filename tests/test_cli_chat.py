"""`selfspec chat`: turns through a pipe or a terminal, interrupts, and a context that fills up."""

from __future__ import annotations

import os
import re
import select
import signal
from time import sleep

import pytest

from selfspec.decoding.engine import LLMEngine
from tests.cli_fixtures import TEMPLATE, assert_refused, save_model
from tests.test_cli_process import start


@pytest.fixture
def chat(run, chat_folder):
    def call(*lines, options=("--temperature", 0), folder=chat_folder, quiet=True):
        more = ("--quiet",) if quiet else ()
        return run("chat", "--model", folder, *options, *more, stdin="\n".join(lines).encode())

    return call


@pytest.fixture
def replies(answer):
    """What the model answers, turn by turn, when the whole conversation is one prompt each time."""

    def call(*texts, system=None, **params):
        said, found = [] if system is None else [("system", system)], []
        for text in texts:
            said.append(("user", text))
            prompt = "".join(f"{role}: {content}\n" for role, content in said) + "bot:"
            done = answer(prompt, **params)
            said.append(("assistant", done.text))
            found.append(done.text)
        return "".join(text + "\n" for text in found)

    return call


def test_every_line_is_a_turn_of_one_conversation(chat, replies):
    done = chat("hello", "", "and you?", "ok", options=("--temperature", 0, "--max-tokens", 9))
    assert done == (0, replies("hello", "and you?", "ok", max_tokens=9), "")


@pytest.mark.parametrize("policy", ["plain", "adaptive"])
def test_sampling_and_drafting_are_those_of_generate(chat, replies, policy):
    options = ("--max-tokens", 8, "--temperature", 0.9, "--seed", 4, "--system", "be kind", "--policy", policy)
    done = chat("one", "two", options=options)
    wanted = replies("one", "two", system="be kind", max_tokens=8, temperature=0.9, seed=4)
    assert done == (0, wanted, "")


def test_commands(chat, replies):
    done = chat(
        "hello",
        "/reset",
        "hello",
        "/help",
        "/dance",
        "/exit",
        "never read",
        options=("--temperature", 0, "--max-tokens", 7),
    )
    once = replies("hello", max_tokens=7)
    assert (done.code, done.out) == (0, once + once)
    assert (
        done.err.count("/reset: forget") == 2
        and "/system TEXT: another" in done.err
        and "there is no command /dance" in done.err
    )


PLAIN = ("--temperature", 0, "--max-tokens", 6, "--policy", "plain")
LINE = r"6 tokens · \d+ tokens/s · nothing drafted"
MORE = r" · acceptance length 1\.00 · rounds: plain 6 · (\d+) of (\d+) prompt tokens from the cache · [\d.]+ s, of .*"


def test_after_a_reply_a_line_tells_its_speed_and_stats_tells_more(chat):
    lines = chat("/stats", "hello", "/stats", "more", options=PLAIN, quiet=False).err.splitlines()
    assert lines[0] == "there is no reply yet" and len(lines) == 4
    assert re.fullmatch(LINE, lines[1]) and re.fullmatch(LINE + MORE, lines[2]) and re.fullmatch(LINE, lines[3])
    every = chat("hello", "more", options=(*PLAIN, "--stats"), quiet=False).err.splitlines()
    [first, second] = [tuple(map(int, re.fullmatch(LINE + MORE, line).groups())) for line in every]
    assert first == (0, len("user: hello\nbot:"))
    assert second[0] == len("user: hello\n") < second[1], "from there on the template calls the bot otherwise"
    drafted = ("--temperature", 0, "--max-tokens", 20, "--exit-layer", 2, "--num-speculative-tokens", 3)
    told = chat("hello", options=drafted, quiet=False).err
    assert re.search(r"20 tokens · \d+ tokens/s · \d+ of \d+ drafted tokens accepted", told)


def test_a_model_that_does_not_say_how_to_sample_is_sampled_as_chats_are(chat, replies):
    wanted = replies("hello", max_tokens=60, temperature=0.7, min_p=0.05)
    assert chat("hello", options=("--max-tokens", 60)).out == wanted != replies("hello", max_tokens=60)
    free = replies("hello", max_tokens=60, temperature=0.7)
    assert chat("hello", options=("--max-tokens", 60, "--min-p", 0)).out == free


def test_temperature_and_system_are_set_in_between(chat, replies):
    done = chat(
        "/temperature 1.3", "hello", "/reset", "/temperature", "/temperature x", "/temperature -1",
        "/system be kind", "hello", options=("--max-tokens", 9), quiet=False,
    )  # fmt: skip
    way = {"max_tokens": 9, "temperature": 1.3, "min_p": 0.05}
    assert done.out == replies("hello", **way) + replies("hello", system="be kind", **way)
    assert done.err.count("temperature: 1.3") == 2 and done.err.count("/temperature needs a number") == 2
    assert "system: be kind" in done.err


def test_a_system_message_comes_before_what_was_said(chat, replies):
    done = chat("hello", "/system be kind", "/reset", "hello", options=("--temperature", 0, "--max-tokens", 9))
    assert done.out == replies("hello", max_tokens=9) + replies("hello", system="be kind", max_tokens=9)


def test_a_model_without_a_template_is_refused(run, model_folder):
    assert_refused(run("chat", "--model", model_folder, stdin=b"hi\n"), 2, "chat template", "selfspec generate")


def test_a_template_that_refuses_is_said_before_anybody_types(run, tmp_path):
    save_model(tmp_path, template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    assert_refused(run("chat", "--model", tmp_path, "--system", "s", stdin=b"hi\n"), 2, "no system", "--system")


def test_wrong_options_are_refused_before_a_model_is_looked_for(run):
    assert_refused(run("chat", "--model", "/no/such/folder", "--top-p", 2), 2, "--top-p", "(0, 1]")


def test_a_full_context_is_said_and_reset_goes_on(chat, replies):
    long = "x" * 200  # of 256
    done = chat("a" * 300, long, "short", "/reset", "hello", options=("--temperature", 0, "--max-tokens", 99))
    first, last = replies(long, max_tokens=45), replies("hello", max_tokens=99)
    assert (done.code, done.out) == (0, first + last)
    told = done.err.splitlines()
    assert len(told) == 3 and all("/reset" in line for line in told)
    assert "has 311 tokens and the context holds 256" in told[0] and "is full" in told[1] and "holds 256" in told[2]


def test_input_that_is_no_text_is_refused(run, chat_folder):
    assert_refused(run("chat", "--model", chat_folder, stdin=b"caf\xe9\n"), 2, "stdin", "not valid UTF-8")


def test_a_terminal_is_asked_line_by_line(run, chat_folder, replies, monkeypatch):
    typed = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *asks: next(typed))
    assert run("chat", "--model", chat_folder, "--max-tokens", 5, "--temperature", 0, "--quiet") == (
        0,
        replies("hello", max_tokens=5),
        "> > ",
    )


@pytest.mark.parametrize("ends", [EOFError, KeyboardInterrupt])
def test_the_end_of_input_and_an_interrupt_at_the_prompt_end_it_well(run, chat_folder, monkeypatch, ends):
    def types(*asks):
        raise ends

    monkeypatch.setattr("builtins.input", types)
    assert run("chat", "--model", chat_folder) == (0, "", "> \n")


def test_an_interrupt_stops_a_reply_and_keeps_what_was_written(chat, answer, monkeypatch):
    step, counts = LLMEngine.step, iter(range(99))

    def interrupted(engine, *given):
        outputs = step(engine, *given)
        if next(counts) == 0:  # a step with a first token has one round
            signal.raise_signal(signal.SIGINT)
        return outputs

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    done = chat("hello", "go on", options=("--temperature", 0, "--max-tokens", 30, "--policy", "plain"))
    assert signal.getsignal(signal.SIGINT) is before
    first, second = done.out.split("\n", 1)
    whole = answer("user: hello\nbot:", max_tokens=30).text
    assert done.code == 0 and len(first) < 5 and whole.startswith(first)
    going_on = f"user: hello\nassistant: {first}\nuser: go on\nbot:"
    assert second == answer(going_on, max_tokens=30).text + "\n"


@pytest.mark.slow
def test_ctrl_c_in_a_process_stops_the_reply_alone(tmp_path):
    """The reply is longer than what a pipe holds, so that it cannot end before it is interrupted."""
    save_model(tmp_path, template=TEMPLATE, max_position_embeddings=100_000)
    call = ("chat", "--model", tmp_path, "--max-tokens", 90_000, "--policy", "plain", "--quiet")
    with start(*call) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(b"/reset\n/exit\n")
        assert (process.returncode, said) == (0, b"") and out.endswith(b"\n") and len(out) < 90_000


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX's")
def test_at_a_real_terminal_ctrl_c_ends_an_empty_prompt_only(chat_folder):
    import pty

    ours, theirs = pty.openpty()
    with start("chat", "--model", chat_folder, "--max-tokens", 5, pipe=theirs, start_new_session=True) as process:
        _at_a_terminal(process, ours)
    os.close(ours)
    os.close(theirs)


def _at_a_terminal(process, ours):
    def until(text):
        seen = b""
        while text not in seen:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
        return seen

    try:
        until(b"> ")
        os.write(ours, b"hello\r")
        until(b"> ")
        os.write(ours, b"half a line")
        until(b"half a line")
        sleep(0.2)
        process.send_signal(signal.SIGINT)
        until(b"> ")
        assert process.poll() is None
        sleep(0.5)  # an interrupt that comes before Python waits for keys is not seen
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
