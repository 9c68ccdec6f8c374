"""`EngineLoop`: the one thread that owns the engine. Calls come in by a queue; news go out if somebody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import NamedTuple

from selfspec.decoding.results import Round
from selfspec.llm import LLM, LLMEngine
from selfspec.outputs import RequestOutput
from selfspec.serving.calls import Call
from selfspec.serving.config import ServerConfig
from selfspec.serving.metrics import Metrics
from selfspec.serving.protocol import CompletionRequest, Refusal

_log = logging.getLogger("selfspec.serving")
MOST_KEPT = 256  # outputs of rounds that nobody waits for yet: to hand over more at once would hold up the event loop

Order = Callable[[LLMEngine], None]  # done between two programs


class Load(NamedTuple):
    """What the engine has to do."""

    num_running: int = 0  # outputs, as those that wait
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of the cache in use


@dataclass(slots=True)
class News:
    """What programs, and the orders before them, came to. Times are seconds of the monotonic clock."""

    accepted: list[Call] = field(default_factory=list)
    failed: list[tuple[Call, Refusal]] = field(default_factory=list)
    started: list[tuple[Call, float]] = field(default_factory=list)  # a call per prompt that got its first place
    outputs: list[tuple[Call, int, RequestOutput, float]] = field(default_factory=list)  # with the prompt's index
    load: Load = field(default_factory=Load)
    is_awaited: bool = False  # somebody waits for it
    is_last: bool = False  # the thread has ended


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        llm: whose engine it makes.
        deliver: is given news that somebody waits for, in the engine's thread, at most once per program.
    """

    def __init__(self, llm: LLM, config: ServerConfig, metrics: Metrics, deliver: Callable[[News], None]) -> None:
        self._llm, self._config, self._metrics, self._deliver = llm, config, metrics, deliver
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # None: stop
        self._ready: Future[LLMEngine] = Future()
        self._thread = Thread(target=self._run, name="selfspec-engine", daemon=True)
        self._live: dict[str, tuple[Call, int]] = {}  # the engine's requests by id, and which prompt of the call it is
        self._unstarted: dict[str, int] = {}  # those that have no place yet, and their tokens
        self._news, self._load = News(), Load()

    def start(self) -> LLMEngine:
        """Make the engine, which may take seconds, and serve; the engine, of which only constants may be read.

        Raises:
            what `LLM.engine` raises.
        """
        self._thread.start()
        return self._ready.result()

    def submit(self, call: Call) -> None:
        """Decode a call."""
        self._orders.put(lambda engine: self._add(engine, call))

    def cancel(self, call: Call) -> None:
        """Nobody waits for a call any more: its pages are free with the next program."""
        self._orders.put(lambda engine: self._drop(engine, call))

    def stop(self) -> None:
        """End the thread, after the program that it runs; waits for that."""
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            config = self._config
            engine = self._llm.engine(
                max_num_seqs=config.max_num_seqs, max_num_cached_tokens=config.max_num_cached_tokens
            )
        except BaseException as problem:
            self._ready.set_exception(problem)
            return
        self._ready.set_result(engine)
        try:
            while self._turn(engine):
                pass
            engine.remember()
        except Exception:
            _log.exception("the engine failed: every request ends, and /health says so")
        finally:
            self._news.is_last = True  # it may hold outputs that nobody waited for
            self._deliver(self._news)

    def _turn(self, engine: LLMEngine) -> bool:
        """Do what is ordered, and run a program if there is something to decode; False: it is told to stop."""
        for order in self._next_orders(wait=not engine.has_unfinished_requests()):
            if order is None:
                return False
            order(engine)
        self._end_late(engine)
        if engine.has_unfinished_requests():
            self._step(engine)
        self._tell(engine)
        return True

    def _next_orders(self, wait: bool) -> Iterator[Order | None]:
        if wait:
            yield self._orders.get()
        while not self._orders.empty():  # nobody else takes from it
            yield self._orders.get()

    def _add(self, engine: LLMEngine, call: Call) -> None:
        for index, prompt in enumerate(call.prompts):
            name = f"{call.name}/{index}"
            try:
                engine.add_request(name, prompt, call.params)
            except Exception as problem:
                self._fail(engine, call, refusal_of(problem))
                return
            self._live[name] = call, index
            self._unstarted[name] = len(prompt) * call.params.n
        self._news.accepted.append(call)
        self._news.is_awaited = True

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
        self._news.failed.append((call, error))
        self._news.is_awaited = True

    def _step(self, engine: LLMEngine) -> None:
        """A program. An error that ends a request is that request's own; any other is the engine's."""
        before, rounds = engine.num_running + engine.num_waiting, list[Round]()
        try:
            outputs = engine.step(rounds.append)
        except Exception:
            if engine.num_running + engine.num_waiting >= before:
                raise
            _log.warning("a request failed; the others go on", exc_info=True)
            return  # the next step says which
        self._metrics.program(rounds)
        now = monotonic()
        if self._unstarted:
            self._start(engine.running | {output.request_id for output in outputs}, now)
        for output in outputs:
            self._take(engine, output, now)

    def _start(self, running: set[str], now: float) -> None:
        for name in [name for name in self._unstarted if name in running]:
            del self._unstarted[name]
            self._news.started.append((self._live[name][0], now))

    def _take(self, engine: LLMEngine, output: RequestOutput, now: float) -> None:
        if output.request_id not in self._live:
            return  # it was ended here before
        call, index = self._live[output.request_id]
        if any(own.finish_reason == "abort" for own in output.outputs):  # nobody asked for that
            self._fail(engine, call, Refusal("decoding this request failed", 500))
            return
        if output.finished:
            del self._live[output.request_id]
        self._news.outputs.append((call, index, output, now))
        self._news.is_awaited |= call.streams or output.finished

    def _tell(self, engine: LLMEngine) -> None:
        """Waking the event loop's thread costs more than what it does then."""
        news, waiting_tokens = self._news, sum(self._unstarted.values())
        news.load = Load(engine.num_running, engine.num_waiting, waiting_tokens, engine.kv_cache_usage)
        if news.is_awaited or news.load != self._load or len(news.outputs) >= MOST_KEPT:
            self._news, self._load = News(), news.load
            self._deliver(news)


def refusal_of(problem: Exception) -> Refusal:
    """What the library refuses is the client's mistake; anything else is ours."""
    if not isinstance(problem, ValueError):
        _log.error("a request could not be taken", exc_info=problem)
        return Refusal(f"the request could not be taken ({type(problem).__name__})", 500)
    message = str(problem)
    name = message.partition(" ")[0]
    return Refusal(message, param=name if name in CompletionRequest.model_fields else None)
