"""`Conversation`: what was said in `selfspec chat`, an engine whose prefix cache holds it, and what replies cost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from selfspec.cli.failure import RUN, Failure, say
from selfspec.cli.options import as_sentences
from selfspec.cli.prompts import chat_ids, system_message
from selfspec.cli.session import Run
from selfspec.cli.status import StatusConsole
from selfspec.params import SamplingParams

if TYPE_CHECKING:
    from selfspec.decoding.outputs import CompletionOutput
    from selfspec.llm import LLM

MAX_CONTEXT = 1 << 15  # tokens that are kept at most, however long the model's context is
MAX_TOKENS = 1024  # of a reply, where nobody names another number
TEMPERATURE, MIN_P = 0.7, 0.05  # where neither options nor the model say how to sample


class Conversation:
    """The messages so far, and an engine whose prefix cache has their keys and values.

    Args:
        system: the system message, if any.
        shows_more: after every reply all facts of it are told, not the dim line alone.
    """

    def __init__(
        self, llm: LLM, sampling: SamplingParams, system: str | None, status: StatusConsole, shows_more: bool
    ) -> None:
        self._llm, self._status, self._shows_more = llm, status, shows_more
        self._sampling = _sampled(sampling, llm)
        self._system = system_message(system)
        self.reset()
        chat_ids(llm, [*self._messages, {"role": "user", "content": "?"}])  # refused now, if ever
        self._max_tokens = min(llm.target.split.context_limit, MAX_CONTEXT)
        self._num_replies = 0
        self._facts: list[str] = []  # of the last reply
        with status.waiting("preparing to decode"), as_sentences():
            self.engine = llm.engine(max_num_cached_tokens=self._max_tokens)

    def reset(self) -> None:
        """Forget all that was said."""
        self._messages = list(self._system)

    def tell(self) -> None:
        """Say what is known of the last reply."""
        self._status.say(" · ".join(self._facts) if self._facts else "there is no reply yet")

    def set_temperature(self, text: str) -> None:
        """How the next replies are sampled; without a text, say how they are."""
        if text:
            try:
                self._sampling = replace(self._sampling, temperature=float(text))
            except ValueError:
                say(f"/temperature needs a number of at least 0, got {text!r}", RUN)
                return
        told = self._sampling.temperature
        self._status.say("temperature: the model's own" if told is None else f"temperature: {told:g}")

    def set_system(self, text: str) -> None:
        """Put another system message before what was said; without a text, none."""
        said = self._messages[len(self._system) :]
        system = system_message(text or None)
        try:
            chat_ids(self._llm, [*system, {"role": "user", "content": "?"}])
        except Failure as problem:
            say(str(problem), RUN)
            return
        self._system, self._messages = system, [*system, *said]
        self._status.say(f"system: {text}" if text else "there is no system message")

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
            params = self._sampling.limited(min(self._sampling.max_tokens or MAX_TOKENS, capacity))
            self.engine.add_request(str(self._num_replies), {"prompt_token_ids": ids}, params)
        start = perf_counter()
        parts: list[CompletionOutput] = []
        run = Run()
        try:
            self._write(parts, run)
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        num_tokens = sum(len(part.token_ids) for part in parts)
        self._messages = [*messages, {"role": "assistant", "content": "".join(part.text for part in parts)}]
        self._note(parts[-1], run, num_tokens, perf_counter() - start, len(ids))
        if parts[-1].finish_reason == "length" and num_tokens >= capacity:
            say(f"the context of {self._max_tokens} tokens is full; /reset starts anew", RUN)

    def _note(self, last: CompletionOutput, run: Run, num_tokens: int, seconds: float, num_prompt: int) -> None:
        """Keep the facts of a reply, and say the first of them."""
        if last.stats is None:
            return
        drafted, accepted = last.stats.num_draft_tokens, last.stats.num_accepted_draft_tokens
        decoding = seconds if not run.seconds else run.seconds - run.seconds_by_stage["prefill"]
        line = [f"{num_tokens} tokens", f"{num_tokens / max(decoding, 1e-9):.0f} tokens/s"]
        line.append(f"{accepted} of {drafted} drafted tokens accepted" if drafted else "nothing drafted")
        rounds = ", ".join(f"{name} {count}" for name, count in run.plans.items())
        self._facts = [*line, f"acceptance length {last.stats.mean_acceptance_length:.2f}", f"rounds: {rounds}"]
        self._facts.append(f"{last.num_cached_tokens} of {num_prompt} prompt tokens from the cache")
        self._facts.append(f"{seconds:.2f} s, of these {run.seconds_by_stage['prefill']:.2f} s for the prompt")
        self._status.say(" · ".join(self._facts if self._shows_more else line))

    def _write(self, parts: list[CompletionOutput], run: Run) -> None:
        """Decode the reply, and write its parts."""
        with ExitStack() as reading, _stoppable() as is_stopped:
            reading.enter_context(self._status.waiting("reading the conversation"))
            while self.engine.has_unfinished_requests():
                if is_stopped():
                    self.engine.abort(str(self._num_replies))
                for output in self.engine.step(run.add):
                    reading.close()
                    parts += output.outputs
                    sys.stdout.write(output.outputs[0].text)
                    sys.stdout.flush()


def _sampled(sampling: SamplingParams, llm: LLM) -> SamplingParams:
    """The options; where neither they nor the model say how to sample, as chats usually do: greedily, small models
    repeat themselves."""
    own = None if sampling.generation_config is False else llm.target.defaults.config
    if sampling.temperature is not None or getattr(own, "do_sample", None):
        return sampling
    return replace(sampling, temperature=TEMPERATURE, min_p=MIN_P if sampling.min_p is None else sampling.min_p)


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
