"""Many requests from a file, answered into another one: what `selfspec batch` does.

Requests go through the server's own application, without a socket, so that fields, refusals and answers are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

from selfspec.llm import LLM
from selfspec.serving.batch_files import Answer, Line
from selfspec.serving.config import ServerConfig

RESTARTS = 2  # of a process that was killed; what it was doing is done again
UNLIMITED: dict[str, Any] = {
    "max_body_bytes": 1 << 40,
    "max_waiting_requests": 1 << 30,
    "max_waiting_tokens": 1 << 60,
    "request_timeout": 1e9,
    "max_stored_bytes": 0,
    "warm_up": False,
}


class EngineStopped(RuntimeError):
    """The engine failed; what was not answered can be gone on with."""


class Worker:
    """An `LLM` behind the server's application.

    Args:
        make_llm: is called at once.
    """

    def __init__(self, make_llm: Callable[[], LLM], config: ServerConfig) -> None:
        from selfspec.serving.app import create_app

        self._app = create_app(make_llm(), config)
        self._client: Any = None
        self._running = AsyncExitStack()
        self._starts = asyncio.Lock()

    async def answer(self, line: Line) -> Answer:
        """What the server says to a request.

        Raises:
            EngineStopped: nothing more will be answered.
        """
        async with self._starts:
            if self._client is None:
                await self._start()
        content = json.dumps(line.body).encode()
        answer = await self._client.post(line.url, content=content, headers={"Content-Type": "application/json"})
        if answer.status_code >= 500 and not self._app.state.server.dispatcher.is_healthy:
            raise EngineStopped("the engine has stopped; see above, and run the same command to go on")
        body = answer.json()
        response = {"status_code": answer.status_code, "request_id": body.get("id", ""), "body": body}
        return {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": response, "error": None}

    def ready(self) -> None:
        """Returns once the model has been loaded, for those who wait for it on Ray."""

    async def _start(self) -> None:
        import httpx

        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))
        without_socket = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=without_socket, base_url="http://batch", timeout=None)
        self._client = await self._running.enter_async_context(client)

    async def stop(self) -> None:
        """End the engine."""
        await self._running.aclose()


def answer_here(worker: Worker, lines: Iterable[Line], write: Callable[[Answer], None], num_together: int) -> None:
    """Answer every line in this process, so many together.

    Raises:
        EngineStopped: see `Worker.answer`.
    """
    waiting = iter(lines)

    async def take() -> None:
        for line in waiting:
            write(await worker.answer(line))

    async def everything() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_together):
                    group.create_task(take())
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        finally:
            await worker.stop()

    asyncio.run(everything())


def answer_on_ray(
    make_worker: tuple[Callable[[], LLM], ServerConfig],
    lines: Iterable[Line],
    write: Callable[[Answer], None],
    num_together: int,
    num_replicas: int,
    device: str | None,
) -> None:
    """Answer every line in processes on Ray, so many together in each. One that is killed is started again.

    Raises:
        what `replicas.cluster` raises.
    """
    import ray
    from ray.util import ActorPool

    from selfspec.serving.replicas import cluster

    with cluster(num_replicas, device) as share:
        again = {"max_restarts": RESTARTS, "max_task_retries": RESTARTS}
        made = ray.remote(Worker).options(max_concurrency=num_together, **share, **again)
        workers = [made.remote(*make_worker) for _ in range(num_replicas)]
        ray.get([worker.ready.options(max_task_retries=0).remote() for worker in workers])
        pool = ActorPool(workers * num_together)
        for line in lines:
            if not pool.has_free():
                write(pool.get_next_unordered())
            pool.submit(lambda actor, one: actor.answer.remote(one), line)
        while pool.has_next():
            write(pool.get_next_unordered())
