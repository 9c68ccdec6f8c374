"""The prompts of a workload as token ids, and the model's answers to them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from selfspec.control.plan import Plain
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.decoding.engine import PAGE_SIZE, LLMEngine
from selfspec.errors import got, whole
from selfspec.learning.written import Sample, Task, Written
from selfspec.loading.target import Target
from selfspec.params import SamplingParams

if TYPE_CHECKING:
    from selfspec.llm import LLM

LEAST_PROMPTS = 8  # different ones
MOST_HELD_OUT = 30  # prompts to measure with; at most a quarter of all
TEMPERATURES = (0.0, 0.7, 1.0)  # of the first answer to each prompt, of the second and the third
BATCH = 16  # answers that are written together
Given = str | Sequence[Any] | Mapping[str, Any]


def split_prompts(
    llm: LLM, prompts: Sequence[Given], max_tokens: int, seed: int, held_out: Sequence[Given] | None = None
) -> tuple[list[Task], list[Task]]:
    """Different prompts in random order: those to learn from, and held-out ones, as greedy tasks.

    Args:
        prompts, held_out: see `LLM.tune`.

    Raises:
        ValueError: there are too few, one has another form, or one is too long.
    """
    found = dict.fromkeys(_task(llm, at, given, max_tokens) for at, given in enumerate(prompts, 1))
    if len(found) < LEAST_PROMPTS:
        raise ValueError(f"prompts must be at least {LEAST_PROMPTS} different ones, got {len(found)}; give more")
    tasks = list(found)
    random.Random(seed).shuffle(tasks)
    if held_out is not None:
        apart = list(dict.fromkeys(_task(llm, at, given, max_tokens) for at, given in enumerate(held_out, 1)))
        if not apart:
            raise ValueError("held_out must be at least one prompt, or None")
        return [task for task in tasks if task not in set(apart)], apart
    count = min(MOST_HELD_OUT, len(tasks) // 4)
    return tasks[count:], tasks[:count]


def _task(llm: LLM, number: int, given: Given, max_tokens: int) -> Task:
    body = given if isinstance(given, Mapping) else {}
    content = body.get("messages", body.get("prompt_token_ids", body.get("prompt"))) if body else given
    tokenizer = llm.tokenizer
    if isinstance(content, str) and content and tokenizer is not None:
        if not body and getattr(tokenizer, "chat_template", None):
            ids = llm.chat_prompt([{"role": "user", "content": content}])
        else:
            ids = [int(token) for token in tokenizer(content)["input_ids"]]
    elif isinstance(content, str) and content:
        raise ValueError("prompts are texts but the model has no tokenizer; give token ids")
    elif isinstance(content, list | tuple) and content and all(isinstance(one, Mapping) for one in content):
        ids = llm.chat_prompt(content)
    elif isinstance(content, list | tuple) and content:
        ids = [whole(f"prompt {number}: a token id", token, 0) for token in content]
    else:
        raise ValueError(
            f"prompt {number} must be a text, token ids, messages, or a body with prompt or messages, {got(given)}"
        )
    most = body.get("max_tokens") or body.get("max_completion_tokens") or max_tokens
    count, room = whole(f"prompt {number}: max_tokens", most, 1), llm.target.split.context_limit - len(ids)
    if room < 1:
        raise ValueError(f"prompt {number} has {len(ids)} tokens, and the model's context holds {room + len(ids)}")
    return Task(tuple(ids), min(count, room), 0.0, 0)


def rounds_of(tasks: Sequence[Task], seed: int) -> Iterator[list[Task]]:
    """Batches of tasks: every prompt once at each of the temperatures, one temperature after another."""
    for number, temperature in enumerate(TEMPERATURES):
        own = [task._replace(temperature=temperature, seed=seed + number) for task in tasks]
        yield from (own[at : at + BATCH] for at in range(0, len(own), BATCH))


def answer(target: Target, tasks: Sequence[Task], written: Written) -> list[Sample]:
    """The model's answers to tasks by plain decoding, without those that are empty.

    Answers are added to `written`; what is there is not written again.
    """
    missing = written.missing(tasks)
    if missing:
        for task, tokens in write(target, missing):
            written.add(task, tokens)
    outputs = [(list(task.prompt), written.get(task)) for task in tasks]
    return [Sample(prompt + output, len(prompt)) for prompt, output in outputs if output]


def write(target: Target, tasks: Sequence[Task], ends: Sequence[int] = ()) -> Iterator[tuple[Task, list[int]]]:
    """Continue tasks together by plain decoding; outputs have the model's own distribution, which no generation config
    changes.

    Args:
        ends: tokens that end an output, which has them, besides the model's own.
    """
    split = target.refresh()
    longest = min(max(len(task.prompt) + task.limit for task in tasks), split.context_limit)
    pages: dict[str, Any] = {"max_num_cached_tokens": len(tasks) * (longest + -longest % PAGE_SIZE)}
    defaults = GenerationDefaults(split.model, target.tokenizer)
    engine = LLMEngine(split, Plain(), defaults, max_num_seqs=len(tasks), final_only=True, **pages)
    try:
        for at, (prompt, count, temperature, seed) in enumerate(tasks):
            params = SamplingParams(
                max_tokens=count, temperature=temperature, seed=seed, stop_token_ids=[*ends], generation_config=False
            )
            engine.add_request(str(at), list(prompt), params)
        while engine.has_unfinished_requests():
            yield from [(tasks[int(done.request_id)], done.outputs[0].token_ids) for done in engine.step()]
    finally:
        engine.close()
