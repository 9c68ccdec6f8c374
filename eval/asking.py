"""Every method answers every question, question by question in rotating order, and is written down."""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple

from eval.answers import Failure, Method, Prompt, Row, Turn, choice_of, worked_seconds
from eval.questions import Question, encoded, prompt_ids, prompt_text
from eval.records import RunFolder
from eval.timing import rotated

SAY_EVERY = 5.0  # seconds between two lines about answers
WHOLE_COLLECTION = 32  # questions; to look through all kept rows after each would take ever longer
Told = Callable[[str, Row], None]  # a method and its answer or error row


class Shared(NamedTuple):
    """What all methods share."""

    tokenizer: Any
    context_limit: int
    max_new_tokens: int
    seed: int


class Conversation(NamedTuple):
    """The turns that a method has answered."""

    turns: list[Turn]
    texts: list[str]
    text_tokens: list[int]  # of every text


def warm_up(methods: Sequence[Method], question: Question, shared: Shared, times: int) -> None:
    """Every method answers the first turn of a question, untimed; one that fails will say so when it counts."""
    for method in methods:
        for _ in range(times):
            try:
                method(prompt_of(question, 0, [], shared, 0))
            except Exception as problem:
                if not isinstance(problem, Failure) or problem.kind == "timeout":
                    break


def ask_all(
    methods: Sequence[Method], questions: Sequence[Question], shared: Shared, folder: RunFolder, told: Told
) -> None:
    """Ask what has not been asked yet.

    Every row has `harness_seconds`: what passed outside the methods' own work since the one before it.

    Raises:
        FullError: a row could not be written; the folder can be resumed.
    """
    with _no_garbage_collection():
        last = perf_counter()
        for i, question in enumerate(questions):
            gc.collect() if i % WHOLE_COLLECTION == 0 else gc.collect(1)
            for method in rotated(methods, i):
                if folder.has(method.name, question.question_id):
                    continue
                done, failure, worked = _ask(method, question, shared, i)
                row = _row(method.name, question, done, failure)
                now = perf_counter()
                row["harness_seconds"], last = max(0.0, now - last - worked), now
                if failure:
                    folder.add_error(row)
                else:
                    folder.add_answer(method.name, row, [turn.rounds for turn in done.turns])
                told(method.name, row)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage is collected between questions only, and what is loaded already is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _ask(method: Method, question: Question, shared: Shared, index: int) -> tuple[Conversation, Failure | None, float]:
    """All turns of a question, or as many as went well and what happened then; and the seconds of the method's work."""
    done, worked = Conversation([], [], []), 0.0
    for number in range(len(question.turns)):
        start = perf_counter()
        try:
            prompt = prompt_of(question, number, done.texts, shared, index)
            start = perf_counter()
            turn = method(prompt)
            text = decoded(shared.tokenizer, tuple(turn.tokens)) if turn.text is None else turn.text
            num_tokens = len(encoded(shared.tokenizer, text))
        except Failure as failure:
            return done, failure, worked + failure.seconds
        except Exception as problem:
            sentence = " ".join(f"{type(problem).__name__}: {problem}".split())
            took = perf_counter() - start
            return done, Failure("error", sentence, took), worked + took
        worked += turn.seconds if turn.asked_seconds is None else turn.asked_seconds
        done.turns.append(turn)
        done.texts.append(text)
        done.text_tokens.append(num_tokens)
    return done, None, worked


def prompt_of(question: Question, turn: int, texts: Sequence[str], shared: Shared, index: int) -> Prompt:
    """A turn with what came before it.

    Args:
        texts: the answers to the turns before.
        index: of the question, which has its own seed.

    Raises:
        Failure: the context has no room for another token.
    """
    text = prompt_text(shared.tokenizer, question.turns[: turn + 1], texts)
    ids = prompt_ids(shared.tokenizer, text)
    room = shared.context_limit - len(ids)
    if room < 1:
        limit = shared.context_limit
        raise Failure("too_long", f"the prompt of turn {turn + 1} has {len(ids)} tokens, the model's context {limit}")
    if not ids:
        raise Failure("error", f"the prompt of turn {turn + 1} has no token")
    return Prompt(question.question_id, turn, text, ids, min(shared.max_new_tokens, room), shared.seed + index)


@lru_cache(maxsize=32)
def decoded(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    """The text of tokens, kept for the methods that answer the same."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _row(method: str, question: Question, done: Conversation, failure: Failure | None) -> Row:
    """A line of an answer file or, after a failure, of the errors."""
    about: Row = {"question_id": question.question_id, "category": question.category}
    if failure is None:
        return {
            **about,
            "answer_id": hashlib.sha256(f"{method} {question.question_id!r}".encode()).hexdigest()[:22],
            "model_id": method,
            "choices": [choice_of(done.turns, done.texts, done.text_tokens)],
            "tstamp": time.time(),
        }
    what = {"kind": failure.kind, "method": method, **about, "turn": len(done.turns), "sentence": failure.sentence}
    return {**what, "seconds": failure.seconds + sum(turn.seconds for turn in done.turns), "tstamp": time.time()}


class Progress:
    """Says on standard error how far the run is, now and then, between calls: nothing of it runs beside what is timed.

    Args:
        done: questions by method that an earlier session has answered, or failed to.
    """

    def __init__(self, methods: Sequence[str], num_questions: int, done: dict[str, int]) -> None:
        self.num_calls, self.num_done = num_questions * len(methods), sum(done.values())
        self.num_fresh = 0  # answers of this session
        self.tokens, self.seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        self.start = self.paced_from = self.last = perf_counter()

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """The pace, and with it the time still to go, counts from here."""
        self.paced_from = perf_counter()

    def __call__(self, method: str, row: Row) -> None:
        self.num_done, self.num_fresh = self.num_done + 1, self.num_fresh + 1
        if "kind" in row:
            self.say(f"{method}, question {row['question_id']}: {row['kind']}: {row['sentence']}")
        else:
            self.tokens[method] += sum(row["choices"][0]["new_tokens"])
            self.seconds[method] += worked_seconds(row)
        now = perf_counter()
        if now - self.last >= SAY_EVERY or self.num_done == self.num_calls:
            self.last = now
            left = (now - self.paced_from) / self.num_fresh * (self.num_calls - self.num_done)
            pairs = [(name, seconds) for name, seconds in self.seconds.items() if seconds]
            speeds = ", ".join(f"{name} {self.tokens[name] / seconds:.0f}" for name, seconds in pairs)
            self.say(f"{self.num_done} of {self.num_calls} answers, {left:.0f} s left; tokens/s: {speeds or '-'}")
