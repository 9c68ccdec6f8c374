"""`replicated`: the application as a deployment of Ray Serve, in several processes with an `LLM` each; extra `ray`.

A client that sends the header x-session-id stays with one replica, whose cache then has what was said before. Which one
follows from the header's value and the replicas that are there (Ray Serve's consistent hashing); when that replica has
gone or is full, the next one answers. Without the header, requests are spread. The text is the same from all of them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from fastapi import FastAPI

from selfspec.kernels.machine import usable_cores
from selfspec.llm import LLM
from selfspec.serving.app import create_app
from selfspec.serving.config import ServerConfig
from selfspec.serving.front import fronted
from selfspec.serving.run import bound

NAME = "selfspec"  # of the application in Ray Serve
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
SILENT = 10.0  # seconds after which nothing is told of a replica
HEALTH_PERIOD = 2.0  # seconds between two questions; a replica that fails three of them is replaced
OWN_ERROR = r"^selfspec\.[\w.]+: "  # the name of an exception whose message is a sentence
STARTS = 2  # tries to start a replica before that is an error


class ReplicaError(RuntimeError):
    """A process on Ray could not start, or failed; the message has its last words."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = lines[-1] if lines else "Ray does not say why"
        super().__init__(f"a replica failed: {re.sub(OWN_ERROR, '', last)}")


class Replica:
    """A process of the deployment.

    Args:
        make_llm: is called in that process.
        board: the actor of a `Board`.
    """

    def __init__(self, make_llm: Callable[[], LLM], config: ServerConfig, board: Any) -> None:
        from ray import serve

        self._board, self._name = board, serve.get_replica_context().replica_id.unique_id
        self._made: FastAPI = create_app(make_llm(), config, self._name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve asks for the application here, and runs its lifespan."""
        return self._made

    def check_health(self) -> None:
        """Ray Serve asks every few seconds.

        Raises:
            RuntimeError: the engine has stopped; the replica has to be replaced.
        """
        server = self._made.state.server
        if not server.dispatcher.is_healthy:
            raise RuntimeError("the engine has stopped")
        self._board.tell.remote(self._name, server.metrics.text())


class Board:
    """An actor on Ray: what replicas told lately of themselves."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, bytes]] = {}

    def tell(self, name: str, metrics: bytes) -> None:
        """A replica's /metrics, as it is now."""
        self._told[name] = monotonic(), metrics

    def read(self) -> dict[str, bytes]:
        """By replica; those that are silent have gone."""
        silent = monotonic() - SILENT
        self._told = {name: one for name, one in self._told.items() if one[0] >= silent}
        return {name: text for name, (_, text) in self._told.items()}


@contextmanager
def replicated(
    make_llm: Callable[[], LLM],
    config: ServerConfig,
    num_replicas: int,
    host: str,
    port: int,
    device: str | None = None,
    max_replicas: int | None = None,
) -> Iterator[str]:
    """Serve while the block runs; yields the address once every replica serves. Requests that run at its end end first,
    or meet the deadline.

    Args:
        make_llm: is sent to the replicas, which must be able to unpickle it.
        port: 0 takes a free one.
        device: see `cluster`.
        max_replicas: Ray Serve starts so many while requests wait, and ends them again; default: `num_replicas`.

    Raises:
        ValueError: host and port cannot be listened at, or what `cluster` refuses.
        ReplicaError: a replica could not start.
    """
    with bound("127.0.0.1", 0) as free:
        inner = free.getsockname()[1]
    with bound(host, port) as at, cluster(num_replicas, device, max_replicas) as share:
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells what it does, line by line
        board = ray.remote(Board).options(num_cpus=0).remote()
        deployment = serve.deployment(
            serve.ingress()(Replica), ray_actor_options=share, **options_of(config, num_replicas, max_replicas)
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": inner})
            behind = replace(config, access_log=False, allowed_origins=(), max_stored_bytes=0)  # the front does so
            _deploy(deployment.bind(make_llm, behind, board))
            told = partial(_read, board)
            with fronted(f"http://127.0.0.1:{inner}", config, [at], told):
                yield f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}"
        finally:
            _delete(config.request_timeout)


def options_of(config: ServerConfig, num_replicas: int, max_replicas: int | None = None) -> dict[str, Any]:
    """Ray Serve's options of the deployment.

    Raises:
        ValueError: there are fewer of `max_replicas` than of `num_replicas`.
    """
    if max_replicas is not None and max_replicas < num_replicas:
        raise ValueError(f"max_replicas must be at least replicas, {num_replicas}, got {max_replicas}")
    places = config.max_num_seqs or 1
    most = places + config.max_waiting_requests
    number: dict[str, Any] = {"num_replicas": num_replicas}
    if max_replicas is not None:
        scale = {"min_replicas": num_replicas, "initial_replicas": num_replicas, "max_replicas": max_replicas}
        number = {"autoscaling_config": scale | {"target_ongoing_requests": places}}
    return number | {
        "name": "Replica",
        "max_ongoing_requests": 2 * most,  # the replica's own limits are met first: they say when to come back
        "max_queued_requests": most,
        "request_router_config": {"request_router_class": ROUTER},
        "health_check_period_s": HEALTH_PERIOD,
        "graceful_shutdown_timeout_s": config.request_timeout,
        "max_constructor_retry_count": STARTS,
    }


def _read(board: Any) -> dict[str, bytes]:
    import ray

    told: dict[str, bytes] = ray.get(board.read.remote())
    return told


def _deploy(application: Any) -> None:
    from ray import serve

    try:
        serve.run(application, name=NAME)
    except RuntimeError as problem:
        deployments = serve.status().applications[NAME].deployments.values()
        raise ReplicaError("\n".join([str(problem), *(one.message for one in deployments)])) from problem


def _delete(seconds: float) -> None:
    """Take the application down, and wait for its last requests."""
    from ray import serve

    serve.delete(NAME, _blocking=False)
    end = monotonic() + seconds
    while NAME in serve.status().applications and monotonic() < end:
        sleep(0.2)


@contextmanager
def cluster(num_workers: int, device: str | None = None, max_workers: int | None = None) -> Iterator[dict[str, float]]:
    """Connected to Ray: to the cluster that RAY_ADDRESS names, or to one on this machine that ends with the block.

    Args:
        device: "cpu" or "cuda"; None: a GPU for each worker if the cluster has GPUs.
        max_workers: that a cluster of its own must have CPUs for.

    Yields:
        what one worker takes of the cluster: a CPU, and a GPU where the device is one.

    Raises:
        ImportError: Ray is not installed.
        ReplicaError: a process on Ray failed.
        ValueError: there are fewer CPUs or GPUs than workers.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody who did not ask for it
    is_own = os.environ.get("RAY_ADDRESS", "local") in ("", "local")
    own: dict[str, Any] = {
        "num_cpus": max(usable_cores(), (max_workers or num_workers) + 1),
        "include_dashboard": False,
    }
    ray.init(address="local" if is_own else None, log_to_driver=False, logging_level="error", **(own if is_own else {}))
    try:
        there = ray.cluster_resources()
        needs_gpu = device != "cpu" and (device is not None or there.get("GPU", 0) > 0)
        for name in ["CPU"] + ["GPU"] * needs_gpu:
            if num_workers > (most := int(there.get(name, 0))):
                sentence = f"replicas must be at most {most}, the {name}s of the Ray cluster, got {num_workers}"
                raise ValueError(sentence + "; ask for fewer" + ", or for device cpu" * (name == "GPU"))
        yield {"num_cpus": 1, "num_gpus": int(needs_gpu)}
    except ray.exceptions.RayError as problem:
        raise ReplicaError(str(problem)) from problem
    finally:
        ray.shutdown()
