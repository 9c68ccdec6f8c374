"""`ServerConfig`: the limits and the names of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.errors import flag, got, is_number, whole
from selfspec.structured.formats import FORMATS

ENV_API_KEY = "SELFSPEC_API_KEY"
SEQUENCE_TOKENS = 2048  # for each output decoded together, where nobody names a number
LONGEST = 1 << 15  # the longest context that the cache is made for, where nobody names a number
PAGE = 256  # tokens that every size of a page divides
LEAST_CACHED = 64  # tokens: a short prompt and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server admits, and how it is called.

    Args:
        model: the name that clients ask for.
        aliases: other names that it has.
        api_key: what clients must send as a bearer token, one of them where there are several; default: nothing, and
            anybody is served.
        allowed_origins: web sites whose pages may call the server (CORS), such as https://example.org; "*": all.
        max_num_seqs: outputs decoded together; default: the LLM's, and 16 for `selfspec serve`.
        max_model_len: most tokens of a prompt and its output, which the cache must hold. Default: the model's context,
            as far as the cache holds it.
        max_num_cached_tokens: tokens whose keys and values fit at once, at least 64. Default: 2,048, or the
            model's context, for each output decoded together, and at least the model's context up to 32,768.
        chat_template: a Jinja template, or a file that holds one, in place of the model's own.
        tool_call_parser: the format in which the model calls tools, "hermes", "llama3_json", "mistral" or
            "mistral_args"; default: that of the chat template.
        max_waiting_requests: outputs that may wait for a place; more are refused with 429.
        max_waiting_tokens: prompt tokens that may wait; a single request may exceed it while no other waits.
        request_timeout: seconds after which a request is ended, waiting included.
        max_body_bytes: largest request body.
        max_stored_bytes: memory of the responses of /v1/responses that clients may go on from; 0: none are stored.
        warm_up: before listening, decode a full batch and touch the cache's memory: no first request waits for it.
        access_log: write a line to the log for every answer.
        log_prompts: write prompts to the log.

    Raises:
        ValueError: a value out of range.
    """

    model: str = "selfspec"
    aliases: Sequence[str] = ()
    api_key: str | Sequence[str] | None = None
    allowed_origins: Sequence[str] | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_cached_tokens: int | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 1 << 18
    request_timeout: float = 600.0
    max_body_bytes: int = 8 << 20
    max_stored_bytes: int = 64 << 20
    warm_up: bool = True
    access_log: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        several: dict[str, Any] = {name: getattr(self, name) or () for name in ("aliases", "allowed_origins")}
        for name, texts in {"model": (self.model,), "api_key": self.api_keys, **several}.items():
            for text in [texts] if isinstance(texts, str) else texts:
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{name} must be a text that is not empty, {got(text)}")
        for name, least in (("max_num_seqs", 1), ("max_model_len", 2), ("max_num_cached_tokens", LEAST_CACHED)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        for name in ("max_waiting_requests", "max_waiting_tokens", "max_stored_bytes"):
            whole(name, getattr(self, name), 0)
        whole("max_body_bytes", self.max_body_bytes, 1)
        if not (is_number(self.request_timeout) and self.request_timeout > 0):
            raise ValueError(f"request_timeout must be a number of seconds above 0, {got(self.request_timeout)}")
        if self.tool_call_parser not in (None, *FORMATS):
            raise ValueError(f"tool_call_parser must be one of {', '.join(FORMATS)}, {got(self.tool_call_parser)}")
        for name in ("warm_up", "access_log", "log_prompts"):
            flag(name, getattr(self, name))
        if self.max_model_len and self.max_num_cached_tokens and self.max_model_len > self.max_num_cached_tokens:
            raise ValueError(
                f"max_model_len must be at most max_num_cached_tokens, {self.max_num_cached_tokens}, "
                f"got {self.max_model_len}; lower one or raise the other"
            )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Those that open the server; none: it is open."""
        given = self.api_key
        return () if given is None else (given,) if isinstance(given, str) else tuple(given)

    def lengths(self, context: int, max_num_seqs: int) -> tuple[int, int]:
        """Most tokens of a prompt and its output, and the cached tokens that hold them.

        Args:
            context: tokens that the model's context holds.
            max_num_seqs: outputs decoded together.

        Raises:
            ValueError: the context is shorter than `max_model_len`.
        """
        if self.max_model_len is not None and self.max_model_len > context:
            raise ValueError(f"max_model_len must be at most {context}, the model's context, got {self.max_model_len}")
        most, cached = self.max_model_len or context, self.max_num_cached_tokens
        if cached is not None:
            return min(most, cached), cached
        cached = max_num_seqs * min(context, SEQUENCE_TOKENS)
        if self.max_model_len is None:
            most = min(most, max(cached, LONGEST))
        unit = PAGE * max_num_seqs  # whole pages, whatever their size
        return most, -(-max(cached, most) // unit) * unit
