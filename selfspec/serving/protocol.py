"""What clients send: OpenAI's request bodies with vLLM's additions, and `Refusal`, the error that they get.

A field is honoured, or accepted at the value that asks for nothing, or refused by name. None is ignored.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from selfspec.core import MAX_LOGPROBS, SamplingParams

COMPLETION_TOKENS = 16  # of a completion whose client names no length, as OpenAI has it
CHAT_TOKENS = 1024  # of an answer, as far as the context holds them
INT32 = (1 << 31) - 1
MOST_STOPS = 64  # stop strings, which are all looked for after every token
MOST_PARTS = 1 << 14  # prompts, messages, or parts of one: reading millions would hold up every other request

# Fields that ask for what is not served, with the values that ask for nothing; null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNUSED = ("metadata", "prompt_cache_key", "request_id", "safety_identifier", "user")  # they change no output


class Refusal(Exception):
    """An answer in OpenAI's error shape.

    Args:
        message: one sentence: what is wrong, what is allowed.
        status: the HTTP status.
        param: the field that is wrong, if one is.
        code: OpenAI's word for it.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = message, status, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the answer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class Body(BaseModel):
    """A part of a request. Numbers are numbers, not texts that look like some."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices says how many tokens there were."""

    include_usage: bool = False


class GenerationRequest(Body):
    """What both kinds of requests have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    speculative: Annotated[bool | None, Field(description="false: draft no token of this request")] = None
    return_acceptance: Annotated[bool | None, Field(description="say what was drafted and accepted")] = None
    return_token_ids: Annotated[bool | None, Field(description="add token ids to the choices")] = None

    @property
    def num_likely(self) -> int | None:
        """Likeliest tokens to tell per position; None: no log-probabilities."""
        raise NotImplementedError

    def refuse_unserved(self) -> None:
        """Refuse the fields that ask for what is not served."""
        parts = {"": self} if self.stream_options is None else {"": self, "stream_options.": self.stream_options}
        for prefix, part in parts.items():
            for name, value in (part.model_extra or {}).items():
                if value is None or name in UNUSED or any(_same(value, one) for one in NEUTRAL.get(name, ())):
                    continue
                what = "is not supported" if name in NEUTRAL else "is no field of this request"
                raise Refusal(f"{prefix}{name} {what}; leave it out", param=prefix + name, code="unsupported_parameter")
        number = self.num_likely
        if number is not None and not 0 <= number <= MAX_LOGPROBS:
            raise Refusal(f"logprobs must lie in 0..{MAX_LOGPROBS}, got {number}", param="logprobs")

    def params(self, seed: int, max_tokens: int, vocab_size: int, **more: Any) -> SamplingParams:
        """How to continue the prompts.

        Raises:
            ValueError: a value out of range; its name is the message's first word.
        """
        top_k = self.top_k
        if top_k is not None and (top_k == -1 or top_k >= vocab_size):  # all tokens, as vLLM's clients say it
            top_k = 0
        if any(token >= vocab_size for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must lie in 0..{vocab_size - 1}, the model's vocabulary")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        known = GenerationRequest.model_fields
        settings = {one.name: getattr(self, one.name) for one in fields(SamplingParams) if one.name in known}
        settings |= {"top_k": top_k, "seed": seed, "max_tokens": max_tokens, "stop": stop or None}
        settings |= {"stop_token_ids": self.stop_token_ids or None, "ignore_eos": bool(self.ignore_eos)}
        settings |= {"logprobs": self.num_likely, "n": self.n or 1, "speculative": self.speculative is not False}
        return SamplingParams(**settings, **more)


TokenIds = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """Continue texts. With `echo` and `logprobs`, that of the prompt is returned, too."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_PARTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MOST_PARTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_likely(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several."""
        given: Any = self.prompt
        return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]


class Part(BaseModel):
    """A part of a message's content; texts alone are served."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; the model's chat template decides which further fields mean something."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it: a content in parts is one text."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content, **fields}


class ChatRequest(GenerationRequest):
    """Answer a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_likely(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise Refusal("top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


def _same(value: Any, neutral: Any) -> bool:
    """Whether they are equal, without taking 1 for True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
