"""`ResponseStore`: responses that conversations may go on from, in memory, the latest used ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from selfspec.serving.bodies import as_json
from selfspec.serving.refusal import Refusal, shown

Items = list[dict[str, Any]]


class Stored(NamedTuple):
    """A response, and the conversation that it answered."""

    response: dict[str, Any]
    input: Items
    num_bytes: int


class ResponseStore:
    """Responses by id. Those that were used longest ago are dropped where all of them, as JSON, need more memory.

    Args:
        max_bytes: 0: none are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.keeps = max_bytes > 0
        """Whether any are kept."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._stored = OrderedDict[str, Stored]()

    def keep(self, response: dict[str, Any], input: Items) -> None:
        """Keep a response that has ended.

        Args:
            input: the items of the whole conversation before it.
        """
        num_bytes = len(as_json(response)) + len(as_json(input))
        self._stored[response["id"]] = Stored(response, input, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get(self, name: str) -> Stored:
        """A response.

        Raises:
            Refusal: 404.
        """
        if name not in self._stored:
            raise Refusal(f"there is no response {shown(name)} here; {self._why}", 404)
        self._stored.move_to_end(name)
        return self._stored[name]

    def delete(self, name: str) -> None:
        """Forget a response.

        Raises:
            Refusal: 404.
        """
        self._num_bytes -= self.get(name).num_bytes
        del self._stored[name]

    def conversation(self, name: str | None) -> Items:
        """The items up to a response and its own; none where no response is named.

        Raises:
            Refusal: 400.
        """
        if name is None:
            return []
        if name not in self._stored:
            message = f"previous_response_id {shown(name)} is not stored here; {self._why}"
            raise Refusal(message, param="previous_response_id", code="previous_response_not_found")
        stored = self.get(name)
        return [*stored.input, *stored.response["output"]]

    @property
    def _why(self) -> str:
        if not self.keeps:
            return "this server stores none: send the whole conversation as input"
        return "it was not stored (store), or room was needed for later ones (--max-stored-bytes)"
