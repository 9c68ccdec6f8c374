"""The executors that tests run, the requests that all of them decode, and what plain decoding makes of those."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from selfspec.control.plan import Policy
from selfspec.core import Request, RoundOutput
from selfspec.decoding import engine as engine_module
from selfspec.decoding.engine import LLMEngine
from selfspec.decoding.outputs import CompletionOutput
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.datastore_build import build as build_datastore
from selfspec.drafting.responses import Responses
from selfspec.executors.logit_rules import with_logit_rules
from selfspec.executors.select import executors_for
from selfspec.loading.target import Target
from selfspec.params import SamplingParams
from selfspec.structured.outputs import StructuredOutputs
from tests import helpers
from tests.cuda.standin import with_runner
from tests.helpers import Adversary, Run, make_prompts
from tests.models import build
from tests.slow import slow
from tests.structured.grammars import tools_of
from tests.tokenizers import byte_tokenizer

# On views; compiled; and recordings, on the stand-in for a device, of views and of fused layers.
EXECUTORS = ("eager", "cpu", "cuda", "fused")
RECORDED = ("cuda", "fused")
# What recordings run does not matter to an engine.
every_executor = pytest.mark.parametrize("kind", [slow(kind) if kind == "fused" else kind for kind in EXECUTORS])
# The stand-in takes ten times as long, and what the engine does with rounds is the same.
most_executors = pytest.mark.parametrize("kind", [slow(kind) if kind in RECORDED else kind for kind in EXECUTORS])
BYTES = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
)
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.1, "frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"frequency_penalty": -0.6, "no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 1},
)
PAGE = 16
LENGTHS = (9, 1, 20, 4, 13, 2, 7, 30)
NUM_REQUESTS = 2 * len(LENGTHS)  # the second half has penalties and log-probabilities
BIASED: dict[int, dict[str, Any]] = {
    9: {"logit_bias": {65: 7.0, 66: 8.0, 67: -100.0}},
    12: {"logit_bias": {10: 100.0}, "min_tokens": 9, "stop_token_ids": (10,)},
}
STRUCTURED = {  # some of those with penalties that exclude no token
    10: tools_of("required", "mistral_args"),
    11: StructuredOutputs(json={"enum": ["one and two", "one and three"]}),
    15: StructuredOutputs(grammar='start: ("a" /[b-p ]{1,4}/ "stop. ")+'),
}


@cache
def target(kind: str) -> Target:
    """A model of bytes, whose output may be ended by any text; shared, so nothing may change it."""
    return new_target(kind)


def new_target(kind: str, **options: Any) -> Target:
    made = Target(
        build("llama", **BYTES), byte_tokenizer(), backend="compiled" if kind == "cpu" else "views", **options
    )
    if kind in RECORDED:
        return with_runner(made, packing="copy" if kind == "fused" else None)
    return made


@contextmanager
def only_eager() -> Iterator[None]:
    """Engines that are made meanwhile have the eager executor alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "executors_for", lambda *given: executors_for(*given)[-1:])
        yield


def engine_of(kind: str, policy: Policy | str = "plain", made: Target | None = None, **options: Any) -> LLMEngine:
    """An engine whose plans that executor runs, where it serves them."""
    settings = {"max_num_seqs": 4, "max_num_cached_tokens": 512, "page_size": PAGE, "max_step_seconds": 60.0, **options}
    return helpers.engine_of(target(kind) if made is None else made, policy, **settings)


def alone(kind: str, request: Request) -> CompletionOutput:
    """What plain decoding of one request makes of it, by the eager executor on the same layers."""
    with only_eager():
        run = Run(engine_of(kind))
    run.add(request)
    return run.finish().outputs[0]


@cache
def plain(kind: str, at: int) -> tuple[Request, CompletionOutput]:
    """A request and its plain output: prompts that repeat themselves; ends, penalties and log-probabilities."""
    more: dict[str, Any] = {}
    if at >= len(LENGTHS):
        more = {**PENALTIES[at % len(PENALTIES)], "logprobs": at % 4, "structured_outputs": STRUCTURED.get(at)}
        more |= BIASED.get(at, {})
    at %= len(LENGTHS)
    [prompt] = make_prompts([LENGTHS[at]], seed=at)
    params = SamplingParams(max_tokens=12 + 5 * at, seed=at, **SAMPLINGS[at // 2 % 4], **more)
    request = with_logit_rules(Request(prompt * 2 if at % 3 == 0 else prompt, params))
    params = request.params
    assert (len(request.prompt_token_ids) + request.max_tokens - 1) % PAGE, "a fault may fill a page more than it has"
    free, middle = alone(kind, request), 6 + 3 * at
    if at % 4 == 1:  # ends with a text that appears in the midst of it
        request = replace(request, params=replace(params, stop=free.text[len(free.text) // 2 :][:2]))
    elif at % 4 == 2:
        most = len(request.prompt_token_ids) + middle
        request = replace(request, stopping_criteria=(lambda ids, scores: ids.shape[1] >= most,))
    elif at % 4 == 3:
        request = replace(request, eos_token_ids=frozenset(free.token_ids[middle : middle + 1]))
    return request, alone(kind, request)


def assert_same(output: CompletionOutput, wanted: CompletionOutput) -> None:
    """Tokens, text, end and log-probabilities; those of views are rounded otherwise in another batch."""
    assert (output.token_ids, output.text) == (wanted.token_ids, wanted.text)
    assert (output.finish_reason, output.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert (output.logprobs is None) == (wanted.logprobs is None)
    for own, other in zip(output.logprobs or (), wanted.logprobs or (), strict=True):
        assert own.keys() == other.keys()
        assert [one.logprob for one in own.values()] == pytest.approx([one.logprob for one in other.values()], abs=1e-4)


def some_corpus(folder: Path) -> Datastore:
    """Documents that hold much of what is decoded, and more."""
    path, dice = folder / "corpus.store", random.Random(0)
    done = [plain("eager", at) for at in range(len(LENGTHS))]
    texts = [[*request.prompt_token_ids, *output.token_ids] for request, output in done]
    noise = [[dice.randrange(257) for _ in range(30)] for _ in range(9)]
    build_datastore(path, [text[i : i + 12] for text in texts for i in range(0, len(text), 9)] + noise, "", 257)
    return Datastore.open(path)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return some_corpus(tmp_path_factory.mktemp("corpus"))


def some_responses(kind: str) -> Responses:
    """Responses to some of the requests, one of them with wrong tokens."""
    responses = Responses(2000)
    for at in (3, 7, 11):
        request, done = plain(kind, at)
        responses.add(request.prompt_token_ids, done.token_ids)
    request, done = plain(kind, 5)
    responses.add(request.prompt_token_ids, [*done.token_ids[:5], 1, 2, *done.token_ids[7:]])
    return responses


def programs(seed: int, kind: str = "", **options: Any) -> Adversary:
    """Random plans of up to 40 rounds, few of which ask for what the eager executor alone has.

    Args:
        kind: where it is recorded, two thirds of the plans are simple, since each shape of a round is recorded.
    """
    most, simple = random.Random(seed).choice([2, 6, 40]), 2 / 3 if kind in RECORDED else 0.0
    return Adversary(seed, 4, **{"most_rounds": most, "eager": 0.15, "longest": 9, "simple": simple, **options})


def rounds_by_plan(rounds: list[RoundOutput]) -> list[list[RoundOutput]]:
    """Without rounds that decoded nothing."""
    made: list[list[RoundOutput]] = []
    for round_ in rounds:
        if round_.plan is None:
            continue
        if round_.round_index == 0:
            made.append([])
        assert round_.round_index == len(made[-1])
        made[-1].append(round_)
    return made
