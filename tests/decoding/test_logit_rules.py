"""`logit_bias` and `min_tokens`: a plain loop's tokens on every executor, whatever the plan."""

from __future__ import annotations

import torch

from selfspec.kernels.pick import scored
from selfspec.params import SamplingParams
from tests.executors.requests import RECORDED, engine_of, every_executor, programs, target
from tests.helpers import Run, make_prompts
from tests.tokenizers import byte_tokenizer

BIAS = {65: 9.0, 66: 8.5, 67: -100.0, 256: 3.0}
WAYS = [
    {"logit_bias": BIAS},
    {"logit_bias": BIAS, "temperature": 1.0, "top_p": 0.9, "seed": 3, "presence_penalty": 1.0},
    {"logit_bias": {256: 100.0}, "min_tokens": 7},
    {"logit_bias": {256: 100.0}, "min_tokens": 4, "temperature": 0.9, "seed": 5},
    {"logit_bias": {66: 100.0}, "min_tokens": 3, "stop_token_ids": [66], "ignore_eos": True},
    {"logit_bias": BIAS, "temperature": 0.7, "seed": 8, "repetition_penalty": 1.4, "frequency_penalty": -0.5},
]
NEW = 12


@torch.inference_mode()
def plain_loop(model, prompt, params):
    """Whole forwards; the rules as their laws are written."""
    output, ends = [], {*([] if params.ignore_eos else [256]), *(params.stop_token_ids or ())}
    for _ in range(NEW):
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        if params.repetition_penalty is not None:
            seen = sorted({*prompt, *output})
            logits[seen] *= torch.where(logits[seen] < 0, params.repetition_penalty, 1 / params.repetition_penalty)
        for token in set(output):
            logits[token] -= (params.presence_penalty or 0) + output.count(token) * (params.frequency_penalty or 0)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        for token in ends if len(output) < params.min_tokens else ():
            logits[token] = -torch.inf
        at = torch.tensor([len(prompt) + len(output)])
        output.append(int(scored(logits[None], [params], at).argmax()))
        if output[-1] in ends:
            break
    return output


@every_executor
def test_every_executor_keeps_the_rules_whatever_the_plan(kind):
    prompts = make_prompts([9, 4, 13, 7, 1, 6])
    ways = [SamplingParams(max_tokens=NEW, **way) for way in WAYS]
    wanted = [plain_loop(target(kind).model, *pair) for pair in zip(prompts, ways, strict=True)]
    assert [len(one) for one in wanted[2:5]] == [8, 5, 4] and 67 not in wanted[0]
    for seed in (0,) if kind in RECORDED else (0, 1):
        run = Run(engine_of(kind, programs(seed, kind)))
        names = [run.add(*pair) for pair in zip(prompts, ways, strict=True)]
        beside = run.add(prompts[0], SamplingParams(max_tokens=20))
        run.finish()
        assert [run.output(name).token_ids for name in names] == wanted
        alone = Run(engine_of(kind))
        name = alone.add(prompts[0], SamplingParams(max_tokens=20))
        alone.finish()
        assert run.output(beside).token_ids == alone.output(name).token_ids


def test_no_stop_text_ends_an_output_before_min_tokens():
    """The bias makes it write one letter for ever."""
    engine = engine_of("eager")
    for way, text in (
        ({"stop": "bb"}, ""),
        ({"stop": "bb", "min_tokens": 5}, "bbbb"),
        ({"stop": "bb", "include_stop_str_in_output": True}, "bb"),
        ({"stop": "bb", "include_stop_str_in_output": True, "min_tokens": 5}, "bbbbbb"),
    ):
        run = Run(engine)
        name = run.add(make_prompts([3])[0], SamplingParams(max_tokens=9, logit_bias={65: 100}, **way))
        run.finish()
        assert run.output(name).text == text and run.output(name).finish_reason == "stop"


def test_special_tokens_are_text_where_asked():
    run = Run(engine_of("eager"))
    ways = [SamplingParams(max_tokens=3, logit_bias={256: 100}, skip_special_tokens=skip) for skip in (True, False)]
    names = [run.add(make_prompts([3])[0], way) for way in ways]
    run.finish()
    assert [run.output(name).text for name in names] == ["", byte_tokenizer().eos_token]
