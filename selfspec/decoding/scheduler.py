"""`Scheduler`: requests that wait, and the sequences that they become; `PromptChunks`: prompt tokens read per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from selfspec.core import Request, Sequence
from selfspec.decoding.checks import check_request
from selfspec.decoding.outputs import SpecStats
from selfspec.decoding.prefix_cache import PrefixCache, Reserved
from selfspec.decoding.stopping import SequenceText, Stopper, TextRules
from selfspec.drafting.lookup import Prediction, RowLookup, Texts
from selfspec.errors import CacheFullError
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel
from selfspec.structured.grammars import Grammars


class Scheduler:
    """First come, first served.

    Args:
        cache: where keys and values of sequences will be.
        texts: where drafts by lookup are found besides a sequence's own text.
        prefix: where prompts that begin alike find their pages; None: nowhere.
        grammars: of the tokenizer, for structured outputs.
    """

    def __init__(
        self,
        split: SplitModel,
        cache: PagedCache,
        tokenizer: Any,
        texts: tuple[Texts, ...],
        prefix: PrefixCache | None,
        grammars: Grammars,
    ) -> None:
        self._split, self._cache, self._tokenizer, self._texts = split, cache, tokenizer, texts
        self._prefix, self._grammars = prefix, grammars
        self.waiting: deque[Sequence] = deque()
        """Sequences that wait for a place, the longest first."""
        self._next_id = 0

    def __len__(self) -> int:
        """Outputs that wait."""
        return len(self.waiting)

    def add(self, request_id: str, requests: list[Request]) -> None:
        """Let the outputs of a request wait: all of them, or none.

        Raises:
            ValueError, CacheFullError: see `LLMEngine.add_request`.
        """
        waiting = []
        for index, request in enumerate(requests):
            check_request(request, self._split, self._tokenizer is not None)
            sequence = self._sequence(request_id, index, request)
            need, capacity = sequence.max_length - 1, self._cache.capacity
            if self._cache.pages_for(need) > self._cache.num_pages:
                raise CacheFullError(
                    f"a request of {need} tokens (prompt and output) exceeds the engine's {capacity} cached tokens; "
                    "raise the engine's limit of cached tokens, or ask for fewer new tokens"
                )
            waiting.append(sequence)
        self.waiting += waiting

    def _sequence(self, request_id: str, index: int, request: Request) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        most = min(request.max_tokens, self._split.context_limit - len(prompt))
        eos = frozenset() if params.ignore_eos else request.eos_token_ids
        text = None
        if self._tokenizer is not None:
            text = SequenceText(self._tokenizer, prompt, params.stops, TextRules.of(params))
        ends = frozenset(params.stop_token_ids or ())
        grammar = None
        if params.structured_outputs is not None:
            grammar = self._grammars.row(params.structured_outputs, request.eos_token_ids, self._split.vocab_size)
        self._next_id += 1
        return Sequence(
            self._next_id - 1,
            request,
            list(prompt),
            len(prompt) + most,
            request_id,
            index,
            Stopper(most, eos, text, params.stops, request.stopping_criteria, ends, grammar),
            grammar,
            stats=SpecStats(),
            new_lookup=lambda token_ids: RowLookup(token_ids, self._texts, Prediction.of(request)),
        )

    def admitted(self, most: int) -> Iterator[Sequence]:
        """Those that waited longest, at most so many, as far as pages are free."""
        for _ in range(most):
            if not self.waiting:
                return
            sequence = self.waiting[0]
            reserved = self._reserve(sequence)
            if reserved is None:
                return
            pages, sequence.blocks, sequence.num_cached = reserved
            sequence.pages, sequence.has_pages = tuple(pages), True
            sequence.num_reserved = self._need(sequence) + 1
            if sequence.num_tokens == sequence.num_prompt_tokens:  # else it had a place before
                sequence.num_found = sequence.num_cached
            sequence.num_edits = None if self._prefix is None else self._prefix.count_edits()
            self.waiting.popleft()  # last, so that an interrupt loses no request
            yield sequence

    def readers(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences that may read their prompts now; see `PrefixCache.readers`."""
        return running if self._prefix is None else self._prefix.readers(running)

    def publish(self, running: list[Sequence]) -> None:
        """Let prompts that begin alike find what these sequences have read and written."""
        if self._prefix is not None:
            self._prefix.publish(running)

    def _reserve(self, sequence: Sequence) -> Reserved | None:
        """Pages for a sequence; None where too few are free."""
        need, prompt = self._need(sequence), sequence.token_ids
        if self._prefix is not None:
            is_scored = sequence.request.params.prompt_logprobs is not None  # all of the prompt is read, for its logits
            return self._prefix.reserve(prompt[:1] if is_scored else prompt, need)
        pages = self._cache.reserve(need)
        return None if pages is None else Reserved(pages, [], 0)

    def _need(self, sequence: Sequence) -> int:
        """Tokens that a sequence has pages for next."""
        reserve = sequence.request.reserve
        length = sequence.max_length if reserve is None else min(sequence.max_length, sequence.num_tokens + reserve)
        return length - 1

    def extended(self, sequence: Sequence) -> bool:
        """Whether a sequence has pages for another token. Where it has few left, more are taken, if they are free."""
        if sequence.num_reserved < sequence.max_length and sequence.num_remaining <= LEAST:
            lacking = self._cache.pages_for(self._need(sequence)) - len(sequence.pages)
            pages = (self._cache if self._prefix is None else self._prefix).more(max(0, lacking))
            if pages is not None:
                sequence.pages = (*sequence.pages, *pages)
                sequence.num_reserved = self._need(sequence) + 1
        return sequence.num_remaining > 0

    def requeue(self, sequence: Sequence) -> None:
        """Take back the pages of a sequence, which waits before all others, and reads its tokens anew."""
        self.release(sequence)
        sequence.pages, sequence.blocks, sequence.num_cached, sequence.has_pages = (), [], 0, False
        self.waiting.appendleft(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take back the pages of a sequence that ended."""
        if self._prefix is not None:
            self._prefix.release(sequence)
        else:
            self._cache.release(sequence.pages, sequence.max_length)


DEVICE_SECONDS, HOST_SECONDS = 1 / 30, 0.25  # of a chunk, while rows wait for their next round
LEAST = 64  # tokens; on a device, fewer hardly take less time


class DeviceTimer:
    """The time on the current CUDA device from when it is made until `stop`, for which the host does not wait."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float | None:
        """None where the device has not got so far."""
        return self._start.elapsed_time(self._end) / 1000 if self._end.query() else None


class HostTimer:
    """The same on the host."""

    def __init__(self) -> None:
        self._start = self._end = perf_counter()

    def stop(self) -> None:
        self._end = perf_counter()

    def seconds(self) -> float:
        return self._end - self._start


class PromptChunks:
    """The size of chunks: at most as many tokens as take `limit` seconds, by the time of an earlier one.

    Args:
        most: tokens of a chunk at most.
        limit: seconds that a chunk is to take at most while rows wait for their next round; None: any, and no time is
            measured.
        new_timer: makes a running timer.
        first: tokens of a chunk at most before any time is known; None: `most`.
    """

    def __init__(
        self,
        most: int,
        limit: float | None,
        new_timer: Callable[[], DeviceTimer | HostTimer] = DeviceTimer,
        first: int | None = None,
    ) -> None:
        self.most, self._limit, self._new_timer = most, limit, new_timer
        self._size = most if first is None else min(first, most)
        self._running: tuple[int, DeviceTimer | HostTimer] | None = None  # a chunk's tokens, and its time

    def size(self) -> int:
        """Tokens of the next chunk, for which rows wait."""
        if self._running is None or self._limit is None:
            return self._size
        num, timer = self._running
        seconds = timer.seconds()
        if seconds is not None:
            self._running = None
            self._size = min(self.most, max(LEAST, int(num * self._limit / max(seconds, 1e-6))))
        return self._size

    def measured(self, read: Callable[[], int]) -> None:
        """Read a chunk by `read`, which returns the number of its tokens; measure its time, if no other is awaited."""
        if self._limit is None or self._running is not None:
            read()
            return
        timer = self._new_timer()
        num = read()
        timer.stop()
        if num >= LEAST:  # the time of fewer is that of a forward, whatever their number
            self._running = num, timer


def chunks_for(split: Any, most: int) -> PromptChunks:
    """Chunks of at most `most` tokens for a `selfspec.model.split_model.SplitModel`.

    On the processor only the compiled engine's are bounded, whose results do not depend on them, bit for bit.
    """
    if split.device.type == "cuda":
        return PromptChunks(most, DEVICE_SECONDS)
    if split.backend == "compiled":
        return PromptChunks(most, HOST_SECONDS, HostTimer, LEAST)
    return PromptChunks(most, None)
