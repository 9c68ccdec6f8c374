"""`Scheduler`: requests that wait until there is a place for them, and the rows that they become."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from selfspec.decoding.checks import check_request
from selfspec.decoding.policy_choice import Decodable
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.prefix_key import Reserved
from selfspec.decoding.request import Options, Request, make_request
from selfspec.decoding.row import Row
from selfspec.decoding.stopping import RowText, Stopper, Tokenizer
from selfspec.drafting.texts import Texts
from selfspec.errors import CacheFullError, refuse_unknown
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack


class Scheduler:
    """First come, first served.

    Args:
        stack: of the target, and `cache`: where rows' keys and values will be.
        texts: what rows look in besides their own texts.
        prefix: where prompts that begin alike find their pages; None: nowhere.
    """

    def __init__(
        self, target: Decodable, stack: Stack, cache: PagedCache, texts: tuple[Texts, ...], prefix: PrefixCache | None
    ) -> None:
        self._target, self._stack, self._cache, self._texts = target, stack, cache, texts
        self._prefix = prefix
        self._waiting: deque[tuple[int, Request]] = deque()
        self._next_id = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        """Whether that one does."""
        return any(waiting == request_id for waiting, _ in self._waiting)

    def submit(self, prompt: str | Sequence[int] | Request, options: dict[str, Any]) -> int:
        """Let a request wait; its id.

        Raises:
            ValueError, CacheFullError: see `Engine.submit`.
        """
        refuse_unknown(options, Options.__optional_keys__)
        request = prompt if isinstance(prompt, Request) else self._made(prompt, options)
        check_request(request, self._stack, self._target.tokenizer is not None)
        need, room = self._num_cached_at_end(request), self._cache.room
        if self._cache.pages_for(need) > self._cache.num_pages:
            raise CacheFullError(
                f"a request of {need} tokens (prompt and output) exceeds the engine's {room} cached tokens; raise the "
                "engine's limit of cached tokens, or ask for fewer new tokens"
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._waiting.append((request_id, request))
        return request_id

    def _made(self, prompt: str | Sequence[int], options: dict[str, Any]) -> Request:
        own = {name: value for name, value in options.items() if name != "generation_config"}
        request, stored = make_request(prompt, self._target.tokenizer, **own), self._target.stored
        if stored is None:
            return request
        stored.mind_chat([prompt], self._target.tokenizer)
        return stored.complete([request], options, self._target)[0]

    def admitted(self, most: int) -> Iterator[Row]:
        """Rows of the requests that waited longest, at most so many, as far as pages are free."""
        for _ in range(most):
            if not self._waiting:
                return
            request_id, request = self._waiting[0]
            reserved = self._reserve(request)
            if reserved is None:
                return
            self._waiting.popleft()
            row = self._row(request_id, request, reserved)
            row.texts = self._texts
            row.num_edits = None if self._prefix is None else self._prefix.count_edits()
            yield row

    def readers(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that may read their prompts now; see `PrefixCache.readers`."""
        return rows if self._prefix is None else self._prefix.readers(rows)

    def publish(self, rows: Sequence[Row]) -> None:
        """Let prompts that begin alike find what these rows have read and written."""
        if self._prefix is not None:
            self._prefix.publish(rows)

    def _reserve(self, request: Request) -> Reserved | None:
        """Pages for a request; None where too few are free."""
        need = self._num_cached_at_end(request)
        if self._prefix is not None:
            scored = request.prompt_logprobs is not None  # all of the prompt is read, for its logits
            return self._prefix.reserve(request.prompt[:1] if scored else request.prompt, need)
        pages = self._cache.reserve(need)
        return None if pages is None else Reserved(pages, [], 0)

    def release(self, row: Row) -> None:
        """Take back the pages of a row that ended."""
        if self._prefix is not None:
            self._prefix.release(row)
        else:
            self._cache.release(row.pages, row.limit)

    def withdrawn(self, request_ids: Collection[int]) -> Iterator[Row]:
        """Those of these that wait, as rows without pages; each waits until it is handed out."""
        for pair in [pair for pair in self._waiting if pair[0] in request_ids]:
            self._waiting.remove(pair)
            row = self._row(*pair, Reserved([], [], 0))
            row.has_pages = False
            yield row

    def _row(self, request_id: int, request: Request, reserved: Reserved) -> Row:
        eos = self._target.eos_token_ids if request.eos is None else request.eos
        ends = frozenset() if request.ignore_eos else eos, frozenset(request.stop_token_ids)
        tokenizer: Tokenizer | None = self._target.tokenizer
        text = None if tokenizer is None else RowText(tokenizer, request.prompt, request.stop)
        stopper = Stopper(
            self._max_new_tokens(request), ends[0], text, request.stop, request.stopping_criteria, ends[1]
        )
        pages, blocks, num_cached = reserved
        content = list(request.prompt)
        return Row(request_id, request, stopper, tuple(pages), content, num_cached, num_found=num_cached, blocks=blocks)

    def _max_new_tokens(self, request: Request) -> int:
        return min(request.max_new_tokens, self._stack.context_limit - len(request.prompt))

    def _num_cached_at_end(self, request: Request) -> int:
        return len(request.prompt) + self._max_new_tokens(request) - 1
