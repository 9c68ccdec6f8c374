"""Answers in OpenAI's shapes: whole ones, and the chunks of streams."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from time import time
from typing import Any

from starlette.responses import Response

from selfspec.decoding.outputs import Logprob
from selfspec.serving.calls import Call, Choice
from selfspec.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, Refusal

LEAST = -9999.0  # stands for log-probabilities that JSON has no number for
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
Logprobs = Sequence[dict[int, Logprob] | None]


class Writer:
    """Writes what came of a call.

    Args:
        request: what the client sent.
        model: the name that answers bear.
    """

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, call: Call, model: str) -> None:
        self.request, self.call, self.model, self.created = request, call, model, int(time())

    def choice(self, choice: Choice) -> dict[str, Any]:
        """An output, or a piece of it in a stream."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        body = self._head(self.kind) | {"choices": [self._choice(choice) for choice in self.call.choices]}
        return body | {"usage": self._usage()} | self._acceptance(self.call.choices)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events: a chunk per output and program."""
        options = self.request.stream_options
        usage: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
        head = self._head(self.chunk_kind)
        try:
            async for pieces in self.call.changes():
                body = []
                for piece in pieces:
                    chunk = head | {"choices": [self._choice(piece)]} | usage
                    body.append(_event(chunk if piece.finish_reason is None else chunk | self._acceptance([piece])))
                yield b"".join(body)
            if usage:
                yield _event(head | {"choices": [], "usage": self._usage()})
        except Refusal as refusal:
            yield _event(refusal.body)
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call.name, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        body = self.choice(choice)
        body |= {"index": choice.index, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return body | {"token_ids": choice.token_ids} if self.request.return_token_ids else body

    def _usage(self) -> dict[str, Any]:
        prompt, new = self.call.num_prompt_tokens, self.call.num_tokens
        cached = {"cached_tokens": self.call.num_cached_tokens}
        total = {"total_tokens": prompt + new, "prompt_tokens_details": cached}
        return {"prompt_tokens": prompt, "completion_tokens": new, **total}

    def _acceptance(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What was drafted and accepted for outputs, where the client asks for it."""
        if not (self.request.return_acceptance and choices):
            return {}
        params = self.call.params
        body = [
            {"index": one.index, "seed": params.seed + one.index % params.n}
            | ({} if one.stats is None else one.stats.as_dict())
            for one in choices
        ]
        return {"selfspec": {"acceptance": body}}


class CompletionWriter(Writer):
    """Answers of /v1/completions.

    Args:
        texts: of the prompts, for `echo`.
        tokenizer: gives tokens of the prompts as texts; None: there is none.
    """

    request: CompletionRequest

    def __init__(
        self, request: CompletionRequest, call: Call, model: str, texts: Sequence[str], tokenizer: Any = None
    ) -> None:
        super().__init__(request, call, model)
        self._texts, self._tokenizer = texts, tokenizer
        self._offsets = [0] * len(call.choices)  # characters before the next piece

    def choice(self, choice: Choice) -> dict[str, Any]:
        text, tokens, logprobs = choice.text, list(choice.token_ids), list(choice.logprobs or [])
        given: list[dict[int, Logprob] | None] = list(logprobs)
        if self.request.echo and choice.num_read == 0:
            prompt = choice.index // self.call.params.n
            text = self._texts[prompt] + text
            tokens = [*self.call.prompts[prompt], *tokens]
            given = [*(self.call.prompt_logprobs[prompt] or []), *logprobs]
        shown = None if self.request.logprobs is None else self._logprobs(choice.index, tokens, given)
        return {"text": text, "logprobs": shown}

    def _logprobs(self, index: int, tokens: Sequence[int], given: Logprobs) -> dict[str, Any]:
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, likely in zip(tokens, given, strict=True):
            text = _text(token, likely, self._tokenizer)
            shown["tokens"].append(text)
            shown["token_logprobs"].append(None if likely is None else _finite(likely[token].logprob))
            shown["top_logprobs"].append(None if likely is None else _by_text(likely))
            shown["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return shown


class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"content": choice.text}
        if not self.request.stream or choice.num_read == 0:
            message = {"role": "assistant"} | message
        logprobs = None if choice.logprobs is None else self._logprobs(choice.token_ids, choice.logprobs)
        return {"delta" if self.request.stream else "message": message, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[int], given: Sequence[dict[int, Logprob]]) -> dict[str, Any]:
        shown, most = [], self.request.top_logprobs or 0
        for token, likely in zip(tokens, given, strict=True):
            ranked = sorted((one for one in likely.items() if one[1].rank), key=lambda one: one[1].rank or 0)
            top = [_token(*pair) for pair in ranked[:most]]
            shown.append(_token(token, likely[token]) | {"top_logprobs": top})
        return {"content": shown}


def _token(token: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token, {token: logprob})
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _by_text(likely: dict[int, Logprob]) -> dict[str, float]:
    """Of tokens that are the same text, the likeliest."""
    body: dict[str, float] = {}
    for token, one in likely.items():
        text = _text(token, likely)
        body[text] = max(body.get(text, LEAST), _finite(one.logprob))
    return body


def _text(token: int, logprobs: dict[int, Logprob] | None, tokenizer: Any = None) -> str:
    """A token as text; without a tokenizer, its id, as vLLM writes it."""
    known = None if logprobs is None else logprobs[token].decoded_token
    if known is None and tokenizer is not None:
        known = str(tokenizer.decode([token]))
    return f"token_id:{token}" if known is None else known


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + as_json(body) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


def as_json(body: Any) -> bytes:
    """In ASCII, so that no text that a client sent can fail to be written."""
    return _encode(body).encode()
