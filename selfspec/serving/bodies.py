"""Answers in OpenAI's shapes: whole ones, and the chunks of streams."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from time import time
from typing import Any

from starlette.responses import Response

from selfspec.decoding.outputs import Logprob
from selfspec.serving.calls import Call, Choice
from selfspec.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from selfspec.serving.refusal import Refusal
from selfspec.serving.token_texts import TokenTexts
from selfspec.structured.formats import CallPiece, CallReader
from selfspec.structured.tool_calls import ToolUse, call_of, gathered, new_id

RUN = 3  # tokens that have to be alike before a prediction is gone on with
LEAST = -9999.0  # stands for log-probabilities that JSON has no number for
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
Logprobs = Sequence[dict[int, Logprob] | None]


class Writer:
    """Writes what came of a call.

    Args:
        request: what the client sent.
        model: the name that answers bear.
        tokens: the texts of single tokens.
    """

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, call: Call, model: str, tokens: TokenTexts) -> None:
        self.request, self.call, self.model, self.created = request, call, model, int(time())
        self.tokens = tokens

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
        has_usage = options is not None and bool(options.include_usage)
        continues = options is not None and bool(options.continuous_usage_stats)
        head = self._head(self.chunk_kind)
        try:
            async for pieces in self.call.changes():
                body = list[bytes]()
                for piece in pieces:
                    chunks = [head | {"choices": [choice]} for choice in self._choices(piece)]
                    if has_usage or continues:
                        chunks = [chunk | {"usage": self._usage() if continues else None} for chunk in chunks]
                    if piece.finish_reason is not None:
                        chunks[-1] |= self._acceptance([piece])
                    body += map(event, chunks)
                yield b"".join(body)
            if has_usage:
                yield event(head | {"choices": [], "usage": self._usage()})
        except Refusal as refusal:
            yield event(refusal.body)
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.call.name, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": None}

    def _choices(self, piece: Choice) -> list[dict[str, Any]]:
        """A piece as the choices of chunks."""
        return [self._choice(piece)]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        body = {"index": choice.index} | end | self.choice(choice)
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

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """Those of a prompt as vLLM shows them, by token id, where the client asks for them."""
        if self.request.prompt_logprobs is None:
            return {}
        shown: list[dict[str, Any] | None] = []
        for told in self.call.prompt_logprobs[prompt] or ():
            shown.append(None if told is None else {str(token): self._by_id(token, own) for token, own in told.items()})
        return {"prompt_logprobs": shown}

    def _by_id(self, token: int, own: Logprob) -> dict[str, Any]:
        return {"logprob": finite(own.logprob), "rank": own.rank, "decoded_token": self.tokens.text(token)}

    def _text(self, token: int) -> str:
        """A token as text; without a tokenizer, its id, as vLLM writes it."""
        return f"token_id:{token}" if self.request.return_tokens_as_token_ids else self.tokens.text(token)

    def _adds(self, token: int) -> bytes:
        """What a token adds to the answer's text."""
        is_left_out = self.tokens.is_special(token) and self.request.skip_special_tokens is not False
        return b"" if is_left_out else self.tokens.encoded(token)


class CompletionWriter(Writer):
    """Answers of /v1/completions.

    Args:
        texts: of the prompts, for `echo`.
    """

    request: CompletionRequest

    def __init__(
        self, request: CompletionRequest, call: Call, model: str, tokens: TokenTexts, texts: Sequence[str]
    ) -> None:
        super().__init__(request, call, model, tokens)
        self._texts = texts
        self._offsets = [0] * len(call.choices)  # characters that are complete before the next token
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in call.choices]  # hold what is incomplete

    def choice(self, choice: Choice) -> dict[str, Any]:
        text, tokens, logprobs = choice.text, list(choice.token_ids), list(choice.logprobs or [])
        given: list[dict[int, Logprob] | None] = list(logprobs)
        prompt = choice.index // self.call.params.n
        if self.request.echo and choice.num_read == 0:
            text = self._texts[prompt] + text
            tokens = [*self.call.prompts[prompt], *tokens]
            given = [*(self.call.prompt_logprobs[prompt] or []), *logprobs]
        shown = None if self.request.logprobs is None else self._logprobs(choice.index, text, tokens, given)
        return {"text": text, "logprobs": shown} | self._prompt_logprobs(prompt)

    def _logprobs(self, index: int, text: str, tokens: Sequence[int], given: Logprobs) -> dict[str, Any]:
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, likely in zip(tokens, given, strict=True):
            shown["tokens"].append(self._text(token))
            shown["token_logprobs"].append(None if likely is None else finite(likely[token].logprob))
            shown["top_logprobs"].append(None if likely is None else self._by_text(likely))
            shown["text_offset"].append(self._offsets[index])
            added = self._adds(token)
            if self.request.echo and not self._offsets[index] and not text.startswith(" "):
                added = added.removeprefix(b" ")  # which some tokenizers put before a text
            self._offsets[index] += len(self._decoders[index].decode(added))
        return shown

    def _by_text(self, likely: dict[int, Logprob]) -> dict[str, float]:
        """Of tokens that are the same text, the likeliest."""
        body: dict[str, float] = {}
        for token, one in likely.items():
            text = self._text(token)
            body[text] = max(body.get(text, LEAST), finite(one.logprob))
        return body


class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(
        self, request: ChatRequest, call: Call, model: str, tokens: TokenTexts, use: ToolUse | None = None
    ) -> None:
        super().__init__(request, call, model, tokens)
        self.num_parts = 0  # of an answer that has parts
        self._readers = [CallReader(None) if use is None else use.reader() for _ in call.choices]

    def _usage(self) -> dict[str, Any]:
        expected: Any = self.call.params.prediction
        if not expected:
            return super()._usage()
        kept = sum(in_order(expected, choice.all_token_ids) for choice in self.call.choices)
        rejected = len(expected) * len(self.call.choices) - kept
        details = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": rejected, "reasoning_tokens": 0}
        return super()._usage() | {"completion_tokens_details": details}

    def body(self) -> dict[str, Any]:
        return super().body() | self._prompt_logprobs(0)

    def pieces(self, choice: Choice) -> list[CallPiece]:
        """What is new of an output: of its text, and of its calls of tools."""
        return self._readers[choice.index].read(choice.text, choice.finish_reason is not None)

    def parts(self, choice: Choice) -> list[tuple[int, bool, CallPiece]]:
        """The same of the only output, with the number of the part that a piece belongs to, which is text or a call,
        and whether the part begins with it.
        """
        found = list[tuple[int, bool, CallPiece]]()
        for one in self.pieces(choice):
            begins = not self.num_parts or one.name is not None
            self.num_parts += begins
            found.append((self.num_parts - 1, begins, one))
        return found

    def end_of(self, choice: Choice) -> str | None:
        """Why an output ended."""
        has_called = choice.finish_reason == "stop" and self._readers[choice.index].has_called
        return "tool_calls" if has_called else choice.finish_reason

    def call_id(self, choice: int, call: int, prefix: str = "call_") -> str:
        """The id of a call of an output."""
        return new_id(f"{self.call.name}/{choice}/{call}", prefix)

    def choice(self, choice: Choice) -> dict[str, Any]:
        text, calls = gathered(self.pieces(choice))
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            made = [call_of(self.call_id(choice.index, i), *call) for i, call in enumerate(calls)]
            message |= {"tool_calls": made}
        return {"message": message} | self._told(choice)

    def _choices(self, piece: Choice) -> list[dict[str, Any]]:
        deltas = [self._delta(piece.index, one) for one in self.pieces(piece)]
        if not deltas:
            deltas = [{} if self._readers[piece.index].num_calls else {"content": ""}]
        if piece.num_read == 0:
            deltas[0] = {"role": "assistant", "content": None} | deltas[0]
        nothing = {"index": piece.index, "finish_reason": None, "stop_reason": None, "logprobs": None}
        *early, last = deltas
        whole = {"index": piece.index, "stop_reason": piece.stop_reason, "delta": last} | self._told(piece)
        whole |= {"token_ids": piece.token_ids} if self.request.return_token_ids else {}
        return [*[nothing | {"delta": delta} for delta in early], whole]

    def _delta(self, choice: int, piece: CallPiece) -> dict[str, Any]:
        if piece.call is None:
            return {"content": piece.text}
        function = {"arguments": piece.text} if piece.name is None else {"name": piece.name, "arguments": piece.text}
        begun = {} if piece.name is None else {"id": self.call_id(choice, piece.call), "type": "function"}
        return {"tool_calls": [{"index": piece.call, **begun, "function": function}]}

    def _told(self, choice: Choice) -> dict[str, Any]:
        likely = None if choice.logprobs is None else {"content": self.logprobs(choice), "refusal": None}
        return {"logprobs": likely, "finish_reason": self.end_of(choice)}

    def logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        """Those of a piece, a token each."""
        shown, most = [], self.request.top_logprobs or 0
        for token, likely in zip(choice.token_ids, choice.logprobs or (), strict=True):
            ranked = sorted((one for one in likely.items() if one[1].rank), key=lambda one: one[1].rank or 0)
            top = [self._token(*pair) for pair in ranked[:most]]
            shown.append(self._token(token, likely[token]) | {"top_logprobs": top})
        return shown

    def _token(self, token: int, own: Logprob) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": finite(own.logprob), "bytes": [*self._adds(token)]}


def in_order(expected: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the expected tokens stand in an output, in their order; where they differ, from the next three that
    both have on."""
    places = defaultdict[Sequence[int], list[int]](list)
    for at in range(len(expected) - RUN + 1):
        places[tuple(expected[at : at + RUN])].append(at)
    count = at = i = 0
    while i < len(tokens) and at < len(expected):
        if tokens[i] == expected[at]:
            count, at, i = count + 1, at + 1, i + 1
            continue
        found = places.get(tuple(tokens[i : i + RUN]), [])
        next_one = bisect_left(found, at)
        if next_one < len(found):
            at = found[next_one]
        else:
            i += 1
    return count


def finite(logprob: float) -> float:
    """A log-probability that JSON has a number for."""
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + as_json(body) + b"\n\n"


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


def as_json(body: Any) -> bytes:
    """In ASCII, so that no text that a client sent can fail to be written."""
    return _encode(body).encode()
