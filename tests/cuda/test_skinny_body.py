"""Layers in five launches: equal to the model's own up to rounding, five launches a layer, and when they are used."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from selfspec import SamplingParams
from selfspec.calibrate.profile import costs_key
from selfspec.executors.cuda import body_choice
from selfspec.executors.cuda import runner as runners
from selfspec.executors.cuda.body_checks import MAX_ROUNDINGS, differing_rows, layers_error
from selfspec.executors.cuda.body_choice import TIMED
from selfspec.executors.cuda.device_work import SideStream
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.rounds import RoundInputs, RoundKey, RoundRow, StaticRows, WholeRound
from selfspec.executors.cuda.skinny_body import SkinnyBody, unserved
from selfspec.kernels.layout import SPLIT
from selfspec.kernels.suite import REFERENCE, triton_kernels
from selfspec.loading import target as targets
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel
from tests.cuda.standin import INVARIANT, runner_of, with_runner
from tests.cuda.test_fused_body import PAGE, Launches, given_tokens, layouts, real
from tests.helpers import Schedule, decode, generate, make_prompts, tokens_of
from tests.kernels.samples import layout_of
from tests.models import build
from tests.slow import slow
from tests.target import Target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OWN = ("norm_product", "gate_product", "product_add", "squares_of", "rotate_attend")


small = partial(build, "llama", num_hidden_layers=2)


def skinny(family, dtype=torch.float32, kernels=REFERENCE, **options):
    split = SplitModel(build(family, **options).to(dtype))
    return split, SkinnyBody(FusedBody(split.llama, kernels, "copy"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_views(family, dtype):
    split, body = skinny(family, dtype)
    assert not unserved(body)
    assert layers_error(split, body) <= 1


@torch.inference_mode()
def test_parts_and_taps_are_those_of_ten_launches():
    split, body = skinny("qwen3")
    ten = FusedBody(split.llama, REFERENCE, "copy")
    for layout, _ in layouts():
        results = []
        for one in (body, ten):
            taps = {1: None, 2: None, 3: None, 4: None}
            rows = [StaticRows(PagedCache(9, PAGE), layout, REFERENCE) for _ in range(3)]
            early = one.run(rows[0], 0, 1, given_tokens(layout), taps)
            late = one.run(rows[1], 1, 4, early, taps)
            whole = one.run(rows[2], 0, 4, given_tokens(layout))
            results.append([one[real(layout)] for one in (early, late, whole, *taps.values())])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), slow("qwen3", torch.float32)])
@pytest.mark.usefixtures("rounds_to_nearest")
def test_the_kernels_themselves_are_equal_to_the_views(family, dtype):
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert layers_error(*skinny(family, dtype, triton_kernels(), num_hidden_layers=2)) <= 1


def test_differing_bits_are_found():
    made = partial(skinny, "llama", num_hidden_layers=2)
    assert differing_rows(*made(kernels=INVARIANT)) == ""

    def careless(qkv, keys, values, layout, *rest):
        return INVARIANT.rotate_attend(qkv, keys, values, layout, *rest) * (1 + 1e-6 * layout.most_new)

    def product(hidden, squares, *rest):
        return INVARIANT.norm_product(hidden, squares, *rest) * (1 + 1e-6 * (len(hidden) > 16))

    found = differing_rows(*made(kernels=INVARIANT._replace(norm_product=product)))
    assert found == "a row has other bits among 1 rows than among 64"
    found = differing_rows(*made(kernels=INVARIANT._replace(rotate_attend=careless)))
    assert found == "5 tokens of a row have other bits than one by one"


def test_the_checks_combine_splits_of_attention():
    def differs_late(qkv, keys, values, layout, *rest):
        out = INVARIANT.rotate_attend(qkv, keys, values, layout, *rest)
        return out * (1 + 1e-6 * (layout.most_tokens > SPLIT) * (len(qkv) < 64))

    def misses_a_split(qkv, keys, values, layout, *rest):
        return INVARIANT.rotate_attend(qkv, keys, values, layout, *rest) * (1 + (layout.most_tokens > SPLIT))

    made = partial(skinny, "llama", num_hidden_layers=2)
    body = made(kernels=INVARIANT._replace(rotate_attend=differs_late))
    assert differing_rows(*body) == "a row has other bits among 1 rows than among 64"
    assert layers_error(*made(kernels=INVARIANT._replace(rotate_attend=misses_a_split))) > MAX_ROUNDINGS


@pytest.mark.parametrize("family", ["gemma", "gemma3_text"])
def test_norms_with_offsets_are_not_served(family):
    _, body = skinny(family)
    assert unserved(body) == "norms have offsets, or stand after products"


def test_unpacked_weights_are_not_served():
    assert unserved(FusedBody(SplitModel(build("llama")).llama, REFERENCE, "none")).startswith("the weights")


# ------------------------------------------------------------------------------------------------------------ launches


def seen(name, launched):
    """A reference kernel, counted as one launch."""

    def run(*args, **kwargs):
        launched.append(name)
        with _disable_current_modes():
            return getattr(REFERENCE, name)(*args, **kwargs)

    return run


def counting(launched):
    """The reference kernels of a layer in five launches, and the norm after the last one, each counted."""
    return REFERENCE._replace(**{name: seen(name, launched) for name in (*OWN, "add_norm", "attend", "rotate", "gate")})


@torch.inference_mode()
def test_a_layer_takes_five_launches():
    kernels = list[str]()
    _, body = skinny("llama", kernels=counting(kernels))
    layout, _ = next(layouts())
    rows = StaticRows(PagedCache(9, PAGE), layout, body.kernels)
    tokens = given_tokens(layout)
    body.run(rows, 0, 4, tokens)  # makes what is made once
    kernels.clear()
    with Launches() as seen:
        body.run(rows, 0, 4, tokens)
    layer = ["norm_product", "rotate_attend", "product_add", "gate_product", "product_add"]
    assert kernels == ["squares_of", *layer * 4, "add_norm"]
    assert [name.split(".")[1] for name in seen.names] == ["embedding"]


@torch.inference_mode()
def test_a_plain_round_of_32_layers_takes_at_most_176_launches():
    kernels = list[str]()
    split, body = skinny("llama", num_hidden_layers=32)
    body.kernels = every = REFERENCE._replace(**{name: seen(name, kernels) for name in REFERENCE._fields[1:]})
    cache, split.recorded = PagedCache(4, PAGE), body
    round_of = WholeRound(split, cache, every, RoundInputs(RoundKey(0, 1, 1, 4 * PAGE), cache, split.device))
    row = RoundRow([0], 3, 5, 9, (), 0, (), 0.0, 0, 1.0, 0.0, 0)
    round_of.inputs.fill([row])
    round_of()  # makes what is made once
    kernels.clear()
    with Launches() as torchs:
        round_of()
    assert kernels.count("rotate_attend") == 32 and not {"attend", "rotate", "gate"} & {*kernels}
    assert len(kernels) + kernels.count("pick") + len(torchs.names) <= 176, torchs.names  # a pick is two launches


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "most", "takes"), [(64, 64, True), (65, 64, False), (17, 16, False), (16, 16, True)])
def test_calls_of_more_tokens_take_ten(rows, most, takes):
    kernels = list[str]()
    _, body = skinny("llama", kernels=counting(kernels))
    body.most_rows = most
    layout, num_pages = layout_of([(0, 1)] * rows, PAGE)
    body.run(StaticRows(PagedCache(num_pages, PAGE), layout, body.kernels), 0, 1, torch.zeros(rows, dtype=torch.int64))
    assert ("rotate_attend" in kernels) == takes and ("rotate" in kernels) == (not takes)


def test_long_contexts_take_ten():
    """Partial results of attention would take more than 128 MiB."""
    _, body = skinny("llama")
    layout, _ = layout_of([(0, 1)] * 64, PAGE)
    assert body.takes(layout) and not body.takes(layout._replace(most_tokens=1 << 23))


# ------------------------------------------------------------------------------------------------------------- choosing

FASTER, SLOWER = (2e-3, 1e-3), (1e-3, 2e-3)  # with ten launches, and with five


@pytest.fixture
def installed(monkeypatch, tmp_path, caplog):
    """Opens a model, whose replays of the views and of fused layers, then of ten and of five launches, take such
    seconds; and what was timed so far. Bits of rows are compared where `kernels` are given."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    timed = list[float]()

    def open_one(*seconds, kernels=None, owned=True):
        monkeypatch.setattr(body_choice, "differing_rows", differing_rows if kernels else lambda *given: "")
        times = chain((2e-3, 1e-3), chain(*seconds), repeat(1.0) if seconds else ())

        def measure(recording, device):
            open_one.fives.append(any(one.startswith("rotate_attend") for one in recording.kernels))
            timed.append(next(times))
            return timed[-1]

        made = partial(runners.install, make=lambda split: runner_of(split, kernels or REFERENCE), measure=measure)
        monkeypatch.setattr(targets, "install", made)
        with caplog.at_level(logging.INFO, "selfspec"):
            return Target(small(), backend="views", owned=owned), len(timed)

    open_one.fives = list[bool]()  # whether what was timed takes five launches
    return open_one


@pytest.mark.parametrize(
    ("seconds", "most"),
    [((FASTER,) * 4, 64), ((FASTER, FASTER, SLOWER), 16), ((FASTER, SLOWER), 1), ((SLOWER,), 0)],
)
def test_five_launches_are_used_for_as_many_rows_as_they_are_faster(installed, seconds, most, caplog):
    assert len(TIMED) == 4
    target, timed = installed(*seconds)
    wanted = [False, False, *[False, True] * len(seconds), *[True, True] * (most > 0)]
    assert installed.fives == wanted, "the views, ten launches, both in turn, and prefetches, which are not faster"
    for one in (target, installed()[0]):  # the second time without timing
        body = one.split.recorded
        assert type(body) is (SkinnyBody if most else FusedBody)
        assert getattr(body, "most_rows", 0) == most
        told = f"fused, five launches for up to {most} tokens" if most else "fused"
        assert costs_key(one.split)["recorded"] == told, "costs are those of what runs"
    assert installed()[1] == timed == len(wanted)
    assert ("five launches in calls of at most" in caplog.text) == (most > 0)


@pytest.mark.parametrize(("pairs", "most"), [((FASTER,) * 3, 32), ((FASTER, SLOWER), 1), ((SLOWER,), 0)])
def test_weights_are_prefetched_for_as_many_rows_as_it_is_faster(installed, pairs, most, caplog):
    """Among those that take five launches, here 32."""
    target, timed = installed(*[FASTER] * 3, SLOWER, *pairs)
    assert timed == 2 + 8 + 2 * len(pairs)
    for one in (target, installed()[0]):  # the second time without timing
        body = one.split.recorded
        assert (body.most_rows, body.most_prefetched) == (32, most)
    prompts, params = make_prompts([9, 5]), SamplingParams(max_tokens=8)
    got = tokens_of(decode(target, prompts, Schedule(2, 2), params))
    assert got == [generate(small(), prompt, 8) for prompt in prompts]


class Stream:
    """A stream of a device that is not there; `log` tells what all of them are given."""

    def __init__(self, name, log):
        self.device, self.name, self.log = torch.device("cuda:0"), name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@torch.inference_mode()
def test_prefetches_run_beside_attention_and_are_awaited_at_the_end(monkeypatch):
    log, current = list[str](), ["main"]
    streams = {name: Stream(name, log) for name in ("main", "side")}

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    def seen(name):
        return lambda *given: log.append(f"{name} on {current[-1]}") or getattr(REFERENCE, name)(*given)

    kernels = REFERENCE._replace(**{name: seen(name) for name in ("norm_product", "rotate_attend", "prefetch")})
    body = SkinnyBody(skinny("llama", kernels=kernels)[1], 64, 4)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams["side"])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[-1]])
    body.side = SideStream(torch.device("cuda:0"))
    results = []
    for most in (4, 0):
        body.most_prefetched = most
        layout, _ = layout_of([(0, 1)] * 4, PAGE)
        rows = StaticRows(PagedCache(9, PAGE), layout, kernels)
        results.append(body.run(rows, 0, 2, torch.arange(4)))
        if most:
            layer = ["norm_product on main", "side waits for main", "prefetch on side", "rotate_attend on main"]
            assert log == [*layer * 2, "main waits for side"]
            log.clear()
    assert log == ["norm_product on main", "rotate_attend on main"] * 2 and torch.equal(*results)


def test_timed_rows_take_the_memory_of_one(monkeypatch):
    made = list[PagedCache]()
    monkeypatch.setattr(body_choice, "PagedCache", lambda *given: made.append(PagedCache(*given)) or made[-1])
    split = SplitModel(small())
    runner = runner_of(split)
    body_choice._token_seconds(split, runner, lambda *given: 0.0, 64)
    assert [one.capacity for one in made] == [128] and not runner.storages._all, "of the model's 128 tokens"


def test_five_launches_that_are_wrong_here_are_not_used(installed, caplog):
    def wrong(*given):
        return 1.03 * INVARIANT.gate_product(*given)

    def differs(hidden, *rest):
        return INVARIANT.norm_product(hidden, *rest) * (1 + 1e-6 * (len(hidden) > 16))

    def fails(*given):
        raise RuntimeError("no kernel image is available")

    faults = {"gate_product": (wrong, "roundings"), "norm_product": (differs, "a row has other bits among 1 rows")}
    for name, (kernel, told) in {**faults, "squares_of": (fails, "no kernel image is available")}.items():
        target, timed = installed(*[FASTER] * 4, kernels=INVARIANT._replace(**{name: kernel}), owned=False)
        assert type(target.split.recorded) is FusedBody and target.split.runner.refused is None
        assert "fused layers take ten launches; with five: " in caplog.text and told in caplog.text
        assert timed % 2 == 0, "none of five launches was timed"
        caplog.clear()


def test_the_check_finds_a_wrong_scale():
    split, body = skinny("llama", torch.bfloat16)
    layers = [one._replace(scale=one.scale * 1.1) for one in split.llama.layers]
    wrong = SkinnyBody(FusedBody(split.llama._replace(layers=layers), REFERENCE, "copy"))
    assert layers_error(split, body) <= 1 < MAX_ROUNDINGS < layers_error(split, wrong)


# ------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(("family", "rows"), [("qwen3", 64), *(slow(one, 4) for one in FAMILIES)])
def test_tokens_are_those_of_the_ordinary_engine(family, rows):
    """With 4 places at most, a batch's rounds take ten launches, and its draft steps five."""
    prompts, model = make_prompts([3, 20, 11]), build(family)
    params = SamplingParams(max_tokens=12)
    wanted = [generate(model, prompt, 12) for prompt in prompts]
    target = with_runner(Target(model), packing="copy", skinny_rows=rows)
    assert tokens_of(decode(target, prompts, Schedule(3, 4), params)) == wanted
    made = target.split.runner.graphs.capture.made
    assert target.split.runner.refused is None
    assert any("rotate_attend" in kernel for one in made for kernel in one.kernels)
