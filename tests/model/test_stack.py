"""The opened model: heads, rotary angles, windows, chunks and precisions, and the models that are refused."""

from __future__ import annotations

import pytest
import torch

from selfspec import SamplingParams
from selfspec.errors import UnsupportedModelError
from selfspec.model.llama_weights import LLAMA_SHAPED
from selfspec.model.self_check import TOLERANCE, self_check, split_error
from selfspec.model.split_model import SplitModel
from tests.helpers import Schedule, audit_cache, decode, generate, make_prompts, tokens_of
from tests.model.test_families import LLAMAS
from tests.models import FAMILIES, build
from tests.target import Target


def test_a_head_that_is_no_plain_linear_layer_has_no_shortlist():
    model = build("llama")
    model.lm_head = type("Mine", (torch.nn.Linear,), {})(32, 96, bias=False)
    split = SplitModel(model)
    assert split.short_logits(torch.zeros(2, 3, 32), torch.zeros(3, 4, dtype=torch.int64)) is None


@pytest.mark.parametrize(
    ("rope", "engine"), [("linear", "compiled"), ("llama3", "compiled"), ("yarn", "compiled"), ("yarn", "views")]
)
def test_scaled_rotary_positions_are_the_models_own(rope, engine):
    extra = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
    extra |= {"yarn": {"original_max_position_embeddings": 32}, "linear": {}}
    rope_parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, **extra[rope]}
    target = Target(build("llama", rope_parameters=rope_parameters), backend=engine)
    prompts = make_prompts([40, 7])
    done = decode(target, prompts, Schedule(0, 4), SamplingParams(max_tokens=16), audit=audit_cache)
    assert tokens_of(done) == [generate(target.model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize(("window", "engine"), [(3, "compiled"), (64, "compiled"), (2000, "compiled"), (64, "views")])
def test_windows_and_rotary_angles_by_layer_are_the_models_own(window, engine):
    """Windows shorter and longer than the context, and angles of each kind of layers beyond the first table."""
    angles = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    }
    shape = {"sliding_window": window, "rope_parameters": angles, "max_position_embeddings": 1200}
    target, [prompt] = Target(build("gemma3_text", **shape), backend=engine), make_prompts([600])
    for length in (20, 600):
        [done] = decode(target, [prompt[:length]], Schedule(0, 4), SamplingParams(max_tokens=16))
        assert done.token_ids == generate(target.model, prompt[:length], 16)


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
    split = SplitModel(build(family, **more))
    assert split.context_limit == limit


@pytest.mark.parametrize(("chunk", "page_size"), [(4, 64), (9, 5)])
def test_llama4_attends_within_chunks_much_shorter_than_the_text(chunk, page_size):
    """Judged by the model's own forward over the whole text, token by token."""
    target = Target(build("llama4_text", attention_chunk_size=chunk))
    prompts = make_prompts([3, 26, 9])
    done = decode(
        target, prompts, Schedule(1, 4), SamplingParams(max_tokens=20), audit=audit_cache, page_size=page_size
    )
    for prompt, completion in zip(prompts, done, strict=True):
        text = list(prompt)
        for token in completion.token_ids:
            with torch.inference_mode():
                logits = target.model(torch.tensor([text]), use_cache=False).logits[0, -1]
            assert logits.argmax() == token
            text.append(token)
    wide = Target(build("llama4_text"))
    assert tokens_of(decode(wide, prompts, "plain", SamplingParams(max_tokens=20))) != [c.token_ids for c in done]


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
    split = SplitModel(build("gemma2"))
    assert split_error(split) < TOLERANCE[torch.float32] / 10
    run = SplitModel.run
    monkeypatch.setattr(
        SplitModel, "run", lambda self, rows, start, stop, given: run(self, rows, start, stop, given) * 1.01
    )
    with pytest.raises(
        UnsupportedModelError, match=r"^gemma2: run in two parts, its logits differ .* by 0\.\d+ standard"
    ):
        self_check(split)


def test_the_self_check_refuses_a_split_that_raises(monkeypatch):
    def broken(self, rows, start, stop, given):
        raise RuntimeError("no such kernel")

    split = SplitModel(build("gemma2"))
    monkeypatch.setattr(SplitModel, "run", broken)
    sentence = r"^gemma2: its layers cannot be run in two parts \(RuntimeError: no such kernel\); decode it with"
    with pytest.raises(UnsupportedModelError, match=sentence):
        self_check(split)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float64), ("gemma2", torch.float16), ("gemma2", torch.bfloat16)]
)
def test_other_precisions_pass_the_self_check_and_decode(family, dtype):
    target = Target(build(family).to(dtype))
    assert target.split_error <= TOLERANCE[dtype]
    [done] = target.generate(make_prompts([5]), exit_layer=2, max_tokens=8)
    assert len(done.token_ids) == 8
    if dtype == torch.float64:
        assert done.token_ids == generate(target.model, make_prompts([5])[0], 8)


def test_only_plain_models_of_the_llama_shape_are_compiled():
    assert {type(build(family)).__name__ for family in LLAMAS} == LLAMA_SHAPED
    assert {family for family in FAMILIES if SplitModel(build(family)).llama is not None} == set(LLAMAS)


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
    assert SplitModel(build("gemma3_text")).llama is not None
    assert SplitModel(build("gemma3_text", **options)).llama is None


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
    assert target.backend == "views"
    assert target.generate([prompt], exit_layer=2, max_tokens=12)[0].token_ids == generate(model, prompt, 12)
