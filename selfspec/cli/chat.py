"""`selfspec chat`: a conversation, whose history stays in the KV cache between turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter
from typing import Any

from selfspec.cli.failure import RUN, Failure, as_sentences, say
from selfspec.cli.options import Chat
from selfspec.cli.prompts import chat_ids, has_template, read_lines, system_message
from selfspec.cli.talk import Talk

MOST_CONTEXT = 1 << 15  # tokens that are kept at most, however long the model's context is
MAX_TOKENS = 1024  # of a reply, where nobody names another number
COMMANDS = {
    "/reset": "forget the conversation",
    "/exit": "end, as Ctrl-D and Ctrl-C at the prompt do",
    "/help": "this list; Ctrl-C stops a reply",
}
ASKS = "> "


def chat(options: Chat) -> None:
    """Answer line after line until the input ends."""
    options.check()
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec.cli.job import keep, learner_of, open_target, policy_name
            from selfspec.kernels.machine import set_threads

        set_threads(options.threads)
        target = open_target(options, talk)
        if not has_template(target.tokenizer, options.model):
            raise Failure(f"chat needs a chat template, and {options.model} has none; use: selfspec generate")
        policy = policy_name(options, target)
        learner = learner_of(options, target, policy)
        conversation = Conversation(target, options, policy, learner, talk)
        try:
            for line in _lines():
                if line == "/exit":
                    break
                _answer(conversation, line)
        finally:  # interrupted or not: what was learned is good
            target.remember(conversation.engine)
            keep(target, policy, learner, options, talk)


def _answer(conversation: Conversation, line: str) -> None:
    if line in COMMANDS or (line.startswith("/") and line[1:].isalpha()):
        if line == "/reset":
            conversation.reset()
        else:
            said = "" if line == "/help" else f"there is no command {line}; "
            say(said + ", ".join(f"{name}: {what}" for name, what in COMMANDS.items()), RUN)
    elif line:
        conversation.reply(line)


class Conversation:
    """The messages so far, and an engine that has read them."""

    def __init__(self, target: Any, options: Chat, policy: str, learner: Any, talk: Talk) -> None:
        from selfspec.cli.job import decoding
        from selfspec.decoding.engine import Engine

        self._target, self._options, self._talk = target, options, talk
        self.reset()
        self._ids_of([*self._messages, {"role": "user", "content": "?"}])  # refused now, if ever
        self._room = min(target.stack.context_limit, MOST_CONTEXT)
        given = decoding(options, target)
        names = ("exit_layer", "num_draft_tokens", "drafts", "datastore", "exact")
        drafting = {name: given.pop(name) for name in names}
        drafting |= {"responses": target.responses if given.pop("reuse_responses") else None}
        self._sampling = given | {"seed": options.seed}
        with as_sentences(), talk.waiting("preparing to decode"):
            alone = {"max_batch_size": 1, "max_cached_tokens": self._room, "prefix_cache": True}
            self.engine = Engine(target, policy=policy, learn=learner, **alone, **drafting)

    def reset(self) -> None:
        """Forget all that was said."""
        self._messages = system_message(self._options.system)

    def _ids_of(self, messages: Sequence[dict[str, str]]) -> list[int]:
        from selfspec import hub

        with hub.quiet():
            return chat_ids(self._target.tokenizer, messages)

    def reply(self, text: str) -> None:
        """Write an answer as it becomes certain. One that was stopped stays in the history as far as it went."""
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = self._ids_of(messages)
        if len(ids) >= self._room:
            say(f"the conversation has {len(ids)} tokens and the context holds {self._room}; /reset starts anew", RUN)
            return
        most = min(self._options.max_tokens or MAX_TOKENS, self._room - len(ids))
        with as_sentences():
            [request] = self._target.requests([ids], self._sampling | {"max_new_tokens": most})
            request_id = self.engine.submit(request)
        start = perf_counter()
        try:
            done = self._write(request_id)
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._messages = [*messages, {"role": "assistant", "content": done.text}]
        if self._options.stats:
            facts = [f"{len(done.tokens)} tokens", f"{len(done.tokens) / (perf_counter() - start):.0f} tokens/s"]
            facts.append(f"acceptance length {done.stats.mean_acceptance_length:.2f}")
            facts.append(f"{done.num_cached_tokens} of {len(ids)} prompt tokens from the cache")
            self._talk.console.print(" · ".join(facts), style="dim", soft_wrap=True)
        if done.finish_reason == "length" and len(ids) + len(done.tokens) >= self._room:
            say(f"the context of {self._room} tokens is full; /reset starts anew", RUN)

    def _write(self, request_id: int) -> Any:
        """The completion, once all of it is on stdout."""
        with ExitStack() as reading, _stoppable() as is_stopped:
            reading.enter_context(self._talk.waiting("reading the conversation"))
            while True:
                if is_stopped():
                    self.engine.cancel(request_id)
                for round_ in self.engine.step():
                    for row in round_.rows:
                        if row.text:
                            reading.close()
                        sys.stdout.write(row.text)
                        if row.completion is not None:
                            return row.completion
                sys.stdout.flush()


def _lines() -> Iterator[str]:
    """What a person types, or the lines of a pipe; stripped. Ends with the input, or with Ctrl-C at an empty prompt."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield from read_lines()
        return
    readline: Any = None
    with suppress(ImportError):  # there is none on Windows
        import readline  # editing and history for `input`
    while True:
        try:
            if sys.stdout.isatty():
                line = input(ASKS)
            else:  # which `input` would write to
                sys.stderr.write(ASKS)
                sys.stderr.flush()
                line = input()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            if readline is not None and readline.get_line_buffer():
                continue  # what was typed is taken back
            return
        yield line.strip()


@contextmanager
def _stoppable() -> Iterator[Any]:
    """Ctrl-C is noted, to be acted on between steps; a second one interrupts at once."""
    stops = 0

    def note(*signal_: Any) -> None:
        nonlocal stops
        stops += 1
        if stops > 1:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # in another thread than the main one, which gets no signals
        yield lambda: False
        return
    try:
        yield lambda: stops > 0
    finally:
        signal.signal(signal.SIGINT, before)
