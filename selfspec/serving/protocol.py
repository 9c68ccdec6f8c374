"""What clients send to /v1/completions and /v1/chat/completions: OpenAI's bodies with vLLM's additions.

Their fields are honoured; `fields.py` has the class of every other one. `ChatRequest` is the internal request, too:
the other routes that answer conversations translate theirs to it.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec.params import MAX_LOGPROBS, SamplingParams
from selfspec.serving.fields import check_fields
from selfspec.serving.refusal import Refusal, invalid
from selfspec.serving.structured import NAMED, structured_outputs
from selfspec.structured.tool_calls import CHOICES, MOST_TOOLS

COMPLETION_TOKENS = 16  # of a completion whose client names no length, as OpenAI has it
CHAT_TOKENS = 1024  # of an answer without a length, for which memory is taken at a time
NO_LIMIT = -1  # in place of a length: to the end of the context, as llama-server has it
INT32 = (1 << 31) - 1
MOST_STOPS = 64  # stop strings, which are all looked for after every token
MOST_PARTS = 1 << 14  # prompts, messages, or parts of one: reading millions would hold up every other request
MOST_BIASES = 1 << 10
ROLES = {"developer": "system"}  # what other APIs call the roles that templates know
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # and their field
SHAPES = {  # of fields that may have several, of which pydantic would name the first
    "prompt": f"a text, a list of at most {MOST_PARTS} texts, a list of token ids, or a list of those",
    "guided_json": "a JSON schema, an object or its text",
    "stop": f"a text, or a list of at most {MOST_STOPS} texts",
    "tools": f"a list of at most {MOST_TOOLS} tools",
    "tool_choice": CHOICES,
    "messages": f"a list of 1 to {MOST_PARTS} messages, each with a role and a content",
    "content": f"a text, null, or a list of at most {MOST_PARTS} parts",
}


class Body(BaseModel):
    """A part of a request. Numbers are numbers, not texts that look like some."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices says how many tokens there were; `continuous_usage_stats`: every
    chunk says how many there are so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Body):
    """What both kinds of requests have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    speculative: Annotated[bool | None, Field(description="false: draft no token of this request")] = None
    return_acceptance: Annotated[bool | None, Field(description="say what was drafted and accepted")] = None
    return_token_ids: Annotated[bool | None, Field(description="add token ids to the choices")] = None
    return_tokens_as_token_ids: Annotated[bool | None, Field(description="write them so in logprobs, too")] = None

    @property
    def num_likely(self) -> int | None:
        """Likeliest tokens to tell per position; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """Most new tokens that the request names; None: it leaves them to the server."""
        return None if self.max_tokens == NO_LIMIT else self.max_tokens

    def refuse_unserved(self) -> None:
        """Refuse the fields that ask for what is not served."""
        check_fields(self.model_extra or {})
        if self.stream_options is not None:
            check_fields(self.stream_options.model_extra or {}, "stream_options.")
        number = self.num_likely
        if number is not None and not 0 <= number <= MAX_LOGPROBS:
            name = "top_logprobs" if "top_logprobs" in type(self).model_fields else "logprobs"
            raise Refusal(f"{name} must lie in 0..{MAX_LOGPROBS}, got {number}", param=name)
        if self.prompt_logprobs is not None and self.stream:
            raise Refusal("prompt_logprobs cannot be streamed; leave stream out", param="prompt_logprobs")

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
        known = GenerationRequest.model_fields
        given = {one.name: getattr(self, one.name) for one in fields(SamplingParams) if one.name in known}
        settings = {name: value for name, value in given.items() if value not in (None, [])}  # these ask for nothing
        settings |= {"top_k": top_k, "seed": seed, "max_tokens": max_tokens, "logit_bias": self._bias()}
        if self.length is None:
            settings["min_tokens"] = min(self.min_tokens or 0, max_tokens)
        settings |= {"structured_outputs": structured_outputs(self.shapes)}
        return SamplingParams(**settings | {"logprobs": self.num_likely} | more)

    @property
    def shapes(self) -> dict[str, Any]:
        """The fields that may say what an answer must look like."""
        return {name: getattr(self, name) for name in ("response_format", "structured_outputs", *NAMED)}

    def _bias(self) -> dict[int, float] | None:
        """`logit_bias`, whose token ids are texts in JSON."""
        if wrong := [name for name in self.logit_bias or () if not (name.isascii() and name.isdecimal())]:
            raise ValueError(f"logit_bias must have token ids as names, got {wrong[0]!r}")
        return {int(name): bias for name, bias in (self.logit_bias or {}).items()} or None


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


class Part(Body):
    """A part of a message's content."""

    type: str


class Message(Body):
    """A message of a conversation; the model's chat template decides which further fields mean something."""

    role: str
    content: str | Annotated[list[Part | str], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None

    def as_dict(self, name: str) -> dict[str, Any]:
        """As chat templates take it: a content in parts is one text, none is an empty one, and the arguments of tool
        calls are objects.

        Args:
            name: of the message, for a refusal.
        """
        fields = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        calls = fields.get("tool_calls")
        if isinstance(calls, list):
            fields["tool_calls"] = [_with_object(call) for call in calls]
            if not calls:
                del fields["tool_calls"]
        content = self.content
        if isinstance(content, list):
            content = "".join(_text_of(part, f"{name}.content[{i}]") for i, part in enumerate(content))
        return {"role": ROLES.get(self.role, self.role), "content": content or "", **fields}


Tools = Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)]


class Prediction(Body):
    """What much of the answer is expected to be: a text, or texts in parts."""

    type: Literal["content"]
    content: str | Annotated[list[Part | str], Field(max_length=MOST_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(_text_of(part, f"prediction.content[{i}]") for i, part in enumerate(self.content))


class ChatRequest(GenerationRequest):
    """Answer a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    echo: Literal[False] | None = None

    @property
    def num_likely(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise Refusal("top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def length(self) -> int | None:
        """Most new tokens; None: as many as the context holds."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if most == NO_LIMIT else most

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages, as chat templates take them.

        Raises:
            Refusal: a part that is no text.
        """
        return [message.as_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        continues, prompts = bool(self.continue_final_message), self.add_generation_prompt
        if continues and prompts:
            raise Refusal(
                "continue_final_message must be false where add_generation_prompt is true",
                param="continue_final_message",
            )
        options: dict[str, Any] = {"add_generation_prompt": not continues if prompts is None else prompts}
        options |= {"continue_final_message": True} if continues else {}
        options |= {} if self.documents is None else {"documents": self.documents}
        return options | ({} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort})


def translated(request: GenerationRequest, more: dict[str, Any]) -> ChatRequest:
    """The internal request of another route's.

    Args:
        more: the fields that are not common to both.

    Raises:
        Refusal: a field is wrong, or asks for more than the route's answers have place for.
    """
    if request.n not in (None, 1):
        raise Refusal(f"n must be 1 on this route, got {request.n}; send several requests", param="n")
    common = {name: getattr(request, name) for name in GenerationRequest.model_fields if name != "stream_options"}
    return chat_request(common | more)


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """An internal request.

    Raises:
        Refusal: a field is wrong.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as problem:
        raise invalid(problem.errors(), SHAPES, 0) from problem


def _text_of(part: Part | str, name: str) -> str:
    """The text of a part of a content.

    Raises:
        Refusal: it is no text.
    """
    if isinstance(part, str):
        return part
    text = (part.model_extra or {}).get(TEXT_PARTS.get(part.type, ""))
    if not isinstance(text, str):
        what = "lacks its text" if part.type in TEXT_PARTS else f"is {part.type!r}, and this model reads text alone"
        raise Refusal(f"{name} {what}; send parts of type text", param="messages", code="unsupported_content")
    return text


def _with_object(call: Any) -> Any:
    """A tool call, its arguments as the object that their text stands for, if it does."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        made = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": made}} if isinstance(made, dict) else call
