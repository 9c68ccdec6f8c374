"""Every family in one test: split at any layer it is the model itself, decodes as `generate`, and is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from selfspec import SamplingParams
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from tests.helpers import Always, Schedule, audit_cache, decode, generate, make_prompts, tokens_of
from tests.models import FAMILIES, build, rounded
from tests.slow import KINDS, slow
from tests.target import Target

LLAMAS = ["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma3_text"]
RAGGED = (12, 7, 1, 20)
BODIES = [(family, "views") if family in KINDS else slow(family, "views") for family in FAMILIES]
BODIES += [(family, engine) for family in LLAMAS for engine in ("compiled", "compiled in half the memory")]


@pytest.mark.parametrize(("family", "engine"), BODIES)
def test_a_family_is_split_decoded_and_left_as_it_was(family, engine):
    model = build(family) if engine != "compiled in half the memory" else rounded(build(family))
    before = photograph(model)
    target = Target(model, backend=engine.split()[0])
    assert target.backend == engine.split()[0]
    with torch.inference_mode():
        check_layers(target.split)
        check_taps(target.split)
        check_shortlists(target.split)
    check_tokens(target)
    check_untouched(before, model)


def run_in_parts(split, prompts, cuts):
    """Hidden states after each cut, from prompts packed end to end."""
    cache = PagedCache(len(prompts), 64)
    rows = PackedRows(cache, [Span([i], 0, len(prompt)) for i, prompt in enumerate(prompts)])
    hidden, out = torch.tensor([token for prompt in prompts for token in prompt]), {}
    for start, stop in zip((0, *cuts[:-1]), cuts, strict=True):
        hidden = out[stop] = split.run(rows, start, stop, hidden)
    return out


def whole_logits(model, prompts):
    return torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])


def with_layers(model, family, count):
    """An independent early-exit model: the whole one with all but its first layers cut away, and its final norm."""
    cut = copy.deepcopy(model)
    base = cut
    for name in family.base.split("."):
        base = getattr(base, name)
    setattr(base, family.layers, torch.nn.ModuleList(list(getattr(base, family.layers))[:count]))
    cut.config.num_hidden_layers = count
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = cut.config.layer_types[:count]
    return cut


def check_layers(split):
    """Logits after any layer are those of the model cut there."""
    prompts = make_prompts([11, 4])
    expected = {n: whole_logits(with_layers(split.model, split.family, n), prompts) for n in (1, 2, 3, 4)}
    assert torch.equal(expected[4], whole_logits(split.model, prompts))
    for cuts in ((1, 2, 3, 4), (2, 4), (4,), (3, 4)):
        for layer, hidden in run_in_parts(split, prompts, cuts).items():
            got = split.logits(hidden, layer)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected[layer], rtol=1e-3, atol=1e-4)


def check_taps(split):
    """Taps hold the hidden states at which a run might have stopped."""
    prompts = make_prompts([11, 4])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    for start, tapped in ((0, (1, 2, 3)), (1, (2, 3)), (3, ())):
        rows = PackedRows(PagedCache(2, 64), [Span([i], 0, len(prompt)) for i, prompt in enumerate(prompts)])
        given = split.run(rows, 0, start, tokens) if start else tokens
        taps = dict.fromkeys(tapped)
        end = split.run(rows, start, 4, given, taps)
        assert taps.keys() == set(tapped)
        for layer, seen in taps.items():
            expected = run_in_parts(split, prompts, (layer, 4))
            torch.testing.assert_close(seen, expected[layer], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(end, expected[4], rtol=1e-4, atol=1e-5)
    split.run(rows, 0, 4, tokens)
    assert taps == {}, "a run that asks for nothing is given nothing"


def check_shortlists(split):
    """Logits of a shortlist are those of the whole vocabulary."""
    runs = [run_in_parts(split, make_prompts([11, 4]), (layer, 4))[layer] for layer in (1, 2, 3)]
    hidden, generator = torch.stack(runs), torch.Generator().manual_seed(0)
    for width in (1, 7):
        top = torch.randint(split.vocab_size, (15, width), generator=generator)
        got = split.short_logits(hidden, top)
        assert got is not None, "every family in the tests has a plain linear head"
        assert (got.shape, got.dtype) == ((3, 15, width + len(split.others)), torch.float32)
        wanted = torch.cat((top, split.others.expand(15, -1)), 1)
        for layer, (states, logits) in enumerate(zip(hidden, got, strict=True), 1):
            torch.testing.assert_close(logits, split.logits(states, layer).gather(1, wanted), rtol=1e-4, atol=1e-5)


def check_tokens(target):
    """Any drafts leave greedy and sampled tokens as they are, and a round that fails leaves the target usable."""
    model, prompts = target.model, make_prompts(RAGGED, seed=1)
    done = decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=12), audit=audit_cache)
    assert tokens_of(done) == [generate(model, prompt, 12) for prompt in prompts]

    def fails(input_ids, scores):
        raise RuntimeError("in the middle of a round")

    with pytest.raises(RuntimeError, match="in the middle"):
        decode(target, prompts, Always(2, 3), SamplingParams(max_tokens=4, logits_processors=fails))
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    drafted, plain = (decode(target, prompts, policy, sampled) for policy in (Schedule(1, 4), "plain"))
    assert tokens_of(drafted) == tokens_of(plain)


# ------------------------------------------------------------------------------------------------- the user's model


def photograph(model):
    """All there is to a model: weights, buffers, configs, modes, attributes, hooks."""
    modules = {
        name: (id(module), type(module), module.training, sorted(vars(module)), _plain_values(module))
        for name, module in model.named_modules()
    }
    tensors = {name: (id(t), t._version, t.requires_grad, t.clone()) for name, t in _tensors(model)}
    config = model.config
    return modules, tensors, copy.deepcopy(config.to_dict()), config._attn_implementation, torch.get_rng_state()


def _tensors(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _plain_values(module):
    kinds = (int, float, str, bool, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


def check_untouched(before, model):
    """The model is bit for bit the same, set up as it was, and torch's generator stands where it stood."""
    modules, tensors, config, attn, rng = photograph(model)
    assert modules == before[0]
    assert tensors.keys() == before[1].keys()
    for name, (number, version, grad, values) in tensors.items():
        old = before[1][name]
        assert (number, version, grad) == old[:3], name
        assert torch.equal(values, old[3]), name
    assert (config, attn) == before[2:4]
    assert torch.equal(rng, before[4])
