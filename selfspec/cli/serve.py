"""`selfspec serve`: a model behind OpenAI's API, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

from selfspec.cli.failure import RUN, Failure, as_sentences
from selfspec.cli.options import Batch, Serve
from selfspec.cli.talk import Talk

PARTS = ("fastapi", "uvicorn", "prometheus_client")
RAY_PARTS = ("ray",)


def serve(options: Serve) -> None:
    """Load the model and serve it."""
    options.check()
    require("serve", PARTS)
    if options.replicas is not None:
        require("ray", RAY_PARTS)
        _serve_replicas(options, options.replicas)
        return
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec.serving.run import bound

        with as_sentences():  # before minutes are spent on loading
            at = bound(options.host, options.port)
        with at:
            _serve(options, talk, at)


def _serve(options: Serve, talk: Talk, at: socket.socket) -> None:
    from selfspec.cli.job import keep, learner_of, policy_name
    from selfspec.kernels.machine import set_threads
    from selfspec.serving.run import DrainingServer

    set_threads(options.threads)
    llm = _open(options, talk, options.max_num_seqs)
    policy = policy_name(options, llm.target)
    learner = learner_of(options, llm.target, policy)
    llm.speculative = _speculative(options, llm.target, learner)
    if options.log_prompts:
        _log_to(talk)
    try:
        with as_sentences():
            DrainingServer(llm, _config(options), at, say=lambda line: _say(talk, line)).run()
    finally:  # interrupted or not: what was learned is good
        keep(llm.target, policy, learner, options, talk)


def require(extra: str, parts: Sequence[str]) -> None:
    """Refuse what needs packages that are not there."""
    missing = [name for name in parts if find_spec(name) is None]
    if missing:
        raise Failure(f"{extra} needs {', '.join(missing)}; install them with: pip install 'selfspec[{extra}]'", RUN)


def _serve_replicas(options: Serve, number: int) -> None:
    """Serve from several processes until a signal; their requests end first."""
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and Ray"):
            from selfspec.serving.replicas import replicated

        with as_sentences(), ExitStack() as running:
            made = replicated(
                partial(open_llm, options, options.max_num_seqs),
                _config(options),
                number,
                options.host,
                options.port,
                device=options.device,
            )
            with talk.waiting(f"starting {number} replicas of {options.model}"):
                url = running.enter_context(made)
            _say(talk, f"serving {options.served_model_name or options.model} by {number} replicas at {url}")
            if _wait_for_signal() == signal.SIGINT:
                raise KeyboardInterrupt


def _wait_for_signal() -> int:
    """The signal that ended the wait; another one has its usual effect."""
    told: SimpleQueue[int] = SimpleQueue()
    before = {one: signal.signal(one, lambda which, _: told.put(which)) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        return told.get()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def open_llm(options: Serve | Batch, max_num_seqs: int) -> Any:
    """The model that the options name, for one replica, in whose process this runs."""
    from selfspec.kernels.machine import set_threads

    set_threads(options.threads)
    with Talk(quiet=True) as talk:
        llm = _open(options, talk, max_num_seqs)
        llm.speculative = _speculative(options, llm.target, None)
    return llm


def _open(options: Serve | Batch, talk: Talk, max_num_seqs: int) -> Any:
    from selfspec.cli.job import opening
    from selfspec.llm import LLM

    parts = opening(options)
    with as_sentences(), talk.waiting(f"loading {options.model}"):
        return LLM(
            options.model,
            backend=parts.pop("engine"),
            exact=options.exact,
            max_num_seqs=max_num_seqs,
            **parts,
        )


def _speculative(options: Serve | Batch, target: Any, learner: Any) -> Any:
    from selfspec.cli.job import corpus_of
    from selfspec.params import SpeculativeConfig

    with as_sentences():
        return SpeculativeConfig(
            policy=options.policy,
            exit_layer=options.exit_layer,
            num_speculative_tokens=options.num_speculative_tokens,
            drafters=options.sources,
            corpus=corpus_of(options, target),
            reuse_responses=options.reuse_responses,
            learn=learner or False,
        )


def _config(options: Serve) -> Any:
    from selfspec.serving.config import ServerConfig

    names = (
        "api_key", "max_num_seqs", "max_num_cached_tokens", "max_waiting_requests", "max_waiting_tokens",
        "request_timeout", "max_body_bytes", "log_prompts",
    )  # fmt: skip
    model = options.served_model_name or options.model
    return ServerConfig(model=model, **{name: getattr(options, name) for name in names})


def _say(talk: Talk, line: str) -> None:
    talk.console.print(line, style="dim", soft_wrap=True, markup=False)


def _log_to(talk: Talk) -> None:
    """Prompts are lines on stderr."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO:
                _say(talk, record.getMessage())

    logging.getLogger("selfspec.serving").addHandler(Lines())
