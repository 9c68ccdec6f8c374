"""Models whose own forward changes their logits: every head that replaces it gives the same logits, or is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM

from selfspec import SamplingParams
from selfspec.errors import UnsupportedModelError
from selfspec.model.self_check import difference
from tests.helpers import Adversary, decode, generate, make_prompts, tokens_of
from tests.models import SMALL, build
from tests.target import Target

LOWEST = torch.finfo(torch.float32).min
BANNED = [7, 20, 61, 62, 90]  # some within any part of the vocabulary, some beyond


def changing(base, change):
    """A subclass of a model whose forward passes its logits `[..., vocab]` through `change`."""

    class Changed(base):
        def forward(self, *args, **given):
            out = super().forward(*args, **given)
            out.logits = change(out.logits.clone())
            return out

    return Changed


def masked(logits, value=LOWEST):
    logits[..., BANNED] = value
    return logits


CHANGES = {
    "ids are masked by the lowest number": masked,
    "ids are masked by minus infinity": lambda logits: masked(logits, -torch.inf),
    "ids are masked by minus ten thousand": lambda logits: masked(logits, -1e4),
    "most ids are masked": lambda logits: logits.index_fill(-1, torch.arange(30, 96), LOWEST),
    "logits are multiplied": lambda logits: logits * 0.37,
    "logits are capped": lambda logits: 20 * torch.tanh(logits / 20),
    "a bias is added per id": lambda logits: logits + torch.linspace(-4, 4, logits.shape[-1]),
    "probabilities are normalised": lambda logits: logits.log_softmax(-1),
    "ids change places": lambda logits: logits.roll(11, -1),
}


def changed(name, base=LlamaForCausalLM, family="llama", **overrides):
    """A tiny model of such a subclass, with the weights of `tests.models.build`."""
    plain = build(family, **overrides)
    model = changing(base, CHANGES[name])(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    return model


class OverParts(Adversary):
    """Throws dice for drafts over a part of the vocabulary too."""

    def plan(self, rows):
        plan = super().plan(rows)
        return replace(plan, draft_vocab=self.dice.choice([None, 12, 48])) if plan.exit_layer else plan


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_forward_does_to_logits_tokens_are_generates_and_no_head_differs(name):
    model, prompts = changed(name), make_prompts([12, 7])
    target = Target(model)
    assert target.backend == "views"
    expected = [generate(model, prompt, 16) for prompt in prompts]
    assert tokens_of(decode(target, prompts, OverParts(0, 4), SamplingParams(max_tokens=16))) == expected
    with torch.inference_mode():
        check_partial_logits(target.split, is_by_value=name in ("logits are multiplied", "logits are capped"))


def check_partial_logits(split, is_by_value):
    """Logits over a part of the vocabulary are the model's own; only a change that asks for no id has them."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 32, generator=generator)
    wanted = split.logits(hidden, 2)
    top = torch.stack([torch.randperm(96, generator=generator)[:32] for _ in hidden])
    short = split.short_logits(hidden[None], top)
    if short is not None:
        torch.testing.assert_close(short[0, :, :32], wanted.gather(1, top), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(short[0, :, 32:], wanted[:, split.others], rtol=1e-4, atol=1e-4)
    subset = split.draft_subset(20)
    if subset is not None:
        drafted = split.subset_logits(hidden, 2, subset)
        torch.testing.assert_close(drafted, wanted[:, subset.tokens], rtol=1e-4, atol=1e-4)
    assert (short is not None, subset is not None) == (is_by_value, is_by_value)


def test_a_larger_vocabulary_is_adaptives_default_too():
    model, [prompt] = changed("a bias is added per id", Qwen3ForCausalLM, "qwen3", vocab_size=256), make_prompts([9])
    [done] = Target(model).generate([prompt], max_tokens=24)
    assert done.token_ids == generate(model, prompt, 24)


def test_a_faster_body_is_not_taken_for_a_known_class_whose_forward_was_replaced(monkeypatch):
    model, [prompt] = build("llama"), make_prompts([9])
    unchanged = generate(model, prompt, 12)
    first = LlamaForCausalLM.forward

    def forward(self, *args, **given):
        out = first(self, *args, **given)
        out.logits[..., unchanged[0]] = LOWEST
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    target = Target(model)
    assert target.backend == "views"
    expected = generate(model, prompt, 12)
    assert target.generate([prompt], max_tokens=12)[0].token_ids == expected != unchanged


def test_a_head_that_depends_on_how_many_tokens_share_a_call_is_refused():
    only_prompts = changing(LlamaForCausalLM, lambda logits: masked(logits) if logits.shape[1] > 1 else logits)
    model = only_prompts(AutoConfig.for_model("llama", **SMALL)).eval()
    with pytest.raises(UnsupportedModelError, match="differ from the whole model's"):
        Target(model)


def test_a_split_that_is_wrong_beside_a_mask_is_found():
    wanted = masked(torch.randn(4, 96, generator=torch.Generator().manual_seed(0)))
    got = wanted.clone()
    assert difference(got, wanted).tolist() == [0, 0, 0, 0]
    got[1, 3] += 0.5
    got[2, BANNED[0]] = 0.0
    got[3, 5] = LOWEST
    assert [bool(error > 0.1) for error in difference(got, wanted)] == [False, True, True, True]


def test_lookup_drafts_what_a_mask_forbids_and_it_is_refused():
    model = changed("ids are masked by the lowest number")
    prompt = [5, 7, 6, 5, 7, 6, 5, 7, 6, 5, 7, 6, 5]
    target = Target(model)
    [done] = target.generate([prompt], max_tokens=16, drafters=["lookup"])
    assert done.token_ids == generate(model, prompt, 16) and not set(done.token_ids) & set(BANNED)


def test_a_forward_that_looks_at_tokens_as_well_is_refused():
    class NeverTwice(LlamaForCausalLM):
        def forward(self, input_ids=None, **given):
            out = super().forward(input_ids=input_ids, **given)
            out.logits = out.logits.scatter(-1, input_ids[..., None], LOWEST)
            return out

    with pytest.raises(UnsupportedModelError, match=r"cannot be run in two parts .* transformers' own generate"):
        Target(NeverTwice(AutoConfig.for_model("llama", **SMALL)).eval())
