"""Compile every kernel for a device that need not be there, exactly as it is launched; registers and spills.

A launch is intercepted instead of run, and what it passes (types, alignment, constants, warps) is compiled ahead of
time. Triton ships the assembler and the tool that reads registers from its output.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from selfspec.kernels import (
    fused_accept,
    fused_layer,
    fused_pick,
    kv_scatter,
    layer_attention,
    paged_attention,
    prefetch,
    prepare_round,
    skinny_products,
)
from selfspec.kernels.layout import Norm, Rotation
from tests.kernels import samples

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Launch(NamedTuple):
    """One kernel as some call launches it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """What the assembler made of a launch."""

    call: str
    kernel: str
    registers: int
    stack_bytes: int  # what is spilled lies here
    shared_bytes: int
    warps: int
    copies: list[int]  # bytes of each asynchronous copy to shared memory, in the code
    under_way: int  # groups of such copies that may be under way while a loop computes
    products: list[str]  # instructions of tensor cores
    prefetches: int  # instructions of them, per thread


@contextmanager
def intercepted() -> Iterator[list[Launch]]:
    """Launches within are written down instead of made; what they would have written stays uninitialised."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {name: kwargs.pop(name) for name in list(kwargs) if name in self.arg_names}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        launches.append(Launch(self, arguments, kwargs))

    with patch.object(JITFunction, "run", run):
        yield launches


def source_of(launch: Launch) -> ASTSource:
    """The launch's signature: types, and what Triton itself would specialise on."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = free and isinstance(value, int) and value % 16 == 0
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(call: str, launch: Launch) -> Compiled:
    """Assemble one launch for compute capability 9.0 (Hopper).

    Raises:
        triton.CompilationError: Triton refuses the kernel.
        RuntimeError: the assembler does.
    """
    made = triton.compile(source_of(launch), target=GPUTarget("cuda", 90, 32), options=launch.options)
    registers, split = resources(made.asm["cubin"])
    metadata, code = made.metadata, made.asm["ptx"]
    copies = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*, 0x([0-9a-f]+)", code)]
    under_way = max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", code)), default=0)
    products = sorted({*re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.[\w.]*m\d+n\d+k\d+", code)})
    name = launch.kernel.fn.__name__
    found = metadata.shared, metadata.num_warps, copies, under_way, products, code.count("prefetch.global.L2")
    return Compiled(call, name, registers, split, *found)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, split bytes per thread) of an assembled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    if found is None:
        raise RuntimeError(f"{tool.name} says nothing of registers: {told.stdout.strip() or told.stderr.strip()!r}")
    return int(found[1]), int(found[2])


def calls() -> dict[str, Callable[[], Any]]:
    """Calls in the shapes of real models, bf16, whose launches are to be compiled."""

    def attend(dim: int, heads: int, kv_heads: int, new: int, **options: Any) -> Callable[[], Any]:
        one = samples.paged([(70, new)], heads, kv_heads, dim, 64, dtype=torch.bfloat16)
        layout = one.layout._replace(most_tokens=options.pop("most_tokens", 2048))
        return lambda: paged_attention.attend(one.queries, one.keys, one.values, layout, dim**-0.5, **options)

    def pick(*kinds: tuple[float, int, float, float]) -> Callable[[], Any]:
        return lambda: fused_pick.pick(torch.zeros(len(kinds), 128256), samples.sampling(kinds, 0))

    def pick_part() -> None:
        how = samples.sampling([(0.8, 50, 0.9, 0.0)], 0)
        fused_pick.pick(torch.zeros(1, 16032), how, names=torch.arange(16032))

    def scatter() -> None:
        one = samples.paged([(70, 5)], 8, 8, 128, 64, dtype=torch.bfloat16)
        kv_scatter.scatter(one.key, one.value, one.keys, one.values, one.layout.slots)

    def accept() -> None:
        ids, small = torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        fused_accept.accept(torch.zeros(2, 25, dtype=torch.int64), ids, ids, small, small, 8)

    def prepare(slots: int, width: int, has_drafts: bool) -> Callable[[], Any]:
        state, pages = torch.zeros(slots, 17 + width, dtype=torch.int64), torch.zeros(slots, 64, dtype=torch.int32)
        return lambda: prepare_round.prepare(state, pages, 64, width, 4096, has_drafts)

    def norm(size: int, offset: float = 0.0) -> Norm:
        return Norm(torch.zeros(size, dtype=torch.bfloat16), 1e-6, offset)

    def add_norm(size: int, *norms: Norm | None) -> Callable[[], Any]:
        hidden = torch.zeros(2, size, dtype=torch.bfloat16)
        return lambda: fused_layer.add_norm(hidden, hidden, *norms)

    def rotate(heads: int, kv_heads: int, dim: int, *norms: Norm) -> Callable[[], Any]:
        one = samples.paged([(70, 5)], heads, kv_heads, dim, 64, dtype=torch.bfloat16)
        qkv = torch.zeros(5, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        rotation = Rotation(*angles_of(dim), *norms)
        return lambda: fused_layer.rotate(qkv, one.keys, one.values, one.layout, rotation)

    def gate(inner: int, activation: str) -> Callable[[], Any]:
        return lambda: fused_layer.gate(torch.zeros(2, 2 * inner, dtype=torch.bfloat16), activation)

    def product(
        kind: str, rows: int, size: int, inner: int, outputs: int, dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[], Any]:
        hidden, weight = torch.zeros(rows, size, dtype=dtype), torch.empty(2 * inner, size, dtype=dtype)
        given = hidden, torch.zeros(rows, size // 32), Norm(torch.zeros(size, dtype=dtype), 1e-6)
        if kind == "norm":
            return lambda: skinny_products.norm_product(*given, weight[:outputs])
        if kind == "gate":
            return lambda: skinny_products.gate_product(*given, weight[:inner], weight[inner:], "silu")
        x, down = torch.zeros(rows, inner, dtype=dtype), torch.empty(size, inner, dtype=dtype)
        return lambda: skinny_products.product_add(x, down, None, hidden)

    def rotate_attend(
        heads: int, kv_heads: int, dim: int, new: int, window: int | None, *norms: Norm
    ) -> Callable[[], Any]:
        one = samples.paged([(70, new)], heads, kv_heads, dim, 64, dtype=torch.bfloat16)
        qkv = torch.zeros(new, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        rotation = Rotation(*angles_of(dim), *norms)
        layout, counters = one.layout._replace(most_tokens=4096), torch.zeros(512, dtype=torch.int32)
        return lambda: layer_attention.rotate_attend(
            qkv, one.keys, one.values, layout, rotation, dim**-0.5, counters, window
        )

    def angles_of(dim: int) -> Tensor:
        return torch.zeros(2, 128, dim // 2, dtype=torch.bfloat16)

    products = {
        f"{kind} and product of {rows} rows, {size}": product(kind, rows, size, inner, outputs)
        for kind in ("norm", "gate", "add")
        for rows, size, inner, outputs in ((1, 4096, 14336, 6144), (32, 4096, 14336, 6144), (64, 4096, 14336, 6144),
                                           (5, 576, 1536, 960))
    }  # fmt: skip
    return products | {
        "gate and product of 32 rows, 4096, float32": product("gate", 32, 4096, 14336, 6144, torch.float32),
        "squares of 5 rows, 4096": lambda: skinny_products.squares_of(torch.zeros(5, 4096, dtype=torch.bfloat16)),
        "rotate and attend, 1 token, 32:8 heads of 128": rotate_attend(32, 8, 128, 1, None),
        "rotate and attend, 5 tokens, 32:8 heads of 128, window, norms": rotate_attend(
            32, 8, 128, 5, 64, norm(128), norm(128)
        ),
        "rotate and attend, 5 tokens, 9:3 heads of 64": rotate_attend(9, 3, 64, 5, None),
        "prefetch": lambda: prefetch.prefetch(torch.empty(4096, 4096, dtype=torch.bfloat16)),
        "add_norm, 4096": add_norm(4096, norm(4096)),
        "add_norm, 576": add_norm(576, norm(576)),
        "add_norm, 8192, no norm": add_norm(8192, None),
        "add_norm, 5376, a norm before": add_norm(5376, norm(5376, 1.0), norm(5376, 1.0)),
        "add_norm, 16384": add_norm(16384, norm(16384)),
        "rotate, 32:8 heads of 128": rotate(32, 8, 128),
        "rotate, 32:8 heads of 128, norms": rotate(32, 8, 128, norm(128), norm(128)),
        "rotate, 8:4 heads of 256, norms of Gemma": rotate(8, 4, 256, norm(256, 1.0), norm(256, 1.0)),
        "gate, silu, 14336": gate(14336, "silu"),
        "gate, gelu, 21504": gate(21504, "gelu_tanh"),
        "scatter, 8 key heads of 128": scatter,
        "attend, 1 token, 32:8 heads of 128": attend(128, 32, 8, 1),
        "attend, 5 tokens, 32:8 heads of 128": attend(128, 32, 8, 5),
        "attend, 16 tokens, 32:8 heads of 128": attend(128, 32, 8, 16),
        "attend, 5 tokens, 32:32 heads of 128": attend(128, 32, 32, 5),
        "attend, 5 tokens, 9:3 heads of 64": attend(64, 9, 3, 5),
        "attend, 5 tokens, 32:8 heads of 64": attend(64, 32, 8, 5),
        "attend, 1 token, 16:8 heads of 256": attend(256, 16, 8, 1),
        "attend, 5 tokens, 32:8 heads of 128, one split": attend(128, 32, 8, 5, most_tokens=100),
        "attend, 5 tokens, 32:8 heads of 128, exact": attend(128, 32, 8, 5, tile_rows=16, split=256),
        "attend, prompt of 128, 32:8 heads of 128, exact": attend(128, 32, 8, 128, tile_rows=64, split=1024),
        "attend, prompt of 128, 16:8 heads of 256, exact": attend(256, 16, 8, 128, tile_rows=64, split=1024),
        "attend, 5 tokens, 16:8 heads of 256, window, softcap": attend(256, 16, 8, 5, window=64, softcap=50.0),
        "attend, 5 tokens, 64:8 heads of 64, window, sinks": attend(64, 64, 8, 5, window=64, sinks=torch.zeros(64)),
        "attend, 5 tokens, 40:8 heads of 128, chunks": attend(128, 40, 8, 5, chunk=8192),
        "attend, prompt of 512, 32:8 heads of 128": attend(128, 32, 8, 512),
        "attend, prompt of 512, 16:8 heads of 256, sinks": attend(256, 16, 8, 512, sinks=torch.zeros(16)),
        "pick, greedy, 128256 tokens": pick((0.0, 0, 1.0, 0.0)),
        "pick, sampled, 128256 tokens": pick((0.8, 0, 1.0, 0.0)),
        "pick, filtered, 128256 tokens": pick((0.8, 50, 0.9, 0.0)),
        "accept, 8 places": accept,
        "prepare, 256 rows": prepare(256, 1, False),
        "prepare, 32 rows of 8 places, drafts": prepare(32, 8, True),
        "pick, filtered, 16032 of the tokens": pick_part,
    }


def compile_all() -> list[Compiled]:
    """Every kernel that the calls launch."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled where TRITON_INTERPRET is set; unset it")
    done = []
    for name, call in calls().items():
        with intercepted() as launches:
            call()
        done += [compile_launch(name, launch) for launch in launches]
    return done
