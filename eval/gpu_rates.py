"""What `python -m eval gpu` measures of one target: rates, busy time, prompts, first tokens, and the device's speed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eval.measurement import no_garbage_collection, rates, synchronize, timed
from eval.models import params_of
from eval.synthetic import Synthetic, random_prompts
from selfspec import LLM
from selfspec.core import Plan, RoundOutput
from selfspec.decoding.engine import LLMEngine
from selfspec.executors.cuda.body_choice import replay_seconds
from selfspec.executors.cuda.device_work import current, fastest
from selfspec.executors.cuda.fused_body import FusedBody, Products
from selfspec.executors.cuda.rounds import RoundRow, StaticRows
from selfspec.executors.cuda.skinny_body import SkinnyBody, unserved
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.model.split_model import SplitModel

TEMPERATURE = 0.5  # of all rows but those of peers: the acceptance of greedy outputs differs from the set one by 0.1
PAGE = 256  # tokens; the memory of a row is a multiple of it, as any attention backend needs
WARM_ROUNDS, REPLAYS, PREFILL_REPEATS = 4, 12, 3
CHAIN = 1000  # tiny kernels
HELD = 1024  # tokens of a row to which attention is timed
Record = dict[str, Any]


@dataclass(slots=True)
class Counts:
    """What the measured steps of an engine did."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens of all rows
    rounds: int = 0
    judged: int = 0  # drafted tokens up to the first wrong one
    accepted: int = 0
    held: float = 0.0  # tokens of a row, summed over rounds
    plans: Counter[str] = field(default_factory=Counter)  # rounds by exit layer

    def add(self, seconds: float, rounds: Sequence[RoundOutput], context: float) -> float:
        """Add a step whose rows hold `context` tokens at first; returns how many they hold then."""
        tokens = 0
        for round_ in rounds:
            self.held += context
            context += sum(len(row.token_ids) for row in round_.rows) / len(round_.rows)
            tokens += sum(len(row.token_ids) for row in round_.rows)
            self.judged += sum(row.num_judged for row in round_.rows)
            self.accepted += sum(row.num_accepted for row in round_.rows)
            self.plans["plain" if round_.exit_layer is None else str(round_.exit_layer)] += 1
        self.rounds += len(rounds)
        self.steps.append((seconds, tokens))
        return context

    def as_dict(self) -> Record:
        acceptance = self.accepted / self.judged if self.judged else None
        about = {"acceptance": acceptance, "mean_context": self.held / self.rounds, "plans": dict(self.plans)}
        return {**rates(self.steps), "rounds": self.rounds, **about}


class Rows:
    """Rows of random prompts in an engine, which begin again where they end.

    Args:
        clock: seconds.
    """

    def __init__(
        self, llm: LLM, batch: int, context: int, new_tokens: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        share = -(-(context + new_tokens) // PAGE) * PAGE
        self.engine: LLMEngine = llm.engine(
            max_num_seqs=batch, max_num_cached_tokens=batch * share, prefill_chunk=batch * context
        )
        self.prompts = random_prompts(llm.target.split.vocab_size, batch, context, seed=3)
        self.device, self.context, self.new_tokens, self.clock = llm.target.split.device, context, new_tokens, clock
        self.num_begun = 0

    def full_steps(self) -> Iterator[tuple[float, list[RoundOutput], float]]:
        """Endless steps in which all rows decode and no prompt is read: seconds, rounds, tokens that a row held."""
        while True:
            for at, prompt in enumerate(self.prompts):
                params = params_of(self.new_tokens, TEMPERATURE, seed=self.num_begun)
                self.engine.add_request(str(at), prompt, params)
                self.num_begun += 1
            held, is_full = float(self.context), False
            while self.engine.has_unfinished_requests():
                rounds, begun = list[RoundOutput](), self.clock()
                is_ended = any(output.finished for output in self.engine.step(rounds.append))
                synchronize(self.device)
                seconds = self.clock() - begun
                if is_full:
                    yield seconds, rounds, held
                is_full = all(len(one.rows) == len(self.prompts) for one in rounds)
                held += sum(len(row.token_ids) for one in rounds for row in one.rows) / len(self.prompts)
                if is_ended:
                    break
            self.stop()

    def stop(self) -> None:
        """End all rows."""
        for at in range(len(self.prompts)):
            self.engine.abort(str(at))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def rate(self, warm: float, window: float) -> Record:
        """Tokens per second over at least `window` seconds of steps, after `warm` seconds and a few rounds."""
        done, start, num_rounds = Counts(), self.clock(), 0
        with no_garbage_collection():
            for seconds, rounds, held in self.full_steps():
                num_rounds += len(rounds)
                if done.rounds or (self.clock() - start >= warm and num_rounds > WARM_ROUNDS):
                    done.add(seconds, rounds, held)
                    if sum(seconds for seconds, _ in done.steps) >= window:
                        return done.as_dict()
        raise AssertionError("steps do not end")


def replayed(rows: Rows) -> Record:
    """Seconds of a round on the device, the gaps between its kernels included, from replays of its recording; and the
    host's seconds of launching one. The rows have ended; their pages are written.

    Raises:
        ValueError: rounds of the policy are not recorded.
    """
    engine, count = rows.engine, len(rows.prompts)
    split, cache, runner = engine.split, engine.cache, engine.split.runner
    plan = (engine.policy.likely(count) or [Plan(None, (0,) * count)])[-1]
    longest, pages = max(plan.draft_lengths), cache.num_pages // count
    free = pages * cache.page_size - rows.context
    given = [
        RoundRow(range(i * pages, (i + 1) * pages), rows.context, 0, free, (), longest, (), TEMPERATURE, 0, 1.0, 0.0, i)
        for i in range(count)
    ]
    rounds = None if runner is None else runner.begin(cache, given, plan, longest)
    if rounds is None:
        raise ValueError("these rounds are not recorded")
    recording, hosts = rounds.recording, list[float]()
    replays = max(1, min(REPLAYS, free // (longest + 1) // (1 + PREFILL_REPEATS)))  # rows must not end

    def launched() -> None:
        begun = perf_counter()
        for _ in range(replays):
            recording.replay()
        hosts.append((perf_counter() - begun) / replays)

    with torch.inference_mode(), current(split.device):
        seconds = fastest(launched, PREFILL_REPEATS, split.device) / replays
    return {"busy_seconds": seconds, "launch_seconds": min(hosts)}


def prefill_rate(llm: LLM, context: int) -> Record:
    """Tokens per second of reading a prompt and writing a token, and of transformers' forward as `generate` makes it;
    the medians of the repeats, after one that is not counted."""
    split, found, seconds = llm.target.split, list[float](), list[float]()
    ids = torch.tensor(random_prompts(split.vocab_size, 1, context, seed=5), device=split.device)

    def by_transformers() -> None:
        with torch.inference_mode():
            split.model(ids, use_cache=True, logits_to_keep=1)

    engine = llm.engine(max_num_seqs=1, max_num_cached_tokens=(context // PAGE + 2) * PAGE, prefill_chunk=context)
    for _ in range(PREFILL_REPEATS + 1):
        engine.add_request("prompt", ids[0].tolist(), params_of(1))
        found.append(timed(engine.step, split.device)[1])
        seconds.append(timed(by_transformers, split.device)[1])
    own, theirs = (statistics.median(each[1:]) for each in (found, seconds))
    return {"tokens_per_second": context / own, "hf_tokens_per_second": context / theirs}


def first_token(llm: LLM, caching: LLM, context: int) -> Record:
    """Seconds until a prompt's first token by a whole call, and with the prompt's keys and values kept from before; the
    medians of the repeats, after one that is not counted."""
    [ids], found = random_prompts(llm.target.split.vocab_size, 1, context, seed=7), list[float]()
    for one in (llm, caching):
        taken = [
            timed(lambda one=one: one.generate([ids], params_of(1)), llm.target.split.device)[1]  # type: ignore[misc]
            for _ in range(PREFILL_REPEATS + 1)
        ]
        found.append(statistics.median(taken[1:]))
    speed = {"tokens_per_second": context / found[0]}
    return {**speed, "first_token_seconds": found[0], "first_token_seconds_cached": found[1]}


def recordings_of(llm: LLM) -> dict[str, float]:
    """Recordings made so far, the seconds that they took, and the MiB of those that are kept."""
    runner = llm.target.split.runner
    if runner is None:
        return {"recordings": 0, "recording_seconds": 0.0, "recording_mib": 0.0}
    graphs = runner.graphs
    made = {"recordings": graphs.num_recorded, "recording_seconds": graphs.seconds}
    return {**made, "recording_mib": graphs.num_bytes / (1 << 20)}


def layers_of(split: SplitModel) -> str:
    """What runs the layers of a target when it decodes."""
    if split.runner is None:
        return "not recorded"
    body = split.recorded
    return f"recorded, {body} (weights: {body.packing})" if isinstance(body, FusedBody) else "recorded, the model's own"


def launches(split: SplitModel, counts: Sequence[int] = (1, 5, 32, 160)) -> dict[str, dict[str, float]]:
    """Microseconds of each launch of a fused layer alone, by tokens of a call: means over all layers, whose weights do
    not fit into the device's cache together. Rotation and attention are timed together, of rows of 1,024 tokens with a
    new one each. After "five:" are those of a layer in five launches, where a call has no more tokens than they take,
    whether they are used or not. Under "chain": of one of a thousand tiny kernels, each of which reads what
    the one before wrote.

    Raises:
        ValueError: the layers are not recorded, or by the model's own modules.
    """
    runner, body = split.runner, split.recorded
    if runner is None or not isinstance(body, FusedBody):
        raise ValueError("launches are timed of fused layers in recordings, which do not run here")
    found, kernels = dict[str, dict[str, float]](), runner.kernels
    norm, activation = body.weights.layers[0].norm, body.weights.activation

    def micros(work: Callable[[int], Tensor]) -> float:
        """Of one launch, by a recording of one for each layer."""

        def seconds(recording: Any) -> float:
            return replay_seconds(recording, split.device)

        return (
            1e6 * runner.with_recording(lambda: (*map(work, range(split.num_layers)),)[-1:], seconds) / split.num_layers
        )

    def chain() -> tuple[Tensor]:
        for _ in range(CHAIN):
            tiny.add_(1)
        return (tiny,)

    with torch.inference_mode():
        tiny = torch.zeros(1, device=split.device)
        seconds = runner.with_recording(chain, lambda made: replay_seconds(made, split.device))
        found["chain"] = {"add": 1e6 * seconds / CHAIN}
        for count in counts:
            hidden = torch.randn(count, split.config.hidden_size, device=split.device).to(split.dtype)
            own = found[str(count)] = {"add_norm": micros(lambda at, x=hidden: kernels.add_norm(x, x, norm)[0])}
            for name, *linears in zip(Products._fields, *body.products, strict=True):
                size = linears[0].linears[0].weight.shape[1]
                x = torch.randn(count, size, device=split.device).to(split.dtype)
                own[name] = micros(lambda at, x=x, linears=linears: body.product(linears[at], x))
                if name == "gate_up":
                    wide = body.product(linears[0], x)
                    own["gate"] = micros(lambda at, wide=wide: kernels.gate(wide, activation))
            if count <= SKINNY_ROWS and not unserved(body):
                own |= {name: micros(work) for name, work in five_launches(split, body, hidden).items()}
    return found


def five_launches(split: SplitModel, body: FusedBody, hidden: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """The launches of a layer that takes five, by its index; and rotation and attention as one that takes ten has them.

    Args:
        hidden: `[N, hidden_size]`, of N rows with a new token each.
    """
    runner, five = split.runner, SkinnyBody(body)
    assert runner is not None
    kernels, products = runner.kernels, body.products
    cache = runner.new_cache(len(hidden), HELD)
    spans = [Span([row], HELD - 1, 1) for row in range(len(hidden))]
    rows = StaticRows(cache, layout_of(PackedRows(cache, spans, split.device)), kernels)
    squares = kernels.squares_of(hidden)
    qkv, gated = five.qkv(0, hidden, squares), five.gated(0, hidden, squares)
    attended = five.rotate_attend(rows, 0, qkv)

    def attention_and_product(at: int, prefetches: bool) -> Tensor:
        if prefetches:
            five.prefetch(at)
        out = five.add(products[at].o, five.rotate_attend(rows, at, qkv), hidden)[0]
        if prefetches and at == split.num_layers - 1:
            five.side.join()
        return out

    return {
        "rotate, attend": lambda at: five.attention(rows, at, qkv),
        "five: norm, qkv": lambda at: five.qkv(at, hidden, squares),
        "five: rotate, attend": lambda at: five.rotate_attend(rows, at, qkv),
        "five: o, add": lambda at: five.add(products[at].o, attended, hidden)[0],
        "five: rotate, attend; o, add": lambda at: attention_and_product(at, False),
        "five: rotate, attend; o, add; prefetch": lambda at: attention_and_product(at, True),
        "five: norm, gate, up": lambda at: five.gated(at, hidden, squares),
        "five: down, add": lambda at: five.add(products[at].down, gated, hidden)[0],
    }


def device_speed(where: torch.device, num_bytes: int = 1 << 30, repeats: int = 8) -> dict[str, float]:
    """`copy_bytes_per_second`, read and written bytes of a large copy; `read_bytes_per_second`, of the largest number
    in it, which is the ceiling of decoding. The best of the repeats."""
    source = torch.zeros(num_bytes if where.type == "cuda" else num_bytes >> 4, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), where)[1] for _ in range(repeats))
    found = {"copy_bytes_per_second": 2 * source.nbytes / seconds}
    numbers = source.view(torch.int32)
    read = min(timed(numbers.amax, where)[1] for _ in range(repeats))
    found["read_bytes_per_second"] = source.nbytes / read
    return found


def sizes_of(target: Synthetic) -> dict[str, float]:
    """Bytes that a token's forward reads, those of the head among them, those of the head's rows for the default draft
    vocabulary, and those of a token's keys and values."""
    model, config = target.split.model, target.split.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * embedding.element_size()
    unread = 0 if head is embedding else embedding.nbytes  # only one row of an embedding is read
    drafts = (target.split.default_draft_vocab or len(head)) * head[0].nbytes
    read = sum(p.nbytes for p in model.parameters()) - unread
    return {"read_bytes": read, "head_bytes": head.nbytes, "draft_head_bytes": drafts, "kv_bytes_per_token": kv}
