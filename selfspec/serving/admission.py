"""`Dispatcher`: admits calls as far as the limits go, hands them to the engine's thread, and hands its updates to them.

All of it runs in the event loop's thread, so it needs no locks.
"""

from __future__ import annotations

import asyncio
import math

from selfspec.decoding.engine import LLMEngine
from selfspec.llm import LLM
from selfspec.serving.calls import Call
from selfspec.serving.config import ServerConfig
from selfspec.serving.loop import EngineLoop, EngineUpdate, Load
from selfspec.serving.metrics import Metrics
from selfspec.serving.pace import Pace
from selfspec.serving.refusal import Refusal

LONGEST_RETRY = 60  # seconds; clients such as openai take no longer time from a server


class Dispatcher:
    """The calls of a server.

    Args:
        llm: decodes them.
        metrics: counts them.
    """

    def __init__(self, llm: LLM, config: ServerConfig, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics
        self._loop = EngineLoop(llm, metrics, self._post)
        self.max_num_seqs = llm.max_num_seqs if config.max_num_seqs is None else config.max_num_seqs
        """Outputs decoded together."""
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, Call] = {}
        self._sent: dict[str, Call] = {}  # the engine has not said yet that it took them
        self._load = Load()  # the last one known
        metrics.watch(lambda: self.num_running, lambda: self._num_waiting, lambda: self._load.kv_usage)
        self._pace = Pace()
        self._has_stopped = True
        self.is_draining = False
        """Whether new calls are refused while those that run end."""
        self.max_model_len = 0
        """Most tokens of a prompt and its output, known once the engine is there."""
        self._context = llm.target.split.context_limit

    async def start(self) -> None:
        """Make the engine and serve.

        Raises:
            ValueError: the cache does not hold `max_model_len` tokens; and what `LLM.engine` raises.
        """
        self._asyncio = asyncio.get_running_loop()
        most, cached = self._config.lengths(self._context, self.max_num_seqs)
        engine: LLMEngine = await asyncio.to_thread(self._loop.start, self.max_num_seqs, cached, self._config.warm_up)
        if (held := engine.max_num_cached_tokens) < (self._config.max_model_len or 0):
            await self.stop()
            raise ValueError(f"max_num_cached_tokens must hold max_model_len tokens, {most}, and {held} are held")
        self._pace.seed(self._loop.warm)
        self._metrics.cache(engine.cache.page_size, engine.cache.num_pages)
        self.max_model_len, self._has_stopped = min(most, held), False

    async def stop(self) -> None:
        """End the engine's thread; calls that are open end with an error."""
        await asyncio.to_thread(self._loop.stop)

    @property
    def is_healthy(self) -> bool:
        """Whether new calls are served."""
        return not (self._has_stopped or self.is_draining)

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Outputs that have a place."""
        return self._load.num_running

    def refuse_too_many(self, num_prompts: int, n: int) -> None:
        """Refuse what could never be admitted: more outputs than may run and wait.

        Raises:
            Refusal: 400.
        """
        most = self._config.max_waiting_requests + self.max_num_seqs
        if num_prompts * n > most:
            self._metrics.reject("too_large")
            message = f"a request may ask for at most {most} outputs (prompts times n), got {num_prompts * n}"
            raise Refusal(f"{message}; send several requests", param="n" if n > 1 else "prompt")

    def submit(self, call: Call) -> None:
        """Send a call to the engine.

        Raises:
            Refusal: 503 where the engine has stopped or is draining, 429 where too much waits.
        """
        if not self.is_healthy:
            reason = "shuts down" if self.is_draining else "has lost its engine"
            self._metrics.reject("draining" if self.is_draining else "engine_dead")
            raise Refusal(f"the server {reason}; try another one", 503, code="unavailable", retry_after=1)
        self._admit(call)
        self._open[call.name] = self._sent[call.name] = call
        self._loop.submit(call)

    def end(self, call: Call) -> None:
        """Nobody waits for a call any more. Those that have ended are left alone."""
        if self._open.pop(call.name, None) is not None:
            self._sent.pop(call.name, None)
            self._metrics.abort(call)
            self._loop.cancel(call)

    def _admit(self, call: Call) -> None:
        most, rows = self._config.max_waiting_requests, call.num_rows
        waiting = self._num_waiting
        tokens = self._load.num_waiting_tokens + sum(
            sent.num_prompt_tokens * sent.params.n for sent in self._sent.values()
        )
        free = max(0, self.max_num_seqs - self._load.num_running)
        if waiting + rows > most + free:
            self._metrics.reject("queue_full")
            raise self._busy(f"{waiting} requests wait, and the server lets at most {most} wait")
        if waiting > free and tokens + call.num_prompt_tokens * call.params.n > self._config.max_waiting_tokens:
            self._metrics.reject("queue_tokens")
            most = self._config.max_waiting_tokens
            raise self._busy(f"{tokens} prompt tokens wait, and the server lets at most {most} wait")

    @property
    def _num_waiting(self) -> int:
        """Outputs that wait, those included that the engine has not taken yet."""
        return self._load.num_waiting + sum(sent.num_rows for sent in self._sent.values())

    def _busy(self, reason: str) -> Refusal:
        after = max(1, min(LONGEST_RETRY, math.ceil(self._pace.seconds(self._open.values()))))
        return Refusal(f"{reason}; try again in {after} s", 429, retry_after=after)

    # --------------------------------------------------------------------------------------------------------- update

    def _post(self, update: EngineUpdate) -> None:
        """In the engine's thread: hand an update to the event loop's."""
        assert self._asyncio is not None
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._deliver, update)

    def _deliver(self, update: EngineUpdate) -> None:
        waited, self._load = self._load.num_waiting > 0, update.load
        num_ends = sum(own.finish_reason == "stop" for _, _, output, _ in update.outputs for own in output.outputs)
        self._pace.add(update.work, num_ends, waited)
        for call in update.accepted:
            self._sent.pop(call.name, None)
            call.accept()
        for call, now in update.started:
            call.started = call.started or now
            self._metrics.start(call, now)
        for call, prompt, output, now in update.outputs:
            is_open = call.name in self._open  # else its client has gone, and its end was counted then
            for choice, last_at in call.add(prompt, output, now):
                if choice.last_at != last_at:
                    self._metrics.piece(call, last_at, now)
                if is_open and choice.finish_reason is not None:
                    self._metrics.end(call, choice, now)
            if is_open and call.has_ended:
                del self._open[call.name]
                self._metrics.prompts(call)
        for call, refusal in update.failed:  # after its outputs, which came before
            self._fail(call, refusal)
        if update.is_last:
            self._has_stopped = True
            for call in list(self._open.values()):
                self._fail(call, Refusal("the engine has stopped", 500))

    def _fail(self, call: Call, refusal: Refusal) -> None:
        self._sent.pop(call.name, None)
        call.fail(refusal)
        if self._open.pop(call.name, None) is not None:
            self._metrics.fail(refusal)
