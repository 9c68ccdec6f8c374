"""`selfspec serve`: a model behind OpenAI's API, until a signal ends it."""

from __future__ import annotations

import logging
import socket
from importlib.util import find_spec
from typing import Any

from selfspec.cli.failure import RUN, Failure, as_sentences
from selfspec.cli.options import Serve
from selfspec.cli.talk import Talk

PARTS = ("fastapi", "uvicorn", "prometheus_client")


def serve(options: Serve) -> None:
    """Load the model and serve it."""
    options.check()
    missing = [name for name in PARTS if find_spec(name) is None]
    if missing:
        raise Failure(f"serve needs {', '.join(missing)}; install them with: pip install 'selfspec[serve]'", RUN)
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec.serving.run import bound

        with as_sentences():  # before minutes are spent on loading
            at = bound(options.host, options.port)
        with at:
            _serve(options, talk, at)


def _serve(options: Serve, talk: Talk, at: socket.socket) -> None:
    from selfspec.cli.job import keep, learner_of, policy_name
    from selfspec.kernels.threads import set_threads
    from selfspec.serving.run import DrainingServer

    set_threads(options.threads)
    llm = _open(options, talk)
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


def _open(options: Serve, talk: Talk) -> Any:
    from selfspec.cli.job import opening
    from selfspec.llm import LLM

    parts = opening(options)
    with as_sentences(), talk.waiting(f"loading {options.model}"):
        return LLM(
            options.model,
            backend=parts.pop("engine"),
            exact=options.exact,
            max_num_seqs=options.max_num_seqs,
            **parts,
        )


def _speculative(options: Serve, target: Any, learner: Any) -> Any:
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
