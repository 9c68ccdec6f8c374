"""Opening models and decoding with them. Other modules of eval/ use the library through this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from eval.config import Common
from selfspec import hub
from selfspec.calibrate.measure import measure
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState, Shadow
from selfspec.decoding.engine import page_size_of
from selfspec.decoding.policy_choice import policy_for
from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round
from selfspec.drafting.responses import Responses
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.target import WHOLE_BURST, Target

Ids = Sequence[Sequence[int]]  # prompts, as token ids


def open_target(model: Any, config: Common | None = None, **options: Any) -> Target:
    """Open a model with the device, dtype and number of threads of a configuration.

    Args:
        model: a name, or a transformers model, which is not copied.
        config: None for a transformers model.
        options: other arguments of `selfspec.hub.open_target`.

    Raises:
        ValueError, OSError, UnsupportedModelError: see `selfspec.hub.open_target`.
    """
    logging.set_verbosity_error()  # no warnings about transformers' own assisted generation
    if config is None:
        return hub.open_target(model, **options)
    if config.threads:
        torch.set_num_threads(config.threads)
    return hub.open_target(model, device=config.device or None, dtype=config.dtype, **options)


class Endless(Target):
    """A target whose output depends only on the call: it ignores the model's generation config and decodes no text.

    It shares the model and views of the target that it is made from, and has acceptance statistics and responses of its
    own.

    Args:
        eos: tokens that end the output; empty: only the length does.
        costs: cost table for all batch sizes; None: the user's own table, measured where it is missing.
    """

    def __init__(self, target: Target, eos: frozenset[int] = frozenset(), costs: Costs | None = None) -> None:
        vars(self).update(vars(target))
        self.remembered, self.tokenizer, self.responses = target.remembered.copy(), None, Responses()
        self._eos, self._known_costs = eos, costs

    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs:
        return super().costs(batch_size, exact) if self._known_costs is None or exact else self._known_costs

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def stored(self) -> None:
        return None


def open_model(model: torch.nn.Module) -> Endless:
    """A target around a transformers model."""
    return Endless(hub.open_target(model))


def measured_costs(
    target: Target, batch_sizes: Sequence[int], repeats: int, within: float | None = None, **options: Any
) -> Costs:
    """Measure the cost table; every piece of a round is timed up to `repeats` times and at least once.

    Args:
        within: seconds after which no repeat begins; None: no limit.
        options: other arguments of `selfspec.calibrate.measure.measure`.
    """
    return measure(target.stack, batch_sizes, repeats, within=within, **options)


def rounds(
    target: Endless,
    prompts: Ids,
    max_new_tokens: int | Sequence[int],
    *,
    policy: str | Policy = "plain",
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    drafts: Sequence[str] | None = None,
    temperature: float = 0.0,
    seeds: int | Sequence[int] = 0,
    max_batch_size: int | None = None,
    **options: Any,
) -> Iterator[Round]:
    """Continue prompts and yield every round. Programs are as long as those of `generate`.

    Args:
        max_new_tokens, seeds: one number for all prompts, or one per prompt.
        max_batch_size: rows decoded together; default: all.
        options: other arguments of `Target.rounds`, such as `exact` or `datastore`.
    """
    params = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seeds}
    return target.rounds(
        target.requests(prompts, params),
        policy=policy,
        exit_layer=exit_layer,
        num_draft_tokens=num_draft_tokens,
        drafts=drafts,
        max_batch_size=max_batch_size or len(prompts),
        **{"burst": WHOLE_BURST, **options},
    )


def decode(target: Endless, prompts: Ids, max_new_tokens: int | Sequence[int], **options: Any) -> list[Completion]:
    """The completions of the prompts, in their order; arguments as for `rounds`."""
    return _completions(rounds(target, prompts, max_new_tokens, **options))


def complete(
    target: Target, prompts: Ids, max_new_tokens: int, *, policy: str, max_batch_size: int, **options: Any
) -> list[str]:
    """The texts that continue the prompts, up to the first stop string.

    Args:
        options: `exit_layer`, `num_draft_tokens` and `drafts` of the policy, and sampling parameters: `stop`,
            `temperature`, `top_k`, `top_p`, `min_p`.
    """
    drafting = {name: options.pop(name, None) for name in ("exit_layer", "num_draft_tokens", "drafts")}
    requests = target.requests(prompts, {"max_new_tokens": max_new_tokens, "generation_config": False, **options})
    batch: dict[str, Any] = {"policy": policy, "max_batch_size": max_batch_size, "burst": WHOLE_BURST}
    return [completion.text for completion in _completions(target.rounds(requests, **batch, **drafting))]


def _completions(coming: Iterator[Round]) -> list[Completion]:
    """The completions of all rounds, by request id."""
    done = [row.completion for round_ in coming for row in round_.rows if row.completion is not None]
    return sorted(done, key=lambda each: each.request_id)


def all_logits(target: Target, ids: Tensor) -> Tensor:
    """The split model's logits `[rows, length, vocab]` after ids `[rows, length]`."""
    stack, (num_rows, length) = target.stack, ids.shape
    page = length + -length % page_size_of(stack)
    with torch.inference_mode():
        cache = stack.new_cache(num_rows, page)
        rows = PackedRows(cache, [Span([i], 0, length) for i in range(num_rows)], stack.device)
        hidden = stack.run(rows, 0, stack.num_layers, ids.to(stack.device).flatten())
        return stack.logits(hidden).view(num_rows, length, -1)


class FirstRoundAlone(Policy):
    """A policy whose first program of every row has one round, so that the time to first token can be measured.

    It can be used for several calls. An adaptive policy keeps what it has learned, as between calls of the library;
    other policies are made again.

    Args:
        settings: `policy`, `exit_layer`, `num_draft_tokens` and `drafts`, as for `rounds`.
    """

    def __init__(self, target: Endless, **settings: Any) -> None:
        self.target, self.settings = target, settings
        self.inner: Policy | None = None
        self.lengths: tuple[int, ...] = ()

    def begin(self, prompts: Ids) -> FirstRoundAlone:
        """Prepare for a call with these prompts; returns this policy."""
        self.lengths = tuple(len(prompt) for prompt in prompts)
        if isinstance(self.inner, Adaptive):
            self.inner.forget_rows()
        else:
            self.inner = policy_for(self.target, **self.settings)
        return self

    def plan(self, rows: Sequence[RowState]) -> Plan:
        plan = self._inner.plan(rows)
        is_first = any(row.content_length == self.lengths[row.request_id] for row in rows)
        return replace(plan, num_rounds=1) if is_first else plan

    @property
    def _inner(self) -> Policy:
        assert self.inner is not None, "call begin first"
        return self.inner

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        self._inner.observe(plan, rounds)

    def seed_layers(self, row: RowState) -> Sequence[int]:
        return self._inner.seed_layers(row)

    def seed(self, row: RowState, shadow: Shadow) -> None:
        self._inner.seed(row, shadow)

    def set_vocabulary(self, vocabulary: Any) -> None:
        self._inner.set_vocabulary(vocabulary)

    def set_copies(self, has_copies: bool) -> None:
        self._inner.set_copies(has_copies)


def open_peer(model: str, target: Target) -> tuple[Any, Any]:
    """Open a second transformers model and its tokenizer, on the target's device and in its dtype."""
    return hub.open_model(model, dtype=str(target.stack.dtype).removeprefix("torch."), device=target.stack.device)


def gguf_file(model: str) -> Path | None:
    """The GGUF file of a model's name; None where it has none."""
    if model != "smollm2" and not model.endswith(hub.GGUF):
        return None
    try:
        return Path(hub.find(model)[0])
    except OSError:
        return None
