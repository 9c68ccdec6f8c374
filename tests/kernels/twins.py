"""Every kernel against its reference on shapes of decoding, on a device or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import reference
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.layout import EOS, GIVEN, Norm, Rotation, SamplingTensors
from tests.kernels import samples

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # largest relative error in norm
NEAR = 1e-4  # picks may differ where the two best scores lie closer than this: logarithms differ in the last bit
HEADS = ((32, 8, 128), (32, 32, 128), (32, 8, 64), (16, 8, 256), (28, 4, 128), (40, 8, 80))
MOST = 4096  # tokens that the longest row holds
KINDS = ((0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.2, 300, 0.95, 0.02))


class Case(NamedTuple):
    """One comparison: `error` is in the unit of `allowed`."""

    kernel: str
    case: str
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "agrees": self.agrees}


def check_kernels(
    device: torch.device | str, heads: Sequence[tuple[int, int, int]] = HEADS[:1], seed: int = 0, most: int = MOST
) -> Iterator[Case]:
    """Compare every kernel with its twin, the most telling cases first: half precision, then float32.

    Args:
        device: a CUDA device; or the CPU where Triton's interpreter is on, with a small `most`.
        heads: query heads, heads of keys and values, and the numbers of a head, of every attention that is tried.
        most: tokens that the longest row holds.
    """
    place = torch.device(device)
    for dtype in (torch.bfloat16, torch.float32) if place.type == "cuda" else (torch.float32,):
        yield from check_scatter(place, dtype, seed, most)
        for one in heads:
            yield from check_attention(place, dtype, one, seed, most)
        yield from check_prompts(place, dtype, seed, most)
        yield from check_layers(place, dtype, heads[0], seed, most)
        yield from check_products(place, dtype, seed, most)
        for one in heads:
            yield from check_layer_attention(place, dtype, one, seed, most)
    yield from check_pick(place, seed, most)
    yield from check_prepare(place, seed)
    yield from check_accept(place, seed)


def check_scatter(device: torch.device, dtype: torch.dtype, seed: int = 0, most: int = MOST) -> Iterator[Case]:
    """Slots hold exactly their tokens, and all else stays."""
    from selfspec.kernels.kv_scatter import scatter

    call = samples.paged([(most, 7), (30, 1)], 8, 8, 128, 64, seed, padding=1, dtype=dtype, device=device)
    made = [(call.keys.clone(), call.values.clone()) for _ in range(2)]
    for write, pages in zip((scatter, reference.scatter), made, strict=True):
        write(-call.key, -call.value, *pages, call.layout.slots)
    wrong = sum(int((a.nan_to_num() != b.nan_to_num()).sum()) for a, b in zip(*made, strict=True))
    yield Case("scatter", _name(dtype), float(wrong), 0.0)


def check_attention(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], seed: int = 0, most: int = MOST
) -> Iterator[Case]:
    """Ragged rows with an empty slot, NaN wherever no row has written, each mask."""
    from selfspec.kernels.paged_attention import attend

    num_heads, kv_heads, dim = heads
    ragged = [(most - 5, 5), (0, 0), (most // 4, 1), (255, 3), (0, 2)]
    masks: dict[str, dict[str, Any]] = {
        "ragged": {},
        "window": {"window": 130},
        "chunks": {"chunk": 512},
        "soft-cap": {"softcap": 30.0},
        "sinks": {"sinks": torch.linspace(-1, 3, num_heads, device=device).to(dtype)},
    }
    for name, options in masks.items():
        call = samples.paged(ragged, num_heads, kv_heads, dim, 64, seed, 1, dtype, device)
        error = _attention_error(attend, call, options)
        case = f"{name}, {num_heads}:{kv_heads} heads of {dim}, {_name(dtype)}"
        yield Case("attend", case, error, TOLERANCE[dtype])


def check_prompts(device: torch.device, dtype: torch.dtype, seed: int = 0, most: int = MOST) -> Iterator[Case]:
    """Many new tokens of a row at once, as prompts have."""
    from selfspec.kernels.paged_attention import attend

    prompts = samples.paged([(most // 8, most // 8), (0, 70)], 8, 2, 128, 64, seed, dtype=dtype, device=device)
    yield Case("attend", f"prompts, {_name(dtype)}", _attention_error(attend, prompts, {}), TOLERANCE[dtype])


def _attention_error(attend: Callable[..., Tensor], call: samples.Paged, options: dict[str, Any]) -> float:
    """Relative error in norm against the twin in float32 on the same numbers; infinite where one is no number."""
    scale = call.queries.shape[-1] ** -0.5
    got = attend(call.queries, call.keys, call.values, call.layout, scale, **options).float()
    exact = {name: one.float() if isinstance(one, Tensor) else one for name, one in options.items()}
    wanted = reference.attend(call.queries.float(), call.keys.float(), call.values.float(), call.layout, scale, **exact)
    error = float((got - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def check_layers(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], seed: int = 0, most: int = MOST
) -> Iterator[Case]:
    """The kernels of fused layers, with norms of both kinds and each activation."""
    from selfspec.kernels.fused_layer import add_norm, gate, rotate

    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=dtype, device=device)

    def case(kernel: str, name: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Case:
        errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(got, wanted, strict=True)]
        error = float(torch.stack(errors).max())
        return Case(kernel, f"{name}, {_name(dtype)}", error if error == error else float("inf"), TOLERANCE[dtype])

    num_heads, kv_heads, dim = heads
    call = samples.paged([(most - 5, 5), (0, 0), (0, 1)], *heads, 64, seed, padding=1, dtype=dtype, device=device)
    qkv, angles = normal(len(call.queries), (num_heads + 2 * kv_heads) * dim), normal(2, most, dim // 2)
    for offset in (0.0, 1.0):
        norms = [Norm(normal(size), 1e-6, offset) for size in (dim, dim, most, most)]
        made = []
        for kernel in (rotate, reference.rotate):
            keys, values = torch.zeros_like(call.keys), torch.zeros_like(call.values)
            made.append((kernel(qkv, keys, values, call.layout, Rotation(*angles, *norms[:2])), keys, values))
        yield case("rotate", f"norms with offset {offset:g}", *made)
        hidden = normal(2, 3, most)
        calls = (add(*hidden, *norms[2:]) for add in (add_norm, reference.add_norm))
        yield case("add_norm", f"offset {offset:g}", *calls)
    for activation in ("silu", "gelu_tanh"):
        gate_up = normal(3, 2 * most)
        got, wanted = ([one(gate_up, activation)] for one in (gate, reference.gate))
        yield case("gate", activation, got, wanted)


def check_products(device: torch.device, dtype: torch.dtype, seed: int = 0, most: int = MOST) -> Iterator[Case]:
    """Products of few rows, with what stands before and after them; and a row's bits alone against those among 64."""
    from selfspec.kernels import prefetch, skinny_products

    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=dtype, device=device)

    hidden, x, norm = normal(64, most), normal(64, 3 * most), Norm(normal(most), 1e-6)
    wide, down = normal(3 * most, most) / most**0.5, normal(most, 3 * most) / (3 * most) ** 0.5
    squares = reference.squares_of(hidden)

    def results(module: Any, at: slice) -> dict[str, Tensor]:
        given = hidden[at], squares[at], norm
        added, sums = module.product_add(x[at], down, None, hidden[at])
        return {
            "norm_product": module.norm_product(*given, wide),
            "gate_product": module.gate_product(*given, wide[:most], wide[most : 2 * most], "silu"),
            "product_add": added,
            "squares": sums,
        }

    whole = results(skinny_products, slice(0, 64))
    for name, wanted in results(reference, slice(0, 64)).items():
        error = float((whole[name].float() - wanted.float()).norm() / wanted.float().norm())
        yield Case(name, _name(dtype), error if error == error else float("inf"), TOLERANCE[dtype])
    if device.type == "cuda":  # the interpreter's products are a library's, and it has no cache
        kept = down.clone()
        prefetch.prefetch(down)
        yield Case("prefetch", _name(dtype), float((down != kept).sum()), 0.0)
        for count in (1, 2, 5, 16, 17, 32, 33):
            for name, got in results(skinny_products, slice(0, count)).items():
                differing = float((got != whole[name][:count]).sum())
                yield Case(name, f"bits of {count} rows among 64, {_name(dtype)}", differing, 0.0)


def check_layer_attention(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], seed: int = 0, most: int = MOST
) -> Iterator[Case]:
    """Rotation, write and attention in one launch, again and again: which program ends last differs."""
    from selfspec.kernels.layer_attention import rotate_attend

    num_heads, kv_heads, dim = heads
    ragged = [(most - 5, 5), (0, 0), (most // 4, 1), (255, 3), (0, 2)]
    call = samples.paged(ragged, num_heads, kv_heads, dim, 64, seed, 1, dtype, device)
    count, rng = len(call.queries), torch.Generator(device).manual_seed(seed)
    qkv = torch.randn(count, (num_heads + 2 * kv_heads) * dim, generator=rng, dtype=dtype, device=device)
    angle = 6 * torch.rand(call.layout.most_tokens, dim // 2, generator=rng, device=device)
    counters = torch.zeros(len(ragged) * call.layout.most_new * kv_heads, dtype=torch.int32, device=device)
    given = (call.layout, Rotation(angle.cos().to(dtype), angle.sin().to(dtype)), dim**-0.5, counters)
    for window in (None, 130):
        found = []
        for kernel in (reference.rotate_attend, *[rotate_attend] * (20 if device.type == "cuda" else 1)):
            pages = call.keys.clone(), call.values.clone()
            found.append([kernel(qkv, *pages, *given, window), *(one.nan_to_num() for one in pages)])
        wanted, first, *others = found
        named = f"window {window}, {num_heads}:{kv_heads} heads of {dim}, {_name(dtype)}"
        for one, other in zip(first, wanted, strict=True):
            error = float((one.float() - other.float()).norm() / other.float().norm())
            yield Case("rotate_attend", named, error if error == error else float("inf"), TOLERANCE[dtype])
        wrong = sum(int((a != b).sum()) for one in others for a, b in zip(one, first, strict=True))
        yield Case("rotate_attend", f"{named}, again", float(wrong), 0.0)
        yield Case("rotate_attend", f"{named}, counters", float(counters.abs().sum()), 0.0)


def check_pick(device: torch.device, seed: int = 0, most: int = MOST) -> Iterator[Case]:
    """Picks over vocabularies of real models; and the noise, against the processor's, as what it makes of zeros."""
    from selfspec.kernels.fused_pick import pick

    rng = torch.Generator().manual_seed(seed)
    vocabularies = (32000, 128256, 151936) if most >= 1024 else (500,)
    for vocab in vocabularies:
        kinds = [kind for kind in KINDS for _ in range(3)]
        logits = (4 * torch.randn(len(kinds), vocab, generator=rng)).to(device)
        sampling = samples.sampling(kinds, seed, device)
        got, _ = pick(logits, sampling)
        wanted, _ = reference.pick(logits, sampling)
        yield Case("pick", f"vocabulary of {vocab}", _regret(logits, sampling, got, wanted), NEAR)
        zeros = torch.zeros_like(logits)
        hot = samples.sampling([(1.0, 0, 1.0, 0.0)] * len(kinds), seed, device)
        got, _ = pick(zeros, hot)
        noise = gumbel(hot.seeds.cpu(), hot.positions.cpu(), vocab)
        lost = noise.max(-1).values - noise.gather(1, got.cpu()[:, None])[:, 0]
        yield Case("pick", f"noise over {vocab} tokens, against the processor's", float(lost.max()), NEAR)


def _regret(logits: Tensor, sampling: SamplingTensors, got: Tensor, wanted: Tensor) -> float:
    """How far below its twin's a kernel's pick scores, at most; 0 where they are the same."""
    scaled = logits / torch.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    noise = gumbel(sampling.seeds, sampling.positions, logits.shape[1])
    scores = scaled + torch.where(sampling.temperature[:, None] > 0, noise, 0)
    lost = scores.gather(1, wanted[:, None]) - scores.gather(1, got[:, None])
    return float(lost.abs().max())


def check_prepare(device: torch.device, seed: int = 0) -> Iterator[Case]:
    """Every tensor of the calls of a round, with and without draft steps, for numbers of slots of any kind."""
    from selfspec.kernels.prepare_round import prepare

    rng = torch.Generator().manual_seed(seed)
    for slots, width in ((1, 1), (1, 5), (6, 3), (32, 8)):
        state = torch.randint(0, 9, (slots, GIVEN + width), generator=rng)
        state[:, 1] = torch.randint(0, 40, (slots,), generator=rng)
        state[:, 2] = torch.randint(1, 12, (slots,), generator=rng)
        state[:, 3] = torch.randint(0, width, (slots,), generator=rng)
        state[:, 6:9] = torch.rand(slots, 3, generator=rng).view(torch.int32).long()
        pages = torch.randint(0, 99, (slots, 16), generator=rng).int()
        for has_drafts in (False, True):
            given = state.to(device), pages.to(device), 4, width, 64, has_drafts
            found = [tensors_of(one(*given)) for one in (prepare, reference.prepare)]
            wrong = sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
            yield Case("prepare", f"{slots} rows of {width}", float(wrong), 0.0)


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in tensors_of(part)] if isinstance(value, (tuple, list)) else []


def check_accept(device: torch.device, seed: int = 0) -> Iterator[Case]:
    """Records and rows, over random drafts that are often right."""
    from selfspec.kernels.fused_accept import accept

    rng = torch.Generator().manual_seed(seed)
    slots, width = 64, 9
    counts = torch.randint(0, width + 1, (slots,), generator=rng)
    starts = torch.arange(slots) * width
    fed, picks = torch.randint(0, 3, (2, slots * width), generator=rng)
    fed[1:] = torch.where(torch.rand(slots * width - 1, generator=rng) < 0.8, picks[:-1], fed[1:])
    state = torch.randint(1, 12, (slots, GIVEN + width), generator=rng)
    state[:, EOS:GIVEN] = torch.randint(-1, 40, (slots, GIVEN - EOS), generator=rng)
    given = [one.to(device) for one in (fed, picks, starts.int(), counts.int())]
    made = []
    for kernel in (accept, reference.accept):
        rows = state.clone().to(device)
        made.append([*kernel(rows, *given, width), rows])
    wrong = sum(int((a != b).sum()) for a, b in zip(*made, strict=True))
    yield Case("accept", f"{slots} rows", float(wrong), 0.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
