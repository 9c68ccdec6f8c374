"""`selfspec serve`: a model behind OpenAI's API, until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import (
    DEFAULT_HELP,
    Learn,
    MaxReplicas,
    ModelOptions,
    Quiet,
    Replicas,
    ServedModelName,
    as_sentences,
)
from selfspec.cli.session import chosen, open_llm, opened
from selfspec.cli.status import StatusConsole
from selfspec.params import SpeculativeConfig
from selfspec.serving.config import ServerConfig

if TYPE_CHECKING:
    from selfspec.llm import LLM

PARTS = ("fastapi", "uvicorn", "prometheus_client")
RAY_PARTS = ("ray", "httpx")
MAX_NUM_SEQS = 16  # where nobody names another number


def serve(
    *,
    model: Annotated[str | None, Argument(metavar="[MODEL]", help=DEFAULT_HELP, show_default=False)] = None,
    options: ModelOptions,
    speculative: SpeculativeConfig,
    learn: Learn = None,
    host: Annotated[str, Option(help="Address to listen at.", rich_help_panel="Server")] = "127.0.0.1",
    port: Annotated[
        int, Option(help="Port to listen at; 0 takes a free one.", min=0, max=65535, rich_help_panel="Server")
    ] = 8000,
    config: ServerConfig,
    served_model_name: ServedModelName = None,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = None,
    quiet: Quiet = False,
) -> None:
    """Load the model and serve it."""
    size = config.max_num_seqs or MAX_NUM_SEQS
    require("serve", PARTS)
    with StatusConsole(quiet) as status:
        model = chosen(model, status)
    config = named(config, served_model_name or [model], max_num_seqs=size, access_log=config.access_log and not quiet)
    if max_replicas is not None and max_replicas < (replicas or 1024):
        raise Failure(f"--max-replicas must be at least --replicas, got {max_replicas} and {replicas or 'none'}")
    if replicas is not None:
        if learn is not None or config.log_prompts:
            name = "--learn" if learn is not None else "--log-prompts"
            raise Failure(f"{name} is for a single process; leave it or --replicas out")
        check_replicas(options)
        make_llm = partial(open_llm, model, options, speculative, max_num_seqs=size)
        _serve_replicas(make_llm, config, (replicas, max_replicas), host, port, options.device, quiet)
        return
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and transformers"):
            from selfspec.serving.run import DrainingServer, bound

        with as_sentences():  # before minutes are spent on loading
            at = bound(host, port)
        with (
            at,
            opened(model, options, speculative, status, learn=learn, max_num_seqs=size) as llm,
            as_sentences(),
        ):
            DrainingServer(llm, config, at, say=status.say).run()


def named(config: ServerConfig, names: Sequence[str], **more: Any) -> ServerConfig:
    """The configuration of a server that has these names, the first of which its answers bear."""
    if "" in names:
        raise Failure("--served-model-name must be a text that is not empty")
    return replace(config, model=names[0], aliases=names[1:], **more)


def require(extra: str, parts: Sequence[str]) -> None:
    """Refuse what needs packages that are not there."""
    missing = [name for name in parts if find_spec(name) is None]
    if missing:
        raise Failure(f"{', '.join(missing)} must be installed first: pip install 'selfspec[{extra}]'", RUN)


def check_replicas(options: ModelOptions) -> None:
    """Refuse what several processes cannot share."""
    if options.device not in (None, "cpu", "cuda"):
        raise Failure(f"--device must be cpu or cuda with --replicas, which take a device each, got {options.device}")
    require("ray", RAY_PARTS)


def _serve_replicas(
    make_llm: Callable[[], LLM],
    config: ServerConfig,
    number: tuple[int, int | None],
    host: str,
    port: int,
    device: str | None,
    quiet: bool,
) -> None:
    """Serve from several processes until a signal; their requests end first."""
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and Ray"):
            from selfspec.serving.replicas import replicated

        with as_sentences(), ExitStack() as running:
            least, most = number
            with status.waiting(f"starting {least} replicas of {config.model}"):
                url = running.enter_context(replicated(make_llm, config, least, host, port, device, most))
            status.say(f"serving {config.model} by {least} replicas at {url}")
            if _wait_for_signal() == signal.SIGINT:
                raise KeyboardInterrupt


def _wait_for_signal() -> int:
    """The signal that ended the wait; another one has its usual effect."""
    signals: SimpleQueue[int] = SimpleQueue()
    before = {one: signal.signal(one, lambda which, _: signals.put(which)) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        return signals.get()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
