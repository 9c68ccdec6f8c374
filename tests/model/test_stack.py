"""The opened model: every run of layers and the head at every layer are the model's own, for every family."""

from __future__ import annotations

import copy

import pytest
import torch

from selfspec.errors import UnsupportedModelError
from selfspec.executors.cpu.install import choose
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import LLAMA_SHAPED
from selfspec.model.self_check import TOLERANCE, self_check, split_error
from selfspec.model.stack import Stack
from tests.helpers import Schedule, audit_cache, decode, generate, make_prompts
from tests.models import FAMILIES, build, tiny
from tests.slow import KINDS, slow
from tests.target import Target

LLAMAS = ["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma3_text"]


def run_in_parts(stack, prompts, cuts):
    """Hidden states after each cut, from prompts packed end to end."""
    cache = PagedCache(len(prompts), 64)
    rows = PackedRows(cache, [Span([i], 0, len(prompt)) for i, prompt in enumerate(prompts)])
    hidden, out = torch.tensor([token for prompt in prompts for token in prompt]), {}
    for start, stop in zip((0, *cuts[:-1]), cuts, strict=True):
        hidden = out[stop] = stack.run(rows, start, stop, hidden)
    return out


BODIES = [(family, "views") if family in KINDS else slow(family, "views") for family in FAMILIES]
BODIES += [(family, "compiled") for family in LLAMAS]


def stack_of(family, engine):
    stack = Stack(build(family))
    choose(stack, engine)
    assert stack.engine == engine
    return stack


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


@pytest.mark.parametrize(("family", "engine"), BODIES)
@torch.inference_mode()
def test_logits_after_any_layer_are_those_of_the_model_cut_there(family, engine):
    stack, prompts = stack_of(family, engine), make_prompts([11, 4])
    expected = {n: whole_logits(with_layers(stack.model, stack.family, n), prompts) for n in (1, 2, 3, 4)}
    assert torch.equal(expected[4], whole_logits(stack.model, prompts))
    for cuts in ((1, 2, 3, 4), (2, 4), (4,), (3, 4)):
        for layer, hidden in run_in_parts(stack, prompts, cuts).items():
            got = stack.logits(hidden, layer)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected[layer], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "engine"), BODIES)
@torch.inference_mode()
def test_taps_see_the_hidden_states_at_which_a_run_might_have_stopped(family, engine):
    stack, prompts = stack_of(family, engine), make_prompts([11, 4])
    for start, tapped in ((0, (1, 2, 3)), (0, (2,)), (1, (2, 3)), (2, (3,)), (3, ())):
        cache = PagedCache(2, 64)
        rows = PackedRows(cache, [Span([i], 0, len(prompt)) for i, prompt in enumerate(prompts)])
        given = torch.tensor([token for prompt in prompts for token in prompt])
        if start:
            given = stack.run(rows, 0, start, given)
        taps = dict.fromkeys(tapped)
        end = stack.run(rows, start, 4, given, taps)
        assert taps.keys() == set(tapped)
        for layer, seen in taps.items():
            expected = run_in_parts(stack, prompts, (layer, 4))
            torch.testing.assert_close(seen, expected[layer], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(end, expected[4], rtol=1e-4, atol=1e-5)
    stack.run(rows, 0, 4, torch.tensor([token for prompt in prompts for token in prompt]))
    assert taps == {}, "a run that asks for nothing is given nothing"


@pytest.mark.parametrize(("family", "engine"), BODIES)
@torch.inference_mode()
def test_logits_of_a_shortlist_are_those_of_the_whole_vocabulary(family, engine):
    stack, prompts = stack_of(family, engine), make_prompts([11, 4])
    runs = [run_in_parts(stack, prompts, (layer, 4))[layer] for layer in (1, 2, 3)]
    hidden, generator = torch.stack(runs), torch.Generator().manual_seed(0)
    for width in (1, 7):
        top = torch.randint(stack.vocab_size, (15, width), generator=generator)
        got = stack.short_logits(hidden, top, (1, 2, 3))
        assert got is not None, "every family in the tests has a plain linear head"
        assert (got.shape, got.dtype) == ((3, 15, width + len(stack.others)), torch.float32)
        wanted = torch.cat((top, stack.others.expand(15, -1)), 1)
        for layer, (states, logits) in enumerate(zip(hidden, got, strict=True), 1):
            torch.testing.assert_close(logits, stack.logits(states, layer).gather(1, wanted), rtol=1e-4, atol=1e-5)


def test_a_head_that_is_no_plain_linear_layer_has_no_shortlist():
    model = build("llama")
    model.lm_head = type("Mine", (torch.nn.Linear,), {})(32, 96, bias=False)
    stack = Stack(model)
    assert stack.short_logits(torch.zeros(2, 3, 32), torch.zeros(3, 4, dtype=torch.int64), (1, 2)) is None


@pytest.mark.parametrize("engine", ["compiled", "views"])
@pytest.mark.parametrize("family", LLAMAS)
def test_the_compiled_engine_and_the_views_decode_the_same_tokens(family, engine):
    target, prompts = Target(build(family), engine=engine), make_prompts([12, 7, 1, 20], seed=1)
    done = decode(target, prompts, Schedule(0, 4), lambda e: audit_cache(e, target.model), max_new_tokens=16)
    assert [c.tokens for c in done] == [generate(target.model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_scaled_rotary_positions_are_the_models_own(rope, engine):
    extra = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
    extra |= {"yarn": {"original_max_position_embeddings": 32}, "default": {}, "linear": {}}
    rope_parameters = {"rope_type": rope, "rope_theta": 10000.0, **extra[rope]}
    if rope != "default":
        rope_parameters["factor"] = 4.0
    target = Target(build("llama", rope_parameters=rope_parameters), engine=engine)
    prompts = make_prompts([40, 7])
    done = decode(target, prompts, Schedule(0, 4), lambda e: audit_cache(e, target.model), max_new_tokens=16)
    assert [c.tokens for c in done] == [generate(target.model, prompt, 16) for prompt in prompts]


def test_a_context_longer_than_the_first_rotary_table_is_read():
    target = Target(build("llama", max_position_embeddings=1200))
    [prompt] = make_prompts([1010])
    for length in (510, 1010):
        [done] = target.generate([prompt[:length]], exit_layer=2, max_new_tokens=20)
        assert done.tokens == generate(target.model, prompt[:length], 20)


@pytest.mark.parametrize("engine", ["compiled", "views"])
@pytest.mark.parametrize("window", [3, 64, 2000])
def test_windows_and_rotary_angles_by_layer_are_the_models_own(window, engine):
    """Windows shorter and longer than the context, and angles of each kind of layers beyond the first table."""
    angles = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    }
    shape = {"sliding_window": window, "rope_parameters": angles, "max_position_embeddings": 1200}
    target, [prompt] = Target(build("gemma3_text", **shape), engine=engine), make_prompts([600])
    for length in (20, 600):
        [done] = decode(target, [prompt[:length]], Schedule(0, 4), max_new_tokens=16)
        assert done.tokens == generate(target.model, prompt[:length], 16)


@pytest.mark.parametrize(
    ("family", "rope_parameters", "limit"),
    [
        ("llama", None, 128),
        ("gpt2", None, 128),
        ("opt", None, 128),
        (
            "llama",
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
            64,
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_the_context_is_as_long_as_positions_reach_without_rescaling(family, rope_parameters, limit):
    more = {} if rope_parameters is None else {"rope_parameters": rope_parameters}
    if family == "phi3" and more:
        more["original_max_position_embeddings"] = 32
    stack = Stack(build(family, **more))
    assert stack.context_limit == limit


@pytest.mark.parametrize("page_size", [5, 64])
@pytest.mark.parametrize("chunk", [4, 9])
def test_llama4_attends_within_chunks_much_shorter_than_the_text(chunk, page_size):
    """Judged by the model's own forward over the whole text, token by token."""
    target = Target(build("llama4_text", attention_chunk_size=chunk))
    prompts = make_prompts([3, 26, 9])
    audit = lambda engine: audit_cache(engine, target.model)  # noqa: E731
    done = decode(target, prompts, Schedule(1, 4), audit, {"page_size": page_size}, max_new_tokens=20)
    for prompt, completion in zip(prompts, done, strict=True):
        text = list(prompt)
        for token in completion.tokens:
            with torch.inference_mode():
                logits = target.model(torch.tensor([text]), use_cache=False).logits[0, -1]
            assert logits.argmax() == token
            text.append(token)
    wide = Target(build("llama4_text"))
    assert [c.tokens for c in decode(wide, prompts, "plain", max_new_tokens=20)] != [c.tokens for c in done]


def test_a_sliding_window_shorter_than_the_prompt_matters():
    """The families with windows are tested with windows of 5: here is that such a window changes the tokens."""
    [prompt] = make_prompts([24])
    narrow, wide = (generate(build("mistral", sliding_window=w), prompt, 16) for w in (5, 100))
    assert narrow != wide
    assert Target(build("mistral", sliding_window=100)).generate([prompt], max_new_tokens=16)[0].tokens == wide


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("falcon", {}, "^falcon: .*; decode it with transformers' own generate"),
        (
            "qwen3_next",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
            r"^qwen3_next: its layers keep linear_attention, which cannot be rolled back .*; decode it with",
        ),
        ("mamba", {"state_size": 4}, r"^mamba: .*; decode it with transformers' own generate\(\)$"),
        ("llama", {"num_hidden_layers": 1}, "^llama: a model must have at least 2 layers, got 1$"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_name_in_one_sentence(family, options, sentence):
    with pytest.raises(UnsupportedModelError, match=sentence) as refusal:
        Target(build(family, attn="eager", **options))
    assert "\n" not in str(refusal.value)


def test_the_self_check_refuses_a_split_that_disagrees_with_the_whole(monkeypatch):
    stack = Stack(build("gemma2"))
    assert split_error(stack) < TOLERANCE[torch.float32] / 10
    run = Stack.run
    monkeypatch.setattr(Stack, "run", lambda self, rows, start, stop, given: run(self, rows, start, stop, given) * 1.01)
    with pytest.raises(
        UnsupportedModelError, match=r"^gemma2: run in two parts, its logits differ .* by 0\.\d+ standard"
    ):
        self_check(stack)


def test_the_self_check_refuses_a_split_that_raises(monkeypatch):
    def broken(self, rows, start, stop, given):
        raise RuntimeError("no such kernel")

    stack = Stack(build("gemma2"))
    monkeypatch.setattr(Stack, "run", broken)
    sentence = r"^gemma2: its layers cannot be run in two parts \(RuntimeError: no such kernel\); decode it with"
    with pytest.raises(UnsupportedModelError, match=sentence):
        self_check(stack)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_pass_the_self_check_and_decode(family, dtype):
    target = Target(build(family).to(dtype))
    assert target.split_error <= TOLERANCE[dtype]
    [done] = target.generate(make_prompts([5]), exit_layer=2, max_new_tokens=8)
    assert len(done.tokens) == 8
    if dtype == torch.float64:
        assert done.tokens == generate(target.model, make_prompts([5])[0], 8)


def test_only_plain_models_of_the_llama_shape_are_compiled():
    assert {type(tiny(family).model).__name__ for family in LLAMAS} == LLAMA_SHAPED
    assert {family for family in FAMILIES if tiny(family).stack.llama is not None} == set(LLAMAS)


@pytest.mark.parametrize(
    "options",
    [
        {"attn_logit_softcapping": 5.0},
        {"final_logit_softcapping": 5.0},
        {"use_bidirectional_attention": True},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
    ],
)
def test_options_of_gemma_that_compiled_layers_lack_are_left_to_the_views(options):
    assert Stack(build("gemma3_text")).llama is not None
    assert Stack(build("gemma3_text", **options)).llama is None


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def of_another_activation(model):
    model.model.layers[2].mlp.act_fn = type("Mine", (torch.nn.Module,), {"forward": lambda self, x: x.relu()})()


def of_another_scale(model):
    model.model.layers[2].self_attn.scaling *= 1.5


def of_scattered_weights(model):
    weight = model.model.layers[2].self_attn.o_proj.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("change", [hooked, of_another_activation, of_another_scale, of_scattered_weights])
def test_what_a_llamas_weights_do_not_say_is_left_to_the_views(change):
    model, [prompt] = build("llama"), make_prompts([9])
    change(model)
    target = Target(model)
    assert target.engine == "views"
    assert target.generate([prompt], exit_layer=2, max_new_tokens=12)[0].tokens == generate(model, prompt, 12)
