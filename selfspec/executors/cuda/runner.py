"""`Runner`: runs rounds of a split model from recordings.

A decoded token takes many small kernels. Launching them one by one from Python takes longer than reading the weights;
replaying a CUDA graph does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from selfspec.control.costs import RoundLimits
from selfspec.core import UNBOUNDED_ROUNDS, Plan
from selfspec.executors.cuda.body_choice import BodyChoice, Measure, apply_choice, choose_body
from selfspec.executors.cuda.capture import Body, CannotCapture, Capture, CudaCapture, Recording
from selfspec.executors.cuda.device_work import DeviceWork, current
from selfspec.executors.cuda.graphs import Graphs, Recorded, Storage, Storages
from selfspec.executors.cuda.rounds import (
    MAX_PLACES,
    MAX_ROWS,
    MAX_WIDTH,
    SLOTS,
    WIDTHS,
    RecordedRounds,
    RoundInputs,
    RoundKey,
    RoundRow,
    RowResult,
    WholeRound,
    round_up,
    token_capacity,
)
from selfspec.executors.cuda.self_check import round_problem
from selfspec.kernels.suite import Kernels, has_triton, triton_kernels
from selfspec.model.draft_vocabulary import HeldSubset
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.kv_cache import PagedCache
from selfspec.model.quantized import is_dense
from selfspec.model.self_check import TOLERANCE, split_error
from selfspec.progress import tell

T = TypeVar("T")
_log = logging.getLogger("selfspec")
BUDGET = 2 << 30  # bytes of device memory for recordings
MAX_GROWTH_SHARE = 0.5  # share of the free memory that keys and values take to grow to twice their size
START_SECONDS, START_BYTES = 10.0, 600 << 20  # limits of what is recorded before decoding


def install(
    split: Any,
    make: Callable[[Any], Runner] | None = None,
    owned: bool = False,
    measure: Measure | None = None,
    known: Callable[[], BodyChoice | None] = lambda: None,
) -> BodyChoice | None:
    """Set a split model's runner and check it: its logits against the whole model's, recorded against eager rounds.

    If making the runner or a check fails, the runner is removed with a warning. Then what runs the layers in recordings
    is chosen, see `selfspec.executors.cuda.body_choice`.

    Args:
        make: makes the runner. Default: one with CUDA graphs if the split model is on CUDA, else none.
        owned: whether the model's weights may be moved in memory: nobody else uses the model.
        measure: gives the seconds of a replay. Default: `body_choice.replay_seconds`.
        known: gives what an earlier call returned for the same weights, device and versions; then nothing is checked or
            timed again. Asked only where there may be recordings.

    Returns:
        what may be kept for later calls; None where the model is decoded eagerly, or an error decided.
    """
    if make is None:
        if split.device.type != "cuda" or not has_triton():
            return None
        make = Runner.on_cuda
    begun = perf_counter()
    with current(split.device):
        try:
            split.runner = make(split)
            choice = known()
            if choice is not None and apply_choice(split, split.runner, owned, choice):
                body = "the model's own modules" if choice.packing is None else "fused layers"
                tell("decoding from graphs, by %s: checked and chosen before, ready in %.1f s",
                     body, perf_counter() - begun)  # fmt: skip
                return choice
            problem = _problem_of(split)
        except Exception as raised:  # compilers and drivers raise exceptions of any type
            problem = f"{type(raised).__name__}: {raised}"
        if problem:
            _log.warning("decoding from graphs does not serve this model here (%s), so it is decoded eagerly", problem)
            split.runner = split.recorded = None
            return None
        choice = choose_body(split, split.runner, owned, lambda: _problem_of(split), measure)
    graphs = split.runner.graphs
    tell(
        "checked decoding from graphs: %d recordings in %.1f s, %.0f MiB",
        graphs.num_recorded, perf_counter() - begun, graphs.num_bytes / (1 << 20),
    )  # fmt: skip
    return choice


def _problem_of(split: Any) -> str:
    """What is wrong with recorded layers and rounds of a split model; "" if nothing is."""
    error = split_error(split)
    if not error <= TOLERANCE.get(split.dtype, 0.2):
        return f"its logits differ by {error:.2g} standard deviations"
    return round_problem(split, split.runner) or ""


class Runner:
    """Runs one split model from recordings.

    Args:
        split: a `selfspec.model.split_model.SplitModel`; the runner uses `run`, `logits`, `exit_heads`.
        kernels: those of rounds and of layers.
        capture: records bodies.
        budget: bytes of device memory for all recordings.
        max_rows: maximum rows of a round that drafts; of more, nothing is drafted.
        shares: another runner, whose recordings are within the same budget.
    """

    def __init__(
        self,
        split: Any,
        kernels: Kernels,
        capture: Capture,
        budget: int = BUDGET,
        max_rows: int = MAX_ROWS,
        shares: Runner | None = None,
    ) -> None:
        self.split, self.kernels, self.max_rows = split, kernels, max_rows
        self.graphs: Graphs = Graphs(capture, budget) if shares is None else shares.graphs
        self.storages = Storages()
        self.refused: str | None = None
        """The first operation that could not be recorded; everything then runs eagerly."""
        self._heads = split.exit_heads
        self._weights = [one for one in (*split.model.parameters(), *split.model.buffers()) if is_dense(one)]
        self._addresses = self._addresses_now()
        self._parts = WeakValueDictionary[int, HeldSubset]()  # by size; recordings hold them
        self._failed = set[Any]()  # keys of what cannot be recorded, with the caches that there are, though others can
        # A target may serve several threads; buffers and the memory of recordings are shared.
        self._lock: DeviceWork = DeviceWork(split.device) if shares is None else shares._lock

    @classmethod
    def on_cuda(cls, split: Any, budget: int = BUDGET) -> Runner:
        """A runner with Triton kernels and CUDA graphs.

        Raises:
            ImportError: Triton is not installed.
        """
        return cls(split, triton_kernels(), CudaCapture(split.device), budget)

    @property
    def limits(self) -> RoundLimits:
        """What recorded rounds can hold."""
        return RoundLimits(MAX_WIDTH - 1, MAX_PLACES, self.max_rows)

    @torch.inference_mode()
    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """A KV cache whose rows can be run from recordings. It may reuse pages and recordings of earlier caches."""
        with self._lock:
            before = self.storages.largest(page_size)
            reserved = 0 if before is None else self.pages_in_place_of(before, num_pages)
            cache, dropped = self.storages.lend(num_pages, page_size, self.split.num_layers, reserved)
            self._failed.clear()
            kept = len(self.graphs)
            self.graphs.forget(lambda key: any(key[0] is one for one in dropped))  # type: ignore[index]
            if len(self.graphs) < kept:
                tell("keys and values of %d tokens have other memory; recordings made again at their next use: %d",
                     max(num_pages, reserved) * page_size, kept - len(self.graphs))  # fmt: skip
            return cache

    def pages_in_place_of(self, cache: PagedCache, num_pages: int) -> int:
        """The pages of a cache that is to have at least `num_pages` in place of one that is too small: twice as many as
        that one where memory is free for them, so that a cache that grows seldom moves away from its recordings."""
        twice, device = 2 * cache.num_pages, self.split.device
        if not cache.num_pages < num_pages < twice:
            return num_pages
        size = twice * sum(one.nbytes // len(one) for pair in cache.storages for one in pair)
        is_free = device.type != "cuda" or size <= MAX_GROWTH_SHARE * torch.cuda.mem_get_info(device)[0]
        return twice if is_free else num_pages

    def refresh(self) -> None:
        """Drop all recordings if weights are in other memory than before, since recordings read the earlier memory.

        The weights move where `.data` is assigned, as by `model.cpu()` and then `model.cuda()`.
        """
        with self._lock:
            addresses = self._addresses_now()
            if addresses != self._addresses:
                self._addresses = addresses
                self.graphs.forget(lambda key: True)

    def _addresses_now(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]

    @torch.inference_mode()
    def prepare(self, cache: PagedCache, wanted: Sequence[tuple[int, Plan]]) -> None:
        """Record rounds before decoding, in order, within `START_SECONDS` and `START_BYTES`, and tell what it took.

        Args:
            wanted: numbers of rows, and plans for them.
        """
        storage = self.storages.of(cache)
        if storage is None:
            return
        begun, num_left, is_full = perf_counter(), 0, False
        recorded, num_bytes = self.graphs.num_recorded, self.graphs.num_bytes
        for num_rows, plan in wanted:
            if self.refused is not None:
                return
            key = self._round_key(num_rows, 1, max(plan.draft_lengths), storage.cache.capacity, plan)
            with self._lock:
                made = None if key is None else self._round(storage, key, plan)
                if made is None or made[0] in self.graphs or made[0] in self._failed:
                    continue
                is_late = self.split.agreed(perf_counter() - begun) > START_SECONDS
                if is_full or is_late or self.graphs.num_bytes - num_bytes > START_BYTES:
                    num_left += 1
                    continue
                try:
                    self.graphs.record(made[0], *made[1]())
                except torch.OutOfMemoryError:  # what was recorded so far is likelier than the rest
                    is_full, num_left = True, num_left + 1
                except CannotCapture as problem:
                    self._refuse(made[0], problem)
        if self.graphs.num_recorded > recorded:
            tell(
                "recorded rounds before decoding: %d recordings in %.1f s, %.0f MiB%s",
                self.graphs.num_recorded - recorded, perf_counter() - begun,
                (self.graphs.num_bytes - num_bytes) / (1 << 20),
                f"; {num_left} more at their first use" if num_left else "",
            )  # fmt: skip

    def _round(
        self, storage: Storage, key: RoundKey, plan: Plan
    ) -> tuple[tuple[Storage, RoundKey], Callable[[], tuple[RoundInputs, WholeRound]]]:
        """The key of a recorded round, and what makes its inputs, without rows, and its body."""
        part = self._part(plan.draft_vocab) if key.exit_layer else None
        whole = key._replace(vocab=0 if part is None else len(part.tokens))
        if self.split.exit_heads is not self._heads:  # recorded rounds read the previous heads
            self._heads = self.split.exit_heads
            self.graphs.forget(lambda key: True)

        def prepare() -> tuple[RoundInputs, WholeRound]:
            finals = None
            if self._heads is not None:
                size = whole.slots, hidden_size_of(self.split)
                finals = torch.zeros(size, dtype=self.split.hidden_dtype, device=self.split.device)
            inputs = RoundInputs(whole, storage.cache, self.split.device, part, finals)
            return inputs, WholeRound(self.split, storage.cache, self.kernels, inputs)

        return (storage, whole), prepare

    @torch.inference_mode()
    def begin(
        self,
        cache: PagedCache,
        rows: Sequence[RoundRow],
        plan: Plan,
        longest: int = 0,
        finals: Tensor | None = None,
    ) -> RecordedRounds | None:
        """Prepare rounds of a batch, of which none is launched; None if they cannot be run from a recording.

        Drafts that are longer than `limits` allows are cut.

        Args:
            plan: which layers draft (0 or None: all layers verify the rows' given drafts, which may be empty). Its
                draft lengths and stop rules are not read.
            longest: maximum number of drafted tokens of a row in these and later rounds, which then share a recording.
            finals: the rows' final states, see `executors.final_states.states_of`.
        """
        storage = self.storages.of(cache)
        if storage is None or self.refused is not None:
            return None
        longest, most = max(longest, *[row.drafts for row in rows]), max(row.content for row in rows)
        key = self._round_key(len(rows), most, longest, storage.cache.capacity, plan)
        if key is None:
            return None
        with self._lock:
            made = self._recorded(*self._round(storage, key, plan))
            if made is None:
                return None
            longest = key.width - 1
            rows = [row._replace(drafts=min(row.drafts, longest), given=row.given[:longest]) for row in rows]
            made.inputs.fill(rows, finals)
        left = key.most_tokens - most
        fitting = UNBOUNDED_ROUNDS if key.most_tokens == storage.cache.capacity else left // key.width
        return RecordedRounds(
            made.inputs, made.recording, self._lock, len(rows), plan.reads_confidence, max(1, fitting)
        )

    def with_recording(self, body: Body, use: Callable[[Recording], T]) -> T:
        """What `use` returns for a recording of `body`, which is dropped then. Other threads replay nothing meanwhile.

        Raises:
            CannotCapture: the body cannot be recorded.
        """
        with self._lock:
            return use(self.graphs.capture.record(body))

    def round(self, cache: PagedCache, rows: Sequence[RoundRow], plan: Plan) -> list[RowResult] | None:
        """Run one round of a batch and wait for it; see `begin`."""
        rounds = self.begin(cache, rows, plan)
        if rounds is None:
            return None
        rounds.launch()
        return rounds.take()

    def _part(self, size: int | None) -> HeldSubset | None:
        """The part of the vocabulary of this size, up to date; None: drafts are over the whole vocabulary."""
        subset = self.split.draft_subset(size)
        if subset is None:
            return None
        held = self._parts.get(len(subset.tokens))
        if held is None:
            held = self._parts[len(subset.tokens)] = HeldSubset(subset)
        held.take(subset)
        return held

    def _round_key(self, num_rows: int, most: int, longest: int, capacity: int, plan: Plan) -> RoundKey | None:
        """The key of a round, with the whole vocabulary; `most`: tokens of a row; `longest`: drafted ones of a row."""
        exit_layer, slots = plan.exit_layer or 0, round_up(num_rows, SLOTS)
        if slots is None:
            return None
        longest = min(longest, max(0, self.limits.draft_length(num_rows))) if num_rows <= self.max_rows else 0
        if longest <= 0:
            exit_layer = longest = 0
        # A place more costs little in verification, but a draft step reads the early layers.
        width = longest + 1 if exit_layer else round_up(longest + 1, WIDTHS)
        assert width is not None
        most_tokens = token_capacity(most + width - 1, capacity)
        has_states = width == 1 or plan.shadow is not None or plan.keep_divergence
        return RoundKey(exit_layer, width, slots, most_tokens, has_states)

    def _recorded(self, key: Any, prepare: Callable[[], tuple[RoundInputs, WholeRound]]) -> Recorded | None:
        """The recording of a key. It is made if there is none; None if that fails.

        Recording runs a round on its inputs, so that they must be filled again.
        """
        made = self.graphs.get(key)
        if made is not None or key in self._failed:
            return made
        for is_again in (False, True):
            try:
                return self.graphs.record(key, *prepare())
            except torch.OutOfMemoryError:
                if is_again:
                    _log.warning("no memory is left for a recording, so that rounds of its shape are decoded eagerly")
                    self._failed.add(key)
                    return None
            except CannotCapture as problem:
                self._refuse(key, problem)
                return None
            self.graphs.forget(lambda key: True)
        return None

    def _refuse(self, key: Any, problem: CannotCapture) -> None:
        """Decode eagerly what could not be recorded: its key; or everything, where nothing ever was recorded."""
        what = "a round of this shape" if self.graphs.num_recorded else "this model"
        _log.warning(
            "%s cannot be captured in graphs (%s: %s), so it is decoded eagerly, which is slower",
            what, problem.operation, problem.reason,
        )  # fmt: skip
        if self.graphs.num_recorded:
            self._failed.add(key)
        else:
            self.refused = problem.operation
