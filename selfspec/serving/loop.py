"""`EngineLoop`: the one thread that owns the engine. Calls come in by a queue; updates go out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import NamedTuple

from selfspec.core import RoundOutput
from selfspec.decoding.engine import LLMEngine
from selfspec.decoding.outputs import RequestOutput
from selfspec.errors import GrammarError
from selfspec.llm import LLM
from selfspec.serving.calls import Call
from selfspec.serving.metrics import Metrics
from selfspec.serving.pace import Work
from selfspec.serving.protocol import CompletionRequest
from selfspec.serving.refusal import Refusal
from selfspec.serving.warm_up import warm_up, work_of

_log = logging.getLogger("selfspec.serving")
MAX_UNSENT = 256  # outputs that no client waits for yet: handing over more at once would block the event loop

Command = Callable[[LLMEngine], None]  # run between two steps


class Load(NamedTuple):
    """What the engine has to do."""

    num_running: int = 0  # outputs, as those that wait
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of the cache in use


@dataclass(slots=True)
class EngineUpdate:
    """What came of steps, and of the commands before them. Times are seconds of the monotonic clock."""

    accepted: list[Call] = field(default_factory=list)
    failed: list[tuple[Call, Refusal]] = field(default_factory=list)
    started: list[tuple[Call, float]] = field(default_factory=list)  # a call per prompt that got its first place
    outputs: list[tuple[Call, int, RequestOutput, float]] = field(default_factory=list)  # with the prompt's index
    work: Work = field(default_factory=Work)
    load: Load = field(default_factory=Load)
    is_awaited: bool = False  # a client waits for it
    is_last: bool = False  # the thread has ended


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        llm: whose engine it makes.
        deliver: is given updates that somebody waits for, in the engine's thread, at most once per program.
    """

    def __init__(self, llm: LLM, metrics: Metrics, deliver: Callable[[EngineUpdate], None]) -> None:
        self._llm, self._metrics, self._deliver = llm, metrics, deliver
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: stop
        self._ready: Future[LLMEngine] = Future()
        self._thread = Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._live: dict[str, tuple[Call, int]] = {}  # the engine's requests by id, and which prompt of the call it is
        self._unstarted: dict[str, int] = {}  # those that have no place yet, and their tokens
        self._update, self._load = EngineUpdate(), Load()
        self.warm = Work()
        """Of a full batch while warming up; none: that was not done."""

    def start(self, max_num_seqs: int, max_num_cached_tokens: int, warms_up: bool = False) -> LLMEngine:
        """Make an engine of that size, which may take seconds, and serve; only its constants may be read.

        Raises:
            what `LLM.engine` raises.
        """
        self._sizes = {"max_num_seqs": max_num_seqs, "max_num_cached_tokens": max_num_cached_tokens}
        self._warms_up = warms_up
        self._thread.start()
        return self._ready.result()

    def submit(self, call: Call) -> None:
        """Decode a call."""
        self._commands.put(lambda engine: self._add(engine, call))

    def cancel(self, call: Call) -> None:
        """Nobody waits for a call any more: its pages are free with the next program."""
        self._commands.put(lambda engine: self._drop(engine, call))

    def stop(self) -> None:
        """End the thread, after the program that it runs; waits for that."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            engine = self._llm.engine(**self._sizes)
            if self._warms_up:
                self.warm = warm_up(engine)
        except BaseException as problem:
            self._ready.set_exception(problem)
            return
        self._ready.set_result(engine)
        try:
            while self._turn(engine):
                pass
            self._llm.keep_statistics(engine)
        except Exception:
            _log.exception("the engine failed: every request ends, and /health says so")
        finally:
            self._update.is_last = True  # it may hold outputs that nobody waited for
            self._deliver(self._update)

    def _turn(self, engine: LLMEngine) -> bool:
        """Run the commands, and a step if there is something to decode; False: a command says to stop."""
        for command in self._next_commands(wait=not engine.has_unfinished_requests()):
            if command is None:
                return False
            command(engine)
        self._end_late(engine)
        if engine.has_unfinished_requests():
            self._step(engine)
        self._send_update(engine)
        return True

    def _next_commands(self, wait: bool) -> Iterator[Command | None]:
        if wait:
            yield self._commands.get()
        while not self._commands.empty():  # nobody else takes from it
            yield self._commands.get()

    def _add(self, engine: LLMEngine, call: Call) -> None:
        for index, prompt in enumerate(call.prompts):
            name = f"{call.name}/{index}"
            try:
                engine.add_request(name, prompt, call.params_of(index), call.reserve)
            except Exception as problem:
                self._fail(engine, call, refusal_of(problem))
                return
            self._live[name] = call, index
            self._unstarted[name] = len(prompt) * call.params.n
        self._update.accepted.append(call)
        self._update.is_awaited = True

    def _drop(self, engine: LLMEngine, call: Call) -> None:
        for index in range(len(call.prompts)):
            name = f"{call.name}/{index}"
            self._unstarted.pop(name, None)
            if self._live.pop(name, None) is not None:
                engine.abort(name)

    def _end_late(self, engine: LLMEngine) -> None:
        now = monotonic()
        for call in {call.name: call for call, _ in self._live.values() if call.deadline <= now}.values():
            self._fail(engine, call, Refusal("the request took longer than the server allows", 504, code="timeout"))

    def _fail(self, engine: LLMEngine, call: Call, error: Refusal) -> None:
        self._drop(engine, call)
        self._update.failed.append((call, error))
        self._update.is_awaited = True

    def _step(self, engine: LLMEngine) -> None:
        """A program. An error that ends a request is that request's own; any other is the engine's."""
        preempted = engine.num_preemptions
        before, rounds, start = engine.num_running + engine.num_waiting, list[RoundOutput](), monotonic()
        try:
            outputs = engine.step(rounds.append)
        except Exception as problem:
            if engine.num_running + engine.num_waiting >= before:
                raise
            is_told = isinstance(problem, GrammarError)  # to its client
            _log.warning("a request failed; the others go on", exc_info=None if is_told else problem)
            return  # the next step says which
        self._metrics.program(rounds, engine.num_preemptions - preempted)
        now = monotonic()
        self._update.work.add(work_of(rounds, now - start))
        if self._unstarted:
            self._start({one.request_id for one in engine.running} | {output.request_id for output in outputs}, now)
        for output in outputs:
            self._take(engine, output, now)

    def _start(self, running: set[str], now: float) -> None:
        for name in [name for name in self._unstarted if name in running]:
            self._update.work.num_read += self._unstarted.pop(name)
            self._update.started.append((self._live[name][0], now))

    def _take(self, engine: LLMEngine, output: RequestOutput, now: float) -> None:
        if output.request_id not in self._live:
            return  # it was ended here before
        call, index = self._live[output.request_id]
        for own in output.outputs:
            if own.finish_reason == "abort":  # no client asked for that
                self._fail(engine, call, fault_of(own.problem, call))
                return
        if output.finished:
            del self._live[output.request_id]
        self._update.outputs.append((call, index, output, now))
        self._update.is_awaited |= call.streams or output.finished

    def _send_update(self, engine: LLMEngine) -> None:
        """Waking the event loop's thread costs more than what it does then."""
        update, waiting_tokens = self._update, sum(self._unstarted.values())
        update.load = Load(engine.num_running, engine.num_waiting, waiting_tokens, engine.kv_cache_usage)
        if update.is_awaited or update.load != self._load or len(update.outputs) >= MAX_UNSENT:
            self._update, self._load = EngineUpdate(), update.load
            self._deliver(update)


def fault_of(problem: BaseException | None, call: Call) -> Refusal:
    """What ended a call while it was decoded: its own grammar, or a fault of ours."""
    if isinstance(problem, GrammarError):
        return Refusal(f"{call.grammar_field}: {problem}", param=call.grammar_field)
    return Refusal("decoding this request failed", 500)


def refusal_of(problem: Exception) -> Refusal:
    """What the library refuses is the client's mistake; anything else is ours."""
    if not isinstance(problem, ValueError):
        _log.error("a request could not be taken", exc_info=problem)
        return Refusal(f"the request could not be taken ({type(problem).__name__})", 500)
    message = str(problem)
    name = message.partition(" ")[0]
    return Refusal(message, param=name if name in CompletionRequest.model_fields else None)
