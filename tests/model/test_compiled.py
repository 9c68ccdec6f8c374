"""The compiled engine: equal to the model's own forward, and a token's bits the same whatever shares its call."""

from __future__ import annotations

import logging
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.core import Request
from selfspec.errors import NoCompilerError
from selfspec.executors.cpu import install as engines
from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.cpu.install import choose
from selfspec.kernels import compiled_call as c
from selfspec.kernels import compiler
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams
from tests.helpers import Always, Schedule, generate, make_prompts
from tests.helpers import run as run_requests
from tests.models import build, rounded, tiny
from tests.target import Target, load

RAGGED = (12, 7, 1, 20)

# Heads of a whole vector, of none, and all of them wider than the model; one shared key head and one each; biases;
# widths beyond one panel; norms after attention and MLP
SHAPES = {
    "llama": {},
    "wide": {"hidden_size": 160, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 200},
    "many": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 131},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "gemma": {"family": "gemma3_text", "head_dim": 24, "num_key_value_heads": 1, "intermediate_size": 200},
}


def compiled(family="llama", halves=False, **extra):
    model = build(family, **extra)
    split = SplitModel(rounded(model) if halves else model)
    error = choose(split, "compiled").error
    return split, error


@cache
def shared(family):
    """By a family's name, or a shape's with weights that are packed in half the memory."""
    if family == "bfloat16":
        split = SplitModel(build("llama", attention_bias=True).bfloat16())
        choose(split, "compiled")
        return split
    return compiled(halves=True, **SHAPES[family])[0] if family in ("wide", "many", "gemma") else compiled(family)[0]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_any_size_equal_the_models_own(name, halves):
    split, error = compiled(halves=halves, **SHAPES[name])
    assert split.backend == "compiled"
    assert error < 1e-4


def run(split, spans, tokens, pages, start=0, stop=None, **more):
    rows = PackedRows(pages, spans)
    return split.run(rows, start, split.num_layers if stop is None else stop, tokens, **more)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    page_size=st.sampled_from([4, 7, 64]),
    family=st.sampled_from(["llama", "mistral", "wide", "many", "gemma", "bfloat16"]),
    data=st.data(),
)
def test_a_tokens_bits_do_not_depend_on_what_shares_its_call(lengths, page_size, family, data):
    """Rows in one call, split at any layer and after any token, against every token of every row in a call alone."""
    split = shared(family)
    tokens = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    cut = [data.draw(st.integers(0, n - 1)) for n in lengths]
    layer = data.draw(st.integers(1, split.num_layers - 1))
    together, alone = (PagedCache(128, page_size) for _ in range(2))
    pages = [together.reserve(n) for n in lengths]
    own = [alone.reserve(n) for n in lengths]
    with torch.inference_mode():
        first = [(p, t, c) for p, t, c in zip(pages, tokens, cut, strict=True) if c]
        if first:
            run(split, [Span(p, 0, c) for p, _, c in first], torch.cat([t[:c] for _, t, c in first]), together)
        spans = [Span(p, c, len(t) - c) for p, t, c in zip(pages, tokens, cut, strict=True)]
        early = run(split, spans, torch.cat([t[c:] for t, c in zip(tokens, cut, strict=True)]), together, 0, layer)
        got = split.logits(run(split, spans, early, together, layer))
        wanted = []
        for p, t, c in zip(own, tokens, cut, strict=True):
            each = [split.logits(run(split, [Span(p, i, 1)], t[i : i + 1], alone)) for i in range(len(t))]
            wanted += each[c:]
    assert torch.equal(got, torch.cat(wanted))


@pytest.mark.parametrize(("name", "halves"), [("wide", True), ("gemma", False)])
def test_several_threads_compute_the_same_bits(name, halves):
    """Of long calls, which threads share, and of short ones, which each makes ready alone."""
    split, outputs = compiled(halves=halves, **SHAPES[name])[0], []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            with torch.inference_mode():
                pages = PagedCache(3, 256)
                calls = [[Span([0], 0, 150), Span([1], 0, 20), Span([2], 0, 1)], [Span([1], 20, 1)]]
                calls.append([Span([0], 150, 6), Span([1], 21, 4), Span([2], 1, 3)])
                hidden = [run(split, spans, torch.arange(sum(s.length for s in spans)) % 90, pages) for spans in calls]
                outputs.append([split.logits(one) for one in hidden])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in outputs[1:] for a, b in zip(outputs[0], other, strict=True))


def test_engines_are_named_and_chosen():
    model = build("llama")
    engines = {name: Target(model, backend=name).backend for name in ("views", "compiled", "auto")}
    assert engines == {"views": "views", "compiled": "compiled", "auto": "compiled"}
    assert Target(build("llama").double()).backend == Target(build("llama").half()).backend == "views"
    assert tiny("gemma2").backend == "views"
    with pytest.raises(ValueError, match=r"^backend must be one of auto, views, compiled, got 'turbo'$"):
        load(model, backend="turbo")
    with pytest.raises(
        ValueError, match=r"^backend 'compiled' serves .* float32 or bfloat16 on CPU .*, got llama in float64 on cpu; "
    ):
        Target(build("llama").double(), backend="compiled")
    with pytest.raises(ValueError, match=r"^backend 'compiled' serves Llama-shaped models .*, got gemma2 in float32"):
        Target(build("gemma2"), backend="compiled")


def test_a_body_that_disagrees_with_the_model_is_never_used(monkeypatch):
    split = SplitModel(build("llama"))
    monkeypatch.setattr(CompiledBody, "logits", lambda self, hidden, normed: torch.zeros(len(hidden), 96))
    choose(split, "auto")
    assert split.backend == "views"
    with pytest.raises(
        ValueError, match="backend 'compiled' serves models whose layers it computes as the model itself"
    ):
        choose(SplitModel(build("llama")), "compiled")


def test_models_in_bfloat16_are_compiled_and_come_near_the_numbers_of_the_same_weights_in_float32():
    model = build("llama", attention_bias=True)
    half = Target(build("llama", attention_bias=True).bfloat16())
    assert half.backend == "compiled" and half.split.dtype == torch.bfloat16
    rounded(model)
    pages = PagedCache(1, 64), PagedCache(1, 64)
    stacks = half.split, Target(model, backend="compiled").split
    with torch.inference_mode():
        got, wanted = (
            split.logits(run(split, [Span([0], 0, 30)], torch.arange(30), cache))
            for split, cache in zip(stacks, pages, strict=True)
        )
    assert got.dtype == torch.float32
    assert 0 < (got - wanted).abs().max() < 0.05 * wanted.std() or stacks[0].compiled.packed_head.struct.kind != c.PAIRS


def kept(target, prompts, policy, max_tokens, **options):
    """Tokens and their logits, per prompt."""
    params = SamplingParams(max_tokens=max_tokens)
    made = run_requests(target, [Request(prompt, params, keep_logits=True) for prompt in prompts], policy, **options)
    sequences = [made.sequences[str(at)] for at in range(len(prompts))]
    return [(one.completion_token_ids, one.logits) for one in sequences]


def are_equal(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_no_plan_changes_a_bit_of_a_model_in_bfloat16():
    target, prompts = Target(build("llama").bfloat16()), make_prompts(RAGGED)
    done = kept(target, prompts, Schedule(0, 4), 12, max_num_seqs=3)
    assert all(
        are_equal(one, kept(target, [prompt], "plain", 12)[0]) for prompt, one in zip(prompts, done, strict=True)
    )


@pytest.mark.parametrize(
    ("part", "way"),
    [
        ("embedding", "in place"),
        ("head", "data"),
        ("head bias", "in place"),
        ("norm", "data"),
        ("layer norm", "in place"),
        ("layer bias", "data"),
        ("layer", "in place"),
    ],
)
def test_edits_of_a_model_in_bfloat16_are_honoured(part, way):
    model, [prompt] = build("llama", attention_bias=True), make_prompts([9])
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, 95)  # of an odd number of halves
    model.bfloat16()
    target = Target(model, backend="compiled")
    [before] = kept(target, [prompt], Always(2, 4), 4)
    first, base = model.model.layers[1], model.model
    parts = {
        **{"embedding": base.embed_tokens.weight, "head": model.lm_head.weight, "head bias": model.lm_head.bias},
        **{"norm": base.norm.weight, "layer norm": first.input_layernorm.weight},
        **{"layer bias": first.self_attn.v_proj.bias, "layer": first.mlp.down_proj.weight},
    }
    with torch.no_grad():
        numbers = (parts[part] if way == "in place" else parts[part].data).view(-1)
        numbers[0 if part == "embedding" else -1 :].add_(8)  # the very last is seen, too
    [after] = kept(target, [prompt], Always(2, 4), 4)
    [anew] = kept(Target(model, backend="compiled"), [prompt], Always(2, 4), 4)
    assert are_equal(after, anew) and not torch.equal(before[1][0], after[1][0])


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("norm", torch.bfloat16),
        ("input_layernorm", torch.float32),
        ("post_feedforward_layernorm", torch.bfloat16),
        ("self_attn.k_norm", torch.float32),
    ],
)
def test_edits_of_norms_that_multiply_by_one_more_are_honoured(part, dtype):
    model, [prompt] = build("gemma3_text").to(dtype), make_prompts([9])
    target = Target(model, backend="compiled")
    [before] = kept(target, [prompt], Always(2, 4), 4)
    owner = model.model if part == "norm" else model.model.layers[1]
    with torch.no_grad():
        owner.get_submodule(part).weight.mul_(-3)
    [after] = kept(target, [prompt], Always(2, 4), 4)
    [anew] = kept(Target(model, backend="compiled"), [prompt], Always(2, 4), 4)
    assert are_equal(after, anew) and not torch.equal(before[1][0], after[1][0])


def test_copies_of_the_weights_are_only_made_where_memory_is_free(monkeypatch, caplog):
    monkeypatch.setattr(engines, "free_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert Target(build("llama")).backend == "views"
    assert "backend views instead of compiled, whose copies of the weights need" in caplog.text
    assert Target(build("llama"), backend="compiled").backend == "compiled"


@pytest.fixture
def built():
    """The file of the library that this run of the tests decodes with."""
    return Path(compiler.library()._name)


@pytest.fixture
def compiler_anew(monkeypatch, tmp_path):
    """A cache folder in which nothing has been compiled yet, and no library in memory."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    known = compiler.library, c.functions
    for one in known:
        one.cache_clear()
    yield monkeypatch
    for one in known:
        one.cache_clear()


def test_without_a_compiler_auto_says_what_is_slower_and_decodes_all_the_same(compiler_anew, tmp_path, caplog):
    (tmp_path / "ziglang.py").touch()  # hides the package
    compiler_anew.syspath_prepend(tmp_path)
    compiler_anew.setenv("CXX", "no-such-compiler")
    compiler_anew.setenv("PATH", "/nowhere")
    model, prompts = build("llama"), make_prompts([9])
    with pytest.raises(
        NoCompilerError, match=r"^backend 'compiled' needs a C\+\+ compiler, .* or choose backend auto$"
    ):
        compiler.library()
    target = Target(model)
    [line] = caplog.messages
    assert (
        line.startswith("backend views runs the layers, which is slower than compiled")
        and "pip install ziglang" in line
    )
    assert target.generate(prompts, max_tokens=8)[0].token_ids == generate(model, prompts[0], 8)


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(built, compiler_anew, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    compiler_anew.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    compiler_anew.setattr(compiler, "_run", lambda command: shutil.copy(built, command[-1]) and "")
    compiler.library()
    unkept, _, last = caplog.messages
    assert "nothing can be kept in " in unkept and "SELFSPEC_CACHE" in unkept and "kept" not in last
    target = Target(build("llama"))
    assert target.generate(make_prompts([9]), max_tokens=8) and target.backend == "compiled"
    target.save_prior()
    assert [line for line in caplog.messages if "kept" in line] == [unkept]


def test_what_was_compiled_serves_from_a_folder_that_takes_no_files(built, compiler_anew, caplog):
    compiler_anew.setenv("SELFSPEC_CACHE", str(built.parents[1]))
    compiler_anew.setattr(compiler.tempfile, "TemporaryFile", lambda **options: pytest.fail("written to"))
    compiler.library()
    assert caplog.messages == []


def test_a_compiler_that_fails_is_named_with_its_reason(compiler_anew, tmp_path):
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho 'error: no room' >&2\nexit 1\n")
    broken.chmod(0o755)
    compiler_anew.setenv("CXX", str(broken))
    with pytest.raises(NoCompilerError, match=r"^backend 'compiled' .*broken\+\+ fails \(error: no room\); repair it"):
        compiler.library()
    assert not [name for name in os.listdir(tmp_path / "compiled") if name.endswith(".tmp")]


def test_what_was_compiled_is_kept(built, compiler_anew, tmp_path, caplog):
    compiler_anew.setattr(compiler, "_run", lambda command: shutil.copy(built, command[-1]) and "")
    compiler.library()
    first, last = caplog.messages  # one before the wait, one after it
    assert first.startswith("compiling for this machine's processor with ") and "up to two minutes" in first
    [file] = (tmp_path / "compiled").iterdir()
    assert re.fullmatch(rf"compiled in \d+\.\d s, kept in {re.escape(str(file))}", last)
    made = file.stat().st_ino
    compiler.library.cache_clear()
    compiler_anew.setattr(compiler, "_compile", lambda *given: pytest.fail("compiled again"))
    compiler.library()
    assert file.stat().st_ino == made  # the time of its last use is renewed


@pytest.mark.parametrize("edit", ["head row", "numpy row", "norm", "head bias"])
def test_edits_that_leave_no_trace_are_followed_by_the_next_call(edit):
    model = build("llama")
    if edit == "head bias":
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    target, [prompt] = Target(model, backend="compiled"), make_prompts([9])
    before = target.generate([prompt], max_tokens=8, policy="plain")[0].token_ids
    if edit == "head row":
        model.lm_head.weight.data[before[0]] *= -40
    elif edit == "numpy row":
        model.lm_head.weight.detach().numpy()[before[0]] *= -40
    elif edit == "norm":
        model.model.norm.weight.data[3] *= -90
    else:
        with torch.no_grad():
            model.lm_head.bias[7] += 1e3
    after = target.generate([prompt], max_tokens=8, policy="plain")[0].token_ids
    assert after == generate(model, prompt, 8) != before


def test_weights_that_were_replaced_by_others_in_memory_or_shape_are_followed_or_refused():
    model, [prompt] = build("llama"), make_prompts([9])
    target = Target(model, backend="compiled")
    out = model.model.layers[1].self_attn.o_proj.weight
    before = target.generate([prompt], max_tokens=8, policy="plain")[0].token_ids
    out.data = -5 * out.detach().clone().t()  # numbers in another order than they seem to be
    assert out.shape[0] == out.shape[1] and not out.is_contiguous()
    after = target.generate([prompt], max_tokens=8, policy="plain")[0].token_ids
    assert after == generate(model, prompt, 8) != before
    out.data = torch.cat([out.data, out.data])
    with pytest.raises(ValueError, match=r"^a weight \[\d+, \d+\] was replaced by one \[\d+, \d+\]"):
        target.generate([prompt], max_tokens=8, policy="plain")


def test_what_torch_makes_by_default_does_not_matter():
    model, [prompt] = build("qwen2"), make_prompts([9])
    wanted = generate(model, prompt, 8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        target = Target(model, backend="compiled")
        assert target.generate([prompt], max_tokens=8, policy="plain")[0].token_ids == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_call_of_no_tokens_gives_none():
    split = Target(build("llama"), backend="compiled").split
    assert split.logits(torch.zeros(0, split.config.hidden_size)).shape == (0, split.vocab_size)
    none = PackedRows(PagedCache(1, 8), [Span([0], 0, 0)])
    assert split.run(none, 0, 2, torch.arange(0)).shape == (0, split.config.hidden_size)
