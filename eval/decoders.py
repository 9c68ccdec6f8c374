"""The methods that decode in this process: selfspec's policies, transformers' own `generate`, and llama.cpp."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from eval.answers import Failure, Method, Prompt, Skipped, Steps, Turn
from eval.llama_server import LlamaServer
from eval.methods import LLAMA_CPP, MethodName, check_exit_layer
from eval.models import gguf_file, open_peer, params_of, with_policy
from selfspec import LLM
from selfspec.core import RoundOutput, StageSeconds
from selfspec.model.gguf_blocks import Holding

STAGES = tuple(key.name for key in dataclasses.fields(StageSeconds) if not key.name.startswith("_"))


class Ours(Method):
    """A policy of selfspec. What it learns is kept from one question to the next, as between calls of the library.

    Tokens are streamed, so that the time to the first one is known.

    Args:
        llm: the opened model; acceptance statistics start empty.
        eos: tokens that end the output; empty: only the length does.
        limit: seconds per prompt, checked after every program of rounds.
        reuse_responses: draft from the answers to earlier questions, too.
    """

    def __init__(
        self,
        llm: LLM,
        method: MethodName,
        eos: frozenset[int],
        temperature: float,
        limit: float,
        reuse_responses: bool = False,
    ) -> None:
        settings, self.num_layers = method.settings, llm.target.split.num_layers
        check_exit_layer(method, settings.get("exit_layer"), self.num_layers)
        self.name, self.eos, self.limit = method.name, eos, limit
        self.temperature = temperature
        self.llm = with_policy(llm, reuse_responses=reuse_responses, **settings)
        self.llm.target.prior = None  # figures must not depend on earlier runs

    def forget(self) -> None:
        self.llm.target.responses.clear()

    def __call__(self, prompt: Prompt) -> Turn:
        params = params_of(prompt.max_new_tokens, self.temperature, prompt.seed, self.eos)
        steps, done, tokens = Steps(self.limit), list[RoundOutput](), list[int]()

        def on_round(round_: RoundOutput) -> None:
            done.append(round_)
            if round_.rows:
                steps.add(len(round_.rows[0].token_ids))

        for output in self.llm.stream([prompt.ids], params, on_round=on_round):
            (new,) = output.outputs
            tokens += new.token_ids
        seconds = perf_counter() - steps.start
        stages = {stage: sum(getattr(round_.seconds, stage) for round_ in done) for stage in STAGES}
        return Turn(
            tokens,
            seconds,
            accept_lengths=steps.sizes,
            step_seconds=split_by_round(steps.seconds, [round_ for round_ in done if round_.rows]),
            prefill_seconds=stages["prefill"],
            stage_seconds=stages,
            layer_passes=sum(layer_passes(round_, self.num_layers) for round_ in done),
            stats=new.stats,
        )


def layer_passes(round_: RoundOutput, num_layers: int) -> int:
    """Layers run one after another in a round of one row: all of them once, and the early ones per drafted token."""
    if round_.plan is None:
        return 0
    return num_layers + (round_.exit_layer or 0) * len(round_.rows[0].drafted)


def split_by_round(seconds: Sequence[float], done: Sequence[RoundOutput]) -> list[float]:
    """The seconds of every round.

    The rounds of a program are returned together, so only the program's time is known. It is divided among its rounds
    in proportion to the engine's own times.

    Args:
        seconds: between one round's return and the next, by the clock.
    """
    found, at = list(seconds), 0
    while at < len(done):
        end = at + 1
        while end < len(done) and done[end].round_index:
            end += 1
        own = [round_.seconds.total for round_ in done[at:end]]
        if sum(own) > 0:
            scale = sum(seconds[at:end]) / sum(own)
            found[at:end] = [scale * each for each in own]
        at = end
    return found


class Transformers(Method):
    """`generate` of a transformers model, plain or assisted, on the same weights as selfspec.

    Args:
        llm: the opened model; its tokenizer is for an assistant with another vocabulary.
        eos: tokens that end the output; empty: only the length does.
        limit: seconds per prompt, checked after every step.

    Raises:
        ValueError: the model does not have the exit layer.
        OSError, ValueError: the assistant cannot be opened.
    """

    def __init__(self, llm: LLM, method: MethodName, eos: frozenset[int], temperature: float, limit: float) -> None:
        self.name, self.kind, self.model = method.name, method.kind, llm.target.split.model
        self.eos, self.temperature, self.limit = sorted(eos), temperature, limit
        self.num_layers, self.device = llm.target.split.num_layers, llm.target.split.device
        self.options: dict[str, Any] = {}
        if method.kind == "early_exit":
            check_exit_layer(method, int(method.option), self.num_layers)
            self.options["assistant_early_exit"] = int(method.option)
        elif method.kind == "prompt_lookup":
            self.options["prompt_lookup_num_tokens"] = int(method.option)
        elif method.kind == "assistant":
            assistant, its_tokenizer = open_peer(method.option, llm)
            self.options["assistant_model"] = assistant
            if _vocab_size(assistant) != _vocab_size(self.model):  # drafts are then translated by way of text
                self.options.update(tokenizer=llm.tokenizer, assistant_tokenizer=its_tokenizer)

    def __call__(self, prompt: Prompt) -> Turn:
        ids = torch.tensor([prompt.ids], device=self.device)
        torch.manual_seed(prompt.seed)
        with Holding(self.model), neutral_generation_config(self.model) as config:  # a file's blocks as float32, once
            config.eos_token_id = self.eos or None
            if self.temperature > 0:
                config.do_sample, config.temperature, config.top_k, config.top_p = True, self.temperature, 0, 1.0
            steps = Steps(self.limit)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=_Streamer(steps),
                max_new_tokens=prompt.max_new_tokens,
                **self.options,
            )
            tokens = out[0, len(prompt.ids) :].tolist()
            seconds = perf_counter() - steps.start
        is_known = self.kind not in ("early_exit", "assistant")  # these do not report how many layers drafted
        passes = self.num_layers * len(steps.sizes) if is_known else None
        return Turn(tokens, seconds, accept_lengths=steps.sizes, step_seconds=steps.seconds, layer_passes=passes)


@contextmanager
def neutral_generation_config(model: Any) -> Iterator[Any]:
    """Give the model a greedy generation config without end-of-text tokens; restore its own afterwards.

    transformers lowers the config's `num_hidden_layers` while it drafts by early exit and does not restore it after an
    error; it is restored here too.
    """
    own, layers = model.generation_config, model.config.num_hidden_layers
    config = type(own)(use_cache=True, do_sample=False, pad_token_id=0)
    config.eos_token_id = None
    try:
        model.generation_config = config
        yield config
    finally:
        model.generation_config = own
        model.config.num_hidden_layers = layers


class _Streamer(BaseStreamer):
    """Adds the tokens of every step to `Steps`; the first call holds the prompt and is ignored."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.is_first = steps, True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_first:
            self.steps.add(value.numel())
        self.is_first = False

    def end(self) -> None:
        pass


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


class LlamaCpp(Method):
    """A llama.cpp server inside this process, through the package xllamacpp: greedy, on the same GGUF file.

    It multiplies the file's 4- or 8-bit blocks directly and rounds activations; selfspec computes with the float32
    numbers that the blocks stand for. So its tokens may differ from those of plain decoding.

    Args:
        model: the run's model; its GGUF file is used where the method's name has none.
        context: maximum tokens of a prompt with its answer.
        eos: tokens that end the output; empty: only the length does. llama.cpp stops at the model's own end-of-text
            token, which is recorded as the first of these.
        limit: seconds per prompt, checked after every token.

    Raises:
        Skipped: the package or the file is missing, or output is sampled.
    """

    def __init__(
        self, model: str, method: MethodName, context: int, eos: frozenset[int], temperature: float, limit: float
    ) -> None:
        self.name, self.eos, self.limit = method.name, sorted(eos), limit
        if temperature > 0:
            raise Skipped(f"{self.name} can only decode greedily here; set temperature to 0")
        if find_spec("xllamacpp") is None:
            raise Skipped(f"{self.name} needs the package xllamacpp: pip install xllamacpp")
        wanted = method.option or model
        path = gguf_file(wanted)
        if path is None:
            raise Skipped(f"{self.name} needs a GGUF file, and {wanted!r} is none; name one as {LLAMA_CPP}:FILE")
        try:
            self.server = LlamaServer(path, context, torch.get_num_threads())
        except Exception as problem:  # the run can do without this method, whatever the error
            raise Skipped(f"llama.cpp cannot open {path}: {' '.join(str(problem).split())}") from problem

    def __call__(self, prompt: Prompt) -> Turn:
        steps, tokens, reply = Steps(self.limit), list[int](), dict[str, Any]()
        try:
            for reply in self.server.complete(prompt.ids, prompt.max_new_tokens, not self.eos, self.limit):
                if reply.get("tokens"):
                    tokens += reply["tokens"]
                    steps.add(len(reply["tokens"]))
        except TimeoutError:
            raise Failure("timeout", f"no token within {self.limit:g} s", perf_counter() - steps.start) from None
        seconds = perf_counter() - steps.start
        if not reply.get("stop"):
            raise Failure("error", f"llama.cpp ended without an answer: {json.dumps(reply)[:200]}", seconds)
        if reply.get("stop_type") == "eos" and self.eos and tokens[-1:] != self.eos[:1]:
            tokens.append(self.eos[0])
            steps.add(1)
        return Turn(tokens, seconds, accept_lengths=steps.sizes, step_seconds=steps.seconds)

    def close(self) -> None:
        del self.server
