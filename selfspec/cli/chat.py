"""`selfspec chat`: a conversation, whose history stays in the KV cache between turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from selfspec.cli.failure import RUN, Failure, say
from selfspec.cli.options import IgnoreGenerationConfig, Learn, ModelOption, ModelOptions, Quiet, System, as_sentences
from selfspec.cli.prompts import chat_ids, has_template, read_lines, system_message
from selfspec.cli.session import chosen, opened
from selfspec.cli.status import StatusConsole
from selfspec.core import SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from selfspec.decoding.outputs import CompletionOutput
    from selfspec.llm import LLM

MAX_CONTEXT = 1 << 15  # tokens that are kept at most, however long the model's context is
MAX_TOKENS = 1024  # of a reply, where nobody names another number
COMMANDS = {
    "/reset": "forget the conversation",
    "/exit": "end, as Ctrl-D and Ctrl-C at the prompt do",
    "/help": "this list; Ctrl-C stops a reply",
}
CURSOR = "> "


def chat(
    *,
    model: ModelOption = None,
    options: ModelOptions,
    speculative: SpeculativeConfig,
    learn: Learn = None,
    sampling: SamplingParams,
    ignore_generation_config: IgnoreGenerationConfig = False,
    system: System = None,
    stats: Annotated[bool, Option("--stats", help="After a reply: tokens, speed, acceptance, cached tokens.")] = False,
    quiet: Quiet = False,
) -> None:
    """Answer line after line until the input ends."""
    if ignore_generation_config:
        sampling = replace(sampling, generation_config=False)
    with (
        StatusConsole(quiet) as status,
        opened(
            model := chosen(model, status, "smollm2"),  # the embedded model has no chat template
            options,
            speculative,
            status,
            learn=learn,
            max_num_seqs=1,
            prefix_cache=True,
        ) as llm,
    ):
        if not has_template(llm, model):
            raise Failure(f"chat needs a chat template, and {model} has none; use: selfspec generate")
        conversation = Conversation(llm, sampling, system, status, stats)
        try:
            for line in _lines():
                if line == "/exit":
                    break
                if line == "/reset":
                    conversation.reset()
                elif line in COMMANDS or (line.startswith("/") and line[1:].isalpha()):
                    unknown = "" if line == "/help" else f"there is no command {line}; "
                    say(unknown + ", ".join(f"{name}: {what}" for name, what in COMMANDS.items()), RUN)
                elif line:
                    conversation.reply(line)
        finally:
            llm.keep_statistics(conversation.engine)


class Conversation:
    """The messages so far, and an engine whose prefix cache has their keys and values."""

    def __init__(
        self, llm: LLM, sampling: SamplingParams, system: str | None, status: StatusConsole, stats: bool
    ) -> None:
        self._llm, self._sampling, self._status, self._stats = llm, sampling, status, stats
        self._system = system_message(system)
        self.reset()
        chat_ids(llm, [*self._messages, {"role": "user", "content": "?"}])  # refused now, if ever
        self._max_tokens = min(llm.target.split.context_limit, MAX_CONTEXT)
        self._num_replies = 0
        with status.waiting("preparing to decode"), as_sentences():
            self.engine = llm.engine(max_num_cached_tokens=self._max_tokens)

    def reset(self) -> None:
        """Forget all that was said."""
        self._messages = list(self._system)

    def reply(self, text: str) -> None:
        """Write an answer as it becomes certain. One that was stopped stays in the history as far as it went."""
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = chat_ids(self._llm, messages)
        capacity = self._max_tokens - len(ids)
        if capacity <= 0:
            held = self._max_tokens
            say(f"the conversation has {len(ids)} tokens and the context holds {held}; /reset starts anew", RUN)
            return
        self._num_replies += 1
        with as_sentences():
            params = replace(self._sampling, max_tokens=min(self._sampling.max_tokens or MAX_TOKENS, capacity))
            self.engine.add_request(str(self._num_replies), {"prompt_token_ids": ids}, params)
        start = perf_counter()
        parts: list[CompletionOutput] = []
        try:
            self._write(parts)
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        seconds, last = perf_counter() - start, parts[-1]
        num_tokens = sum(len(part.token_ids) for part in parts)
        self._messages = [*messages, {"role": "assistant", "content": "".join(part.text for part in parts)}]
        if self._stats and last.stats is not None:
            facts = [f"{num_tokens} tokens", f"{num_tokens / seconds:.0f} tokens/s"]
            facts.append(f"acceptance length {last.stats.mean_acceptance_length:.2f}")
            facts.append(f"{last.num_cached_tokens} of {len(ids)} prompt tokens from the cache")
            self._status.say(" · ".join(facts))
        if last.finish_reason == "length" and num_tokens >= capacity:
            say(f"the context of {self._max_tokens} tokens is full; /reset starts anew", RUN)

    def _write(self, parts: list[CompletionOutput]) -> None:
        """Decode the reply, and write its parts."""
        with ExitStack() as reading, _stoppable() as is_stopped:
            reading.enter_context(self._status.waiting("reading the conversation"))
            while self.engine.has_unfinished_requests():
                if is_stopped():
                    self.engine.abort(str(self._num_replies))
                for output in self.engine.step():
                    reading.close()
                    parts += output.outputs
                    sys.stdout.write(output.outputs[0].text)
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
                line = input(CURSOR)
            else:  # which `input` would write to
                sys.stderr.write(CURSOR)
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
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, to be acted on between steps; a second one interrupts at once."""
    stops = 0

    def note(*given: object) -> None:
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
