"""Self-check at load: recorded rounds must pick the same tokens as the eager layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.core import Plan
from selfspec.executors.cuda.rounds import RoundRow, RowResult
from selfspec.kernels.pick import num_accepted, scored
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.self_check import TOLERANCE
from selfspec.params import SamplingParams

NUM_DRAFTS = 2
LENGTHS = (11, 6)  # tokens of the prompts
PAGE = 64
CHURN = tuple(1 << power for power in range(9, 21))  # sizes of tensors allocated between two replays, in bytes
CASES = (((0.8, 1), (1.0, 2)), ((0.0, 0),))  # (temperature, seed) of each row: two sampled rows, one greedy row


class Expected(NamedTuple):
    """What the eager layers draft and pick for a row."""

    drafted: list[int]
    picks: list[int]
    drafts_clear: list[bool]  # whether rounding cannot swap the two highest scores
    picks_clear: list[bool]


@torch.inference_mode()
def round_problem(split: Any, runner: Any) -> str | None:
    """A description of what is wrong with a runner's recorded rounds; None if nothing is.

    The check drafts and verifies two sampled rows, then one greedy row: eagerly, from a new recording, and from the
    same recording after freed memory was allocated again. It compares no pick that rounding could change, and no token
    after such a pick. The rows that a round leaves, and a second round of them, are compared with those that come from
    the host: after drafts of the exit layer, and after given ones, of which a row keeps the first and another none.

    Args:
        split: a `selfspec.model.split_model.SplitModel`.
        runner: a `selfspec.executors.cuda.runner.Runner` of it.
    """
    exit_layer = max(1, split.num_layers // 4)
    plan = Plan(exit_layer, (NUM_DRAFTS,))
    rng = torch.Generator().manual_seed(0)
    for case in CASES:
        cache = runner.new_cache(len(case), PAGE)
        prompts = [torch.randint(0, split.vocab_size, (n,), generator=rng).tolist() for n in LENGTHS[: len(case)]]
        rows = [_row([i], prompt, *one) for i, (prompt, one) in enumerate(zip(prompts, case, strict=True))]
        expected = [_expected(split, cache, row, prompt, exit_layer) for row, prompt in zip(rows, prompts, strict=True)]
        kind = "two sampled rows" if len(case) > 1 else "a single row"
        allocated: list[Tensor] = []
        for when in ("when it was recorded", "when it was replayed"):
            done = runner.round(cache, rows, plan)
            if done is None:  # it cannot be recorded; the runner has logged that
                return None
            if not all(_agrees(one, wanted) for one, wanted in zip(done, expected, strict=True)):
                return f"a round of {kind} picks other tokens {when}"
            allocated += [torch.full((size,), 255, dtype=torch.uint8, device=split.device) for size in CHURN * 8]
        continued = [(rows, plan)]
        if len(case) > 1:
            given = [(one.picks[0] + at) % split.vocab_size for at, one in enumerate(expected)]
            drafts = [row._replace(given=(token, 0)) for row, token in zip(rows, given, strict=True)]
            continued += [(drafts, Plan(None, (NUM_DRAFTS,) * len(case)))]
        if not all(_continues(runner, cache, *one) for one in continued):
            return f"a second round of {kind} is not what it is with rows from the host"
    return None


def _continues(runner: Any, cache: PagedCache, rows: list[RoundRow], plan: Plan) -> bool:
    """Whether rows that the device advanced equal uploaded rows, and so do their rounds; tokens may be by chance."""
    rounds = runner.begin(cache, rows, plan)
    if rounds is None:
        return True
    rounds.launch()
    advanced = rounds.rows
    rounds.launch()
    first, second = rounds.take(), rounds.take()
    uploaded = [
        row._replace(content=row.content + one.kept, last=one.block[one.kept - 1], remaining=row.remaining - one.kept)
        for row, one in zip(rows, first, strict=True)
    ]
    again = runner.begin(cache, uploaded, plan)
    are_same = torch.equal(advanced, again.rows)
    again.launch()
    return are_same and second == again.take()


def _row(pages: list[int], prompt: list[int], temperature: float, seed: int) -> RoundRow:
    return RoundRow(
        pages, len(prompt), prompt[-1], remaining=NUM_DRAFTS + 2, eos=(), drafts=NUM_DRAFTS, given=(),
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed,
    )  # fmt: skip


def _expected(split: Any, cache: PagedCache, row: RoundRow, prompt: list[int], exit_layer: int) -> Expected:
    """Run the prompt without its last token, then draft and verify with the eager layers and torch's pick."""

    def layers(at: int, count: int, start: int, stop: int, given: Tensor) -> Tensor:
        rows = PackedRows(cache, [Span(row.pages, at, count)], split.device)
        hidden: Tensor = split.run(rows, start, stop, given)
        return hidden

    tokens = torch.tensor(prompt, device=split.device)
    held = len(prompt) - 1
    hidden = layers(0, held, 0, exit_layer, tokens[:-1])
    layers(0, held, exit_layer, split.num_layers, hidden)
    token, states = tokens[-1:], list[Tensor]()
    drafted, drafts_clear = list[int](), list[bool]()
    for step in range(NUM_DRAFTS + 1):
        states.append(layers(held + step, 1, 0, exit_layer, token))
        if step < NUM_DRAFTS:
            token, clear = _pick(split, split.logits(states[-1], exit_layer), row, held + step + 1)
            drafted += token.tolist()
            drafts_clear += clear
    last = layers(held, NUM_DRAFTS + 1, exit_layer, split.num_layers, torch.cat(states))
    picks, picks_clear = _pick(split, split.logits(last), row, held + 1)
    return Expected(drafted, picks.tolist(), drafts_clear, picks_clear)


def _pick(split: Any, logits: Tensor, row: RoundRow, position: int) -> tuple[Tensor, list[bool]]:
    """Picks `[N]` at positions from `position` on, and for each whether rounding cannot change it."""
    positions = position + torch.arange(len(logits), device=logits.device)
    filters = {"temperature": row.temperature, "top_k": row.top_k, "top_p": row.top_p, "min_p": row.min_p}
    params = SamplingParams(**filters, seed=row.seed)  # type: ignore[arg-type]
    scores = scored(logits, [params] * len(logits), positions)
    best = scores.topk(2).values
    tolerance = TOLERANCE.get(split.dtype, 0.2) * logits.std() / (row.temperature or 1.0)
    return scores.argmax(-1), (best[:, 0] - best[:, 1] > tolerance).tolist()


def _agrees(done: RowResult, wanted: Expected) -> bool:
    """Whether a recorded round agrees with the eager one up to the first pick that rounding could change."""
    for token, other, is_clear in zip(done.drafted, wanted.drafted, wanted.drafts_clear, strict=False):
        if token != other:
            return not is_clear
    if len(done.drafted) != len(wanted.drafted):
        return False
    for place, token in enumerate(done.block):
        if token != wanted.picks[place]:
            return not wanted.picks_clear[place]
    accepted = num_accepted(wanted.drafted, wanted.picks)
    return done.accepted == accepted == len(done.block) - 1 and done.kept == len(done.block)
