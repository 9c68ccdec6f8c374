"""`Refusal`: an answer that says what is wrong, in the shape of the route's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ANTHROPIC = "/v1/messages"  # routes below it answer in Anthropic's shapes
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "rate_limit_exceeded"}
MOST_SHOWN = 60  # characters of a value that is shown


class Refusal(Exception):
    """An answer in OpenAI's error shape.

    Args:
        message: one sentence: what is wrong, what is allowed.
        status: the HTTP status.
        param: the field that is wrong, if one is.
        code: OpenAI's word for it; default: one that follows from the status.
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
        self.message, self.status, self.param, self.retry_after = message, status, param, retry_after
        self.code = code or CODES.get(status, "invalid_value" if param else None)

    @property
    def kind(self) -> str:
        """OpenAI's and Anthropic's type of the error."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The answer of a route."""
        if not path.startswith(ANTHROPIC):
            return self.body
        kind = "overloaded_error" if self.status == 503 else self.kind.replace("server_error", "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the answer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def too_long(length: int, what: str, most: int, param: str) -> Refusal:
    """A prompt that leaves no place for an answer, in words that gateways look for.

    Args:
        length: of the prompt.
        what: the units of `length`.
        most: tokens of prompt and answer.
    """
    message = f"the prompt is too long: {param} has {length} {what}, and this model's maximum context length is {most}"
    return Refusal(f"{message} tokens for prompt and answer; shorten it", param=param, code="context_length_exceeded")


def shown(value: object) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def invalid(errors: Sequence[Mapping[str, Any]], shapes: Mapping[str, str], start: int = 1) -> Refusal:
    """What pydantic found wrong, as a sentence that names the field, what is allowed and what came.

    Args:
        shapes: what fields that may have several shapes must be; pydantic would name the first.
        start: names before the field's in an error's place.
    """
    first = errors[0]
    where = [str(part) for part in first["loc"][start:]]
    if not where or first["type"] == "json_invalid":
        message = "the body must be valid JSON, an object, sent with Content-Type: application/json"
        return Refusal(message, code="invalid_json")
    name, message, code = where[0], str(first["msg"]), "invalid_value"
    if first["type"] == "missing":
        code = "missing_required_parameter"
    else:
        if known := [i for i, part in enumerate(where) if part in shapes]:
            where = where[: known[-1] + 1]
            message = f"must be {shapes[where[-1]]}"
        elif first["type"].endswith("_type"):
            code = "invalid_type"
        message += f", got {shown(first.get('input'))}"
    return Refusal(f"{'.'.join(where)}: {message}", param=name, code=code)
