"""Fused layers against the model's own: equal up to rounding, ten launches a layer, no second copy of the weights."""

from __future__ import annotations

import logging
from itertools import chain, repeat

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from selfspec import SamplingParams
from selfspec.executors.cuda.body_checks import MAX_ROUNDINGS, ROUNDING, layers_error
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.packed_linear import PackedLinear
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.executors.cuda.runner import install
from selfspec.kernels.suite import REFERENCE
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel
from tests.cuda.standin import runner_of, with_runner
from tests.cuda.test_host_copies import NoHostCopies
from tests.helpers import Schedule, decode, generate, make_prompts, tokens_of
from tests.kernels.samples import layout_of
from tests.models import build
from tests.slow import slow
from tests.target import Target, load

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma3_text")
PAGE = 16
CALLS = ([(0, 5), (0, 0), (0, 9)], [(5, 1), (0, 2), (9, 6)])  # ragged rows with an empty slot, then what follows them


def layouts():
    """The layouts of `CALLS`, whose rows keep their pages."""
    first, num_pages = layout_of([(0, 8), (0, 2), (0, 15)], PAGE)
    for rows in CALLS:
        made, _ = layout_of(rows, PAGE, padding=1)
        pages = first.pages[:, : made.pages.shape[1]]
        places = made.slots.clone()
        for slot, (old, new) in enumerate(rows):
            start = int(made.starts[slot])
            places[start : start + new] = first.pages[slot, 0] * PAGE + old + torch.arange(new)
        yield made._replace(pages=pages, slots=places, most_tokens=PAGE), num_pages


def given_tokens(layout):
    return torch.randint(3, 96, layout.rows.shape, generator=torch.Generator().manual_seed(3))


def real(layout):
    """Which places have a token. What layers make of padding is never read."""
    return layout.rows >= 0


@pytest.mark.parametrize(
    ("family", "dtype"), [*((one, torch.bfloat16) for one in FAMILIES), *(slow(one, torch.float32) for one in FAMILIES)]
)
@torch.inference_mode()
def test_hidden_states_are_those_of_the_views(family, dtype):
    """In parts and in taps. Of bfloat16, each layer starts from the views' hidden states.

    There, numbers may differ by one rounding of themselves (2^-8), and beyond that by one rounding, in norm, of what
    the layer adds. In float32 whole runs are compared, too: at most 1e-5 of the norm.
    """
    split = SplitModel(build(family).to(dtype))
    body = FusedBody(split.llama, REFERENCE, "copy")
    assert layers_error(split, body) <= 1
    caches = [PagedCache(9, PAGE) for _ in range(2)]
    for layout, _ in layouts():
        tokens, live = given_tokens(layout), real(layout)
        results = []
        for run, cache in zip((split.run, body.run), caches, strict=True):
            taps = {1: None, 2: None, 3: None, 4: None}
            rows = [StaticRows(cache, layout, REFERENCE) for _ in range(3)]
            early = run(rows[0], 0, 1, tokens, taps)
            middle = run(rows[1], 1, 3, early, taps)
            last = run(rows[2], 3, 4, middle, taps)
            whole = run(StaticRows(cache, layout, REFERENCE), 0, 4, tokens)
            results.append([one[live] for one in (early, middle, last, whole, *taps.values())])
        allowed = 1e-5 if dtype == torch.float32 else 4 * ROUNDING[dtype]  # four layers on their own hidden states
        for wanted, got in zip(*results, strict=True):
            assert got.shape == wanted.shape and got.dtype == dtype
            assert (got.float() - wanted.float()).norm() <= allowed * wanted.float().norm()


FAULTS = {
    "activation": lambda w: w._replace(activation="gelu_tanh"),
    "offset": lambda w: w._replace(layers=[x._replace(norm=x.norm._replace(offset=1.0)) for x in w.layers]),
    "window": lambda w: w._replace(layers=[x._replace(window=3) for x in w.layers]),
    "scale": lambda w: w._replace(layers=[x._replace(scale=x.scale * 1.1) for x in w.layers]),
    "last norm": lambda w: w._replace(norm=w.norm._replace(offset=0.1)),
    "swapped": lambda w: w._replace(layers=[x._replace(gate=x.up, up=x.gate) for x in w.layers]),
    "last layer": lambda w: w._replace(layers=[*w.layers[:-1], w.layers[-2]._replace(layer_idx=3)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_wrong_layers(fault):
    split = SplitModel(build("llama").to(torch.bfloat16))
    assert layers_error(split, FusedBody(FAULTS[fault](split.llama), REFERENCE, "copy")) > MAX_ROUNDINGS


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_products_summed_in_another_order_do_not_refuse_right_layers(dtype, share, monkeypatch):
    """Also where layers add little to the hidden state, as in models with many of them."""
    model = build("llama", num_hidden_layers=12).requires_grad_(False)
    for layer in model.model.layers:
        for end in (layer.self_attn.o_proj, layer.mlp.down_proj):
            end.weight.mul_(share)
    split = SplitModel(model.to(dtype))
    body, linear, rng = FusedBody(split.llama, REFERENCE, "copy"), F.linear, torch.Generator().manual_seed(0)

    def in_another_order(x, weight, bias=None):
        exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
        return (exact + 1e-6 * exact.abs().mean() * torch.randn(exact.shape, generator=rng)).to(x.dtype)

    monkeypatch.setattr(F, "linear", in_another_order)
    assert 0 < layers_error(split, body) <= MAX_ROUNDINGS


# ------------------------------------------------------------------------------------------------------------ launches


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel. Views and allocations do not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, schema = str(func), func._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.arguments)
        if not is_view and not name.split(".")[1].startswith(("empty", "new_empty", "detach")):
            self.names.append(name)
        return out


def launches(body, layout, num_layers):
    cache = PagedCache(9, PAGE)
    rows = [StaticRows(cache, layout, body.kernels) for _ in range(2)]
    hidden = torch.randn(len(layout.rows), 32, dtype=body.weights.embedding.dtype)
    body.run(rows[0], 1, 1 + num_layers, hidden)  # makes what is made once
    with Launches() as seen:
        body.run(rows[1], 1, 1 + num_layers, hidden)
    return seen.names


def counting(launched):
    """The reference kernels, each counted as its Triton twin launches: attention and its combination are two."""

    def seen(name):
        def run(*args, **kwargs):
            launched.extend([name] * (2 if name == "attend" else 1))
            with _disable_current_modes():
                return getattr(REFERENCE, name)(*args, **kwargs)

        return run

    return REFERENCE._replace(**{name: seen(name) for name in ("attend", "add_norm", "rotate", "gate", "scatter")})


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_a_layer_takes_ten_launches(family):
    split = SplitModel(build(family))
    layout, _ = next(layouts())
    counts = []
    for num_layers in (1, 2):
        kernels = []
        names = launches(FusedBody(split.llama, counting(kernels), "copy"), layout, num_layers)
        counts.append(len(names) + len(kernels) // 2)  # the run before is counted by the kernels, too
    assert counts[1] - counts[0] == 10
    assert counts[0] <= 11, "the last sum is one more"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_copy_nothing_from_the_host(family):
    weights = tree_map_only(torch.Tensor, lambda one: one.to("meta"), SplitModel(build(family)).llama)
    weights.rotary.to("meta")
    body, cache = FusedBody(weights, REFERENCE, "copy"), PagedCache(4, PAGE)
    layout, _ = layout_of([(5, 2), (0, 2)], PAGE, device="meta")
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    body.run(StaticRows(cache, layout, REFERENCE), 0, 4, tokens)  # makes what is made once
    with NoHostCopies():
        assert body.run(StaticRows(cache, layout, REFERENCE), 0, 4, tokens).is_meta


# ------------------------------------------------------------------------------------------------------------- weights


def weights_in(model):
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_owned_model_is_not_copied(family, tmp_path):
    model = build(family)
    values = {name: one.clone() for name, one in model.state_dict().items()}
    before = sum(weights_in(model).values())
    split = SplitModel(model)
    body = FusedBody(split.llama, REFERENCE, "share")
    assert sum(weights_in(model).values()) == before
    held = weights_in(model)
    assert all(one.weight.untyped_storage().data_ptr() in held for one in body.linears)
    model.save_pretrained(tmp_path)
    for other in (model, type(model).from_pretrained(tmp_path)):
        for name, one in other.state_dict().items():
            assert torch.equal(one, values[name]) and one.is_contiguous()


def test_a_models_own_weights_stay_where_they_are_and_copies_are_counted():
    model = build("qwen2")
    places = [one.data_ptr() for one in model.parameters()]
    split = SplitModel(model)
    packed = sum(
        one.numel() * 4
        for name, one in model.named_parameters()
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    )
    assert FusedBody.bytes_of(split.llama) == packed
    FusedBody(split.llama, REFERENCE, "copy")
    assert [one.data_ptr() for one in model.parameters()] == places


@pytest.mark.parametrize("packing", ["share", "none"])
def test_every_packing_gives_the_same_numbers(packing):
    split = SplitModel(build("qwen2"))
    layout, _ = next(layouts())
    outputs = []
    for one in ("copy", packing):
        body = FusedBody(split.llama, REFERENCE, one)
        with torch.inference_mode():
            hidden = body.run(StaticRows(PagedCache(9, PAGE), layout, REFERENCE), 0, 4, given_tokens(layout))
        outputs.append(hidden[real(layout)])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


EDITS = {
    "in place": lambda weight: weight.mul_(1.5),
    "in place through .data": lambda weight: weight.data.mul_(1.5),
    "other memory through .data": lambda weight: setattr(weight, "data", weight.data * 1.5),
}


@pytest.mark.parametrize(
    ("packing", "edit"),
    [
        ("share", "other memory through .data"),
        ("copy", "in place through .data"),
        slow("copy", "in place"),
    ],
)
def test_edits_of_weights_are_seen(packing, edit):
    """As at a call, which refreshes deeply."""
    model, prompts = build("qwen2"), make_prompts([9])
    target = with_runner(Target(model, backend="views"), packing=packing)
    before = target.generate(prompts, max_tokens=12, exit_layer=1)[0].token_ids
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.bias, layer.mlp.up_proj.weight):
                EDITS[edit](weight)
    after = target.generate(prompts, max_tokens=12, exit_layer=1)[0].token_ids
    assert after == generate(model, prompts[0], 12) != before


@pytest.mark.parametrize("packing", [slow(None), "share"])
def test_a_model_that_was_moved_is_recorded_anew(packing):
    """As after `model.cpu()` and `model.cuda()`: the device, the dtype and the parameters are those of before."""
    model, prompts = build("llama"), make_prompts([9])
    target = with_runner(Target(model, backend="views"), packing=packing)
    before = target.generate(prompts, max_tokens=6, exit_layer=1)[0].token_ids
    for number in (*model.parameters(), *model.buffers()):
        number.data = number.data.clone()
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)
    recorded = target.split.runner.graphs.num_recorded
    after = target.generate(prompts, max_tokens=6, exit_layer=1)[0].token_ids
    assert after == generate(model, prompts[0], 6) != before
    recorded, earlier = target.split.runner.graphs.num_recorded, recorded
    assert recorded > earlier
    target.generate(prompts, max_tokens=6, exit_layer=1)
    assert target.split.runner.graphs.num_recorded == recorded, "only once"


def test_edits_in_place_are_seen_without_a_deep_look():
    linears = SplitModel(build("llama")).llama.layers[0].linears()[:3]
    packed, x = PackedLinear(linears, "copy"), torch.randn(2, 32)
    with torch.no_grad():
        linears[1].weight.add_(1.0)
    stale = packed(x)
    packed.refresh()
    wanted = torch.cat([torch.nn.functional.linear(x, one.weight) for one in linears], 1)
    torch.testing.assert_close(packed(x), wanted)
    assert not torch.allclose(stale, wanted)


def test_a_weight_of_another_shape_is_refused():
    linears = SplitModel(build("llama")).llama.layers[0].linears()[:3]
    packed = PackedLinear(linears, "copy")
    linears[0].weight.data = torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"a weight \[32, 32\] was replaced by one \[4, 32\]; load the model again"):
        packed.refresh()


# ------------------------------------------------------------------------------------------------------------- choosing


def installed(model, seconds, caplog, owned=False, **kernels):
    """A split after `install`, where replays of the views and of fused layers seem to take these seconds."""
    split, times = Target(model, backend="views").split, chain(seconds, repeat(1.0))  # five launches are not faster
    with caplog.at_level(logging.INFO, "selfspec"):
        install(
            split,
            lambda one: runner_of(one, REFERENCE._replace(**kernels)),
            owned,
            lambda recording, device: next(times),
        )
    return split


@pytest.mark.parametrize("owned", [True, slow(False)])
def test_fused_layers_that_are_faster_are_used(caplog, owned):
    split = installed(build("llama"), (2e-3, 1e-3), caplog, owned)
    assert isinstance(split.recorded, FusedBody) and split.recorded.packing == ("share" if owned else "copy")
    assert "recordings run fused layers" in caplog.text and "1 ms, 2 ms without them" in caplog.text


def test_fused_layers_that_are_slower_are_not_used(caplog):
    split = installed(build("llama"), (1e-3, 2e-3), caplog)
    assert split.recorded is None and split.runner is not None
    assert "recordings run the model's own modules" in caplog.text and "2 ms, 1 ms without" in caplog.text


def test_weights_may_be_moved_where_selfspec_loaded_the_model(monkeypatch):
    owned = []
    monkeypatch.setattr("selfspec.loading.target.install", lambda split, **named: owned.append(named["owned"]))
    load("demo", check=False)
    load(build("llama"), check=False)
    assert owned == [True, False]


def test_other_families_keep_the_views(caplog):
    split = installed(build("gpt2"), (), caplog)
    assert split.recorded is None and split.runner is not None
    assert "fused layers do not serve this model" in caplog.text


WRONG = {
    "wrong": (lambda given: given * 1.03, "roundings"),
    "raises": (RuntimeError("no kernel image is available"), "no kernel image"),
    "memory": (torch.OutOfMemoryError("of 3 GiB. If reserved memory"), "has too little free memory, and decodes more"),
}


@pytest.mark.parametrize("wrong", [slow("raises"), "wrong", "memory"])
def test_fused_layers_that_are_wrong_here_are_not_used(caplog, wrong):
    fault, told = WRONG[wrong]

    def gate(gate_up, activation):
        if isinstance(fault, Exception):
            raise fault
        return fault(REFERENCE.gate(gate_up, activation))

    split = installed(build("llama"), (2e-3, 1e-3), caplog, gate=gate)
    assert split.recorded is None and split.runner is not None and split.runner.refused is None
    assert caplog.text.count("with fused layers: ") == 1 and told in caplog.text and "reserved" not in caplog.text
    assert any(one.levelname == "WARNING" for one in caplog.records) == isinstance(fault, Exception)
    target = Target(build("llama"), backend="views")
    target.split.runner, prompts = split.runner, make_prompts([9])
    assert target.generate(prompts, max_tokens=6, exit_layer=1)[0].token_ids == generate(target.model, prompts[0], 6)


# ------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("family", [slow(one) for one in FAMILIES])
def test_tokens_are_those_of_the_ordinary_engine(family):
    prompts = make_prompts([3, 20, 11])
    model = build(family)
    params = SamplingParams(max_tokens=12)
    wanted = decode(Target(model), prompts, Schedule(3, 4), params)
    target = with_runner(Target(model), packing="copy")
    assert tokens_of(decode(target, prompts, Schedule(3, 4), params)) == tokens_of(wanted)
    runner = target.split.runner
    assert runner.refused is None and runner.graphs.num_recorded > 0
    assert any("rotate" in kernel for made in runner.graphs.capture.made for kernel in made.kernels)
