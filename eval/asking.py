"""Ask every method every question, in an order that rotates from question to question, and record the answers."""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple

from eval.answers import Failure, Method, Prompt, Row, Turn, choice_of
from eval.measurement import no_garbage_collection, rotated
from eval.questions import Question, prompt_ids, prompt_text
from eval.records import RunFolder

REPORT_SECONDS = 5.0  # between two lines of progress
FULL_COLLECTION = 32  # questions between full garbage collections, which take longer the more rows are kept


class Shared(NamedTuple):
    """Settings that all methods share."""

    tokenizer: Any
    context_limit: int
    max_new_tokens: int
    seed: int


class Conversation(NamedTuple):
    """The turns of a question that a method has answered."""

    turns: list[Turn]
    texts: list[str]


def warm_up(methods: Sequence[Method], question: Question, shared: Shared, times: int) -> None:
    """Let every method answer the first turn of a question, untimed. Errors are ignored here and recorded later."""
    for method in methods:
        for _ in range(times):
            try:
                method(prompt_of(question, 0, [], shared, 0))
            except Exception as problem:
                if not isinstance(problem, Failure) or problem.kind == "timeout":
                    break
        method.forget()


def ask_all(
    methods: Sequence[Method],
    questions: Sequence[Question],
    shared: Shared,
    folder: RunFolder,
    report: Callable[[str, Row], None],
) -> None:
    """Ask every question that the folder has no row for yet.

    Every row has `harness_seconds`, the time outside the methods' own work since the row before it.

    Args:
        report: called with the method's name and the row.

    Raises:
        FullError: a row could not be written; the folder can be resumed.
    """
    with no_garbage_collection():
        last = perf_counter()
        for i, question in enumerate(questions):
            gc.collect() if i % FULL_COLLECTION == 0 else gc.collect(1)
            for method in rotated(methods, i):
                if folder.has(method.name, question.question_id):
                    continue
                done, failure, method_seconds = _ask(method, question, shared, i)
                row = _row(method.name, question, done, failure)
                now = perf_counter()
                row["harness_seconds"], last = max(0.0, now - last - method_seconds), now
                if failure:
                    folder.add_error(row)
                else:
                    folder.add_answer(method.name, row)
                report(method.name, row)


def _ask(method: Method, question: Question, shared: Shared, index: int) -> tuple[Conversation, Failure | None, float]:
    """Ask all turns of a question, up to the first failure.

    Returns:
        The answered turns, the failure if there was one, and the seconds of the method's work.
    """
    done, method_seconds = Conversation([], []), 0.0
    for number in range(len(question.turns)):
        start = perf_counter()
        try:
            prompt = prompt_of(question, number, done.texts, shared, index)
            start = perf_counter()
            turn = method(prompt)
            text = decoded(shared.tokenizer, tuple(turn.tokens))
        except Failure as failure:
            return done, failure, method_seconds + failure.seconds
        except Exception as problem:
            sentence = " ".join(f"{type(problem).__name__}: {problem}".split())
            took = perf_counter() - start
            return done, Failure("error", sentence, took), method_seconds + took
        method_seconds += turn.seconds
        done.turns.append(turn)
        done.texts.append(text)
    return done, None, method_seconds


def prompt_of(question: Question, turn: int, texts: Sequence[str], shared: Shared, index: int) -> Prompt:
    """The prompt of a turn.

    Args:
        texts: the answers to the turns before it.
        index: the question's index; it is added to the seed.

    Raises:
        Failure: the prompt fills the context, or has no token.
    """
    text = prompt_text(shared.tokenizer, question.turns[: turn + 1], texts)
    ids = prompt_ids(shared.tokenizer, text)
    capacity = shared.context_limit - len(ids)
    if capacity < 1:
        limit = shared.context_limit
        raise Failure("too_long", f"the prompt of turn {turn + 1} has {len(ids)} tokens, the model's context {limit}")
    if not ids:
        raise Failure("error", f"the prompt of turn {turn + 1} has no token")
    return Prompt(question.question_id, turn, text, ids, min(shared.max_new_tokens, capacity), shared.seed + index)


@lru_cache(maxsize=32)
def decoded(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    """The text of tokens; cached, since methods often give equal answers."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _row(method: str, question: Question, done: Conversation, failure: Failure | None) -> Row:
    """A line of an answer file or, after a failure, of errors.jsonl."""
    about: Row = {"question_id": question.question_id, "category": question.category}
    if failure is None:
        return {
            **about,
            "answer_id": hashlib.sha256(f"{method} {question.question_id!r}".encode()).hexdigest()[:22],
            "model_id": method,
            "choices": [choice_of(done.turns, done.texts)],
            "tstamp": time.time(),
        }
    error = {"kind": failure.kind, "method": method, **about, "turn": len(done.turns), "sentence": failure.sentence}
    return {**error, "seconds": failure.seconds + sum(turn.seconds for turn in done.turns), "tstamp": time.time()}


class Progress:
    """Prints the run's progress on standard error, between calls of methods.

    Args:
        done: number of rows by method in the resumed folder.
    """

    def __init__(self, methods: Sequence[str], num_questions: int, done: dict[str, int]) -> None:
        self.num_calls, self.num_done = num_questions * len(methods), sum(done.values())
        self.num_new = 0  # rows of this session
        self.tokens, self.seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        self.start = self.first_call = self.last = perf_counter()

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """Start the clock from which the remaining time is estimated."""
        self.first_call = perf_counter()

    def __call__(self, method: str, row: Row) -> None:
        self.num_done, self.num_new = self.num_done + 1, self.num_new + 1
        if "kind" in row:
            self.say(f"{method}, question {row['question_id']}: {row['kind']}: {row['sentence']}")
        else:
            self.tokens[method] += sum(row["choices"][0]["new_tokens"])
            self.seconds[method] += sum(row["choices"][0]["wall_time"])
        now = perf_counter()
        if now - self.last >= REPORT_SECONDS or self.num_done == self.num_calls:
            self.last = now
            left = (now - self.first_call) / self.num_new * (self.num_calls - self.num_done)
            pairs = [(name, seconds) for name, seconds in self.seconds.items() if seconds]
            speeds = ", ".join(f"{name} {self.tokens[name] / seconds:.0f}" for name, seconds in pairs)
            self.say(f"{self.num_done} of {self.num_calls} answers, {left:.0f} s left; tokens/s: {speeds or '-'}")
