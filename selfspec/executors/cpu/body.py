"""`CompiledBody`: all layers of a call in one compiled function, with weights packed for products of a few rows.

The cost of a decoded token is that of reading the weights. Ordinary matrix products read them again for every few rows,
and a small model spends as much time between its products as in them. In `selfspec/kernels/cpu`, a dozen rows cost
little more than one, and attention reads keys and values directly from the paged cache. The bits of a token's results
do not depend on the other tokens of its call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.executors.cpu.buffer_pool import BufferPool
from selfspec.executors.cpu.packed import (
    Packed,
    PackedExitHeads,
    PackedInt4,
    RoundedLayers,
    addresses_of,
    fits_half,
    pack_layer,
)
from selfspec.executors.cpu.rotary import RotaryTables
from selfspec.executors.cpu.shadow import shadow_picks
from selfspec.kernels import compiled_call as c
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.kernels.layout import Norm
from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.gguf_blocks import BlockWeight, release
from selfspec.model.kv_cache import PackedRows, PagedCache
from selfspec.model.llama_weights import Layer, Linear, LlamaWeights

FEW = 12  # calls of at most so many tokens are bound by reading weights
CHECKSUM_BYTES = 1 << 20  # bytes of weights per checksum
DTYPES = (torch.float32, torch.bfloat16)


class CompiledBody:
    """Layers, embedding and head of a Llama-shaped model as compiled functions, with `SplitModel`'s `run` and `logits`.

    It holds packed copies of the weights: the blocks of a GGUF file as they are, else 2 bytes per weight where all of
    them are bfloat16 numbers, else 4. `refresh` updates the copies after the model's weights were edited in place.
    Activations are float32, for models in bfloat16, too. Only the inputs of products may be rounded: to bfloat16 for
    weights of that dtype, to 23 bits for blocks. Keys and values are float32, too, or rounded to two bytes where the
    model's definition says so, see `selfspec.kernels.rounding`.

    Raises:
        NoCompilerError: see `selfspec.kernels.compiler.library`.
    """

    def __init__(self, weights: LlamaWeights) -> None:
        self._lib, self.head_dim, self.layers = c.functions(), weights.head_dim, weights.layers
        self._copies: list[tuple[Tensor, Tensor, float]] = []  # (float32 copy, the model's weight, number added to it)
        one, embedding, head, norm = self.layers[0], weights.embedding, weights.head, weights.norm
        self.last_norm = self._copied(norm.weight, norm.offset)
        self.embedding, self.head, self.norm = embedding, head, Norm(self.last_norm, norm.eps)
        if embedding.dtype != torch.float32:
            self.embedding = self._copied(embedding)
            weight = self.embedding if head.weight is embedding else self._copied(head.weight)
            self.head = Linear(weight, None if head.bias is None else self._copied(head.bias))
        self._rotary = RotaryTables(weights.rotary, [layer.layer_type for layer in self.layers])
        self.has_two_byte_cache = weights.activation_bytes == 2
        """Whether keys and values are kept in two bytes, see `PagedCache.two_byte_layer`; else in float32."""
        self._sizes = {
            "heads": len(one.q.weight) // self.head_dim,
            "kv_heads": len(one.k.weight) // self.head_dim,
            "head_dim": self.head_dim,
            "hidden": self.embedding.shape[1],
            "inner": len(one.up.weight),
            "tables": self._rotary.count,
            "activation": c.ACTIVATIONS[weights.activation],
        }
        eps = {"eps": one.norm.eps, "mlp_eps": one.mlp_norm.eps, "qk_eps": one.q_norm.eps if one.q_norm else 0.0}
        self._numbers = {**eps, "scale": one.scale, "embed_scale": weights.embed_scale}
        memory = LargePageAllocator()
        self._products = []
        for layer in self.layers:
            self._products.append(pack_layer(layer, Packed, memory))
            release([linear.weight for linear in layer.linears()])
        self.packed_head = Packed([head], memory)
        untied = head.weight is not embedding and isinstance(embedding, BlockWeight)
        self._packed_embedding = Packed([Linear(embedding, None)], memory) if untied else None
        release([head.weight, embedding])
        self.rounded = RoundedLayers(self.layers, head)
        self._norms = [[n and self._copied(n.weight, n.offset) for n in x.norms] for x in self.layers]
        self._structs: WeakKeyDictionary[PagedCache, tuple[Any, Any, dict[int, Any]]] = WeakKeyDictionary()
        heads, copied = [w for w in (head.weight, head.bias) if w is not None], [own for _, own, _ in self._copies]
        every = [embedding, *heads, *copied, *(w for layer in self.layers for w in layer.weights())]
        self._weights = [w for w in {id(w): w for w in every}.values() if not isinstance(w, BlockWeight)]
        self._tracked = [w for w in self._weights if not w.is_inference()]  # inference tensors count no edits
        self._num_edits, self._sums = self._count_edits(), self._checksums()
        self.version = 0
        """How often `refresh` found edited weights."""
        self.buffer_pool = BufferPool()
        """Buffers of compiled rounds; see `selfspec.executors.cpu.executor`."""
        self.threads_for_few: int | None = None
        """Maximum threads for calls of at most `FEW` tokens. None: all of torch's threads."""
        self.exit_heads = PackedExitHeads()
        """Trained heads of exit layers, packed."""

    @staticmethod
    def serves(weights: LlamaWeights) -> bool:
        """Whether the compiled layers support a model: on CPU, in float32 or bfloat16, with layers of equal numbers."""
        first, like = weights.layers[0], weights.embedding
        is_alike = all(x.scale == first.scale and _eps_of(x) == _eps_of(first) for x in weights.layers)
        # The compiled layers have one number for the norms before and after a sublayer, and one for queries and keys.
        norm, mlp, q, k, post, post_mlp = _eps_of(first)
        is_paired = post in (None, norm) and post_mlp in (None, mlp) and q == k and weights.norm.eps == norm
        if any(isinstance(w, BlockWeight) and not w.blocks.is_packable for w in [like, *weights.matrices()]):
            return False
        return is_alike and is_paired and like.device.type == "cpu" and like.dtype in DTYPES

    @staticmethod
    def bytes_of(weights: LlamaWeights) -> int:
        """The approximate memory of packed copies of a model's weights, in bytes.

        Raises:
            NoCompilerError: see `selfspec.kernels.compiler.library`.
        """
        packed, read = 0, {id(w): w for w in [weights.embedding, *weights.matrices()]}
        for weight in read.values():
            if isinstance(weight, BlockWeight):
                packed += weight.blocks.nbytes
            elif weight is not weights.embedding:
                packed += weight.numel() * (2 if fits_half(weight) else 4)
        widened = {id(w): w for w in (weights.embedding, weights.head.weight) if w.dtype != torch.float32}
        return packed + sum(4 * w.numel() for w in widened.values())

    def head_rows(self) -> c.RowTable:
        """The head's weights by row. Packed blocks are read there, so that no float32 weights take memory."""
        if self.packed_head.struct.kind < c.MIXED:
            return c.RowTable(self.head.weight.data_ptr(), None)
        return c.RowTable(None, ctypes.pointer(self.packed_head.struct))

    def embedding_rows(self) -> c.RowTable:
        """The embedding by row: the head's weights where they are the same."""
        if self._packed_embedding is not None:
            return c.RowTable(None, ctypes.pointer(self._packed_embedding.struct))
        tied = self.head.weight is self.embedding
        return self.head_rows() if tied else c.RowTable(self.embedding.data_ptr(), None)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one token reads: those of all products and norms."""
        products = [self.packed_head, *(one for layer in self._products for one in layer)]
        norms = [self.last_norm, *(n for own in self._norms for n in own if n is not None)]
        return sum(one.num_bytes for one in products) + sum(n.nbytes for n in norms)

    @cached_property
    def is_rounded(self) -> bool:
        """Whether the layers' weights take less than a byte each, so that 4-bit copies would hardly be faster."""
        numbers = sum(linear.weight.numel() for layer in self.layers for linear in layer.linears())
        return sum(one.num_bytes for layer in self._products for one in layer) < numbers

    def run(
        self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Run layers [start, stop); see `SplitModel.run`."""
        given = (given if start == 0 else given.float()).contiguous()
        x = self.last_norm.new_empty(rows.num_tokens, self.embedding.shape[1])
        if not rows.num_tokens:
            return x
        embedding = ctypes.byref(self.embedding_rows()) if start == 0 else None
        model, layers = self.structs(rows.cache)
        call, longest = self._call(rows)
        places = None
        if taps:
            places = (ctypes.c_void_p * (stop - start))()
            for depth in taps:
                if start < depth <= stop:
                    taps[depth] = tap = torch.empty_like(x)
                    places[depth - start - 1] = tap.data_ptr()
        threads = self.threads(len(x))
        scratch = self._lib.selfspec_scratch_floats(ctypes.byref(model), longest)
        buffers = self._lib.selfspec_buffer_floats(ctypes.byref(model), len(x))
        memory = x.new_empty(buffers + scratch * threads)
        last = self.last_norm.data_ptr() if stop == len(self.layers) else None
        self._lib.selfspec_run(
            *(ctypes.byref(model), ctypes.byref(layers, start * ctypes.sizeof(c.Layer)), stop - start),
            *(ctypes.byref(call), given.data_ptr(), embedding, x.data_ptr(), places, last),
            *(memory.data_ptr(), memory.data_ptr() + 4 * buffers, scratch, threads),
        )
        return x

    def logits(self, hidden: Tensor, normed: bool) -> Tensor:
        """Logits `[N, vocab]` from hidden states; see `SplitModel.logits`. `normed`: after the final norm."""
        if hidden.requires_grad:  # an exit head is trained; only torch's products have gradients
            hidden = hidden.float()
            hidden = hidden if normed else F.rms_norm(hidden, hidden.shape[-1:], self.norm.weight, self.norm.eps)
            return F.linear(hidden, self.head.weight, self.head.bias)
        return self.product(self.packed_head, hidden, norm=not normed)

    def subset_logits(self, hidden: Tensor, subset: Subset) -> Tensor:
        """Logits over a part of the vocabulary; see `SplitModel.subset_logits`. `hidden`: before the final norm."""
        return self.product(self.draft_head(subset)[0], hidden, norm=True)

    def through_heads(
        self, hidden: Tensor, heads: ExitHeads, layers: Sequence[int], last: Tensor | None = None
    ) -> Tensor:
        """Hidden states `[K, N, hidden_size]` through exit heads; see `SplitModel.through_heads`."""
        hidden, count = hidden.float().contiguous(), hidden.shape[1]
        out, threads = hidden.clone(), self.threads(count)
        last = None if last is None else last.float().contiguous()
        before = None if last is None else addresses_of(last)
        for given, changed, layer in zip(hidden, out, layers, strict=True):
            packed = self.exit_heads.of(heads, layer)
            if packed is not None and count:
                head = ctypes.byref(packed.struct)
                memory = out.new_empty(self._lib.selfspec_exit_head_floats(head, count, threads))
                places = changed.data_ptr(), memory.data_ptr()
                self._lib.selfspec_exit_head(head, given.data_ptr(), before, count, *places, threads)
        return out

    def shadow_picks(self, *inputs: Any) -> tuple[Tensor, Tensor] | None:
        """See `selfspec.executors.cpu.shadow.shadow_picks`."""
        return shadow_picks(self, *inputs)

    def draft_head(self, subset: Subset | None, rounded: bool = False) -> tuple[Packed, Tensor | None]:
        """The head for drafts: its packed weights, and the token ids of its outputs (None: the whole vocabulary).

        Args:
            subset: the part of the vocabulary to draft over; None: all of it.
            rounded: use 4-bit weights.
        """
        if subset is None:
            return self.rounded.head if rounded else self.packed_head, None
        kind = PackedInt4 if rounded else Packed
        if kind not in subset.made:
            subset.made[kind] = kind([subset.linear], LargePageAllocator())
        return subset.made[kind], subset.tokens

    def product(self, packed: Packed, hidden: Tensor, norm: bool) -> Tensor:
        """The product `[N, out]` of `hidden`, `[N, in]`, with packed weights. `norm`: apply the final norm first."""
        if not len(hidden):
            return hidden.new_empty(0, packed.num_outputs)
        hidden = hidden.float().contiguous()
        out, threads = hidden.new_empty(len(hidden), packed.num_outputs), self.threads(len(hidden))
        product = ctypes.byref(packed.struct)
        memory = hidden.new_empty(self._lib.selfspec_linear_floats(product, len(hidden), threads))
        weight = self.last_norm.data_ptr() if norm else None
        self._lib.selfspec_linear(
            *(product, hidden.data_ptr(), len(hidden), out.data_ptr()),
            *(weight, self.norm.eps, memory.data_ptr(), threads),
        )
        return out

    def refresh(self, deeply: bool = False) -> None:
        """Pack the weights again if the model's weights were edited in place since the last call.

        Args:
            deeply: compare checksums of all weights, which also detects edits through `.data` or numpy. Weights made in
                inference mode count no edits, so models that have some are compared this way in every call. Weights
                in blocks cannot be edited.

        Raises:
            ValueError: the shape of a weight changed.
        """
        num_edits, deeply = self._count_edits(), deeply or len(self._tracked) < len(self._weights)
        sums = self._checksums() if deeply or num_edits != self._num_edits else self._sums
        if num_edits == self._num_edits and sums == self._sums:
            return
        for copy, own, _ in self._copies:
            if copy.shape != own.shape:
                raise ValueError(
                    f"a weight {list(copy.shape)} was replaced by one {list(own.shape)}; load the model again"
                )
        for layer in self._products:
            for one in layer:
                one.fill()
        self.packed_head.fill()
        self.rounded.fill()
        self._structs.clear()  # the packed weights may have moved
        for copy, own, offset in self._copies:
            copy.copy_(own.detach())
            if offset:
                copy.add_(offset)
        self.version += 1
        self._num_edits, self._sums = num_edits, sums

    def threads(self, num_tokens: int) -> int:
        """The number of threads for a call of so many tokens: at most `torch.get_num_threads()`."""
        limit = torch.get_num_threads()
        return limit if self.threads_for_few is None or num_tokens > FEW else min(limit, self.threads_for_few)

    def reach(self, rows: PackedRows) -> tuple[int, tuple[Tensor, Tensor]]:
        """The tokens of the call's longest row, and rotary tables that cover them.

        The caller keeps these tables: another thread may replace them in the body.
        """
        return rows.most_tokens, self.tables(rows.most_tokens)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least `length` positions; see `RotaryTables.of`."""
        return self._rotary.of(length)

    def _copied(self, weight: Tensor, offset: float = 0.0) -> Tensor:
        """A float32 copy of a weight, which `refresh` updates, plus a number."""
        with torch.inference_mode(False):  # the copy is used in later calls, outside of inference mode, too
            copy = weight.detach().to(torch.float32, copy=True)
            if offset:
                copy.add_(offset)
        self._copies.append((copy, weight, offset))
        return copy

    def _count_edits(self) -> int:
        """The number of edits in place, summed over all weights."""
        return sum([w._version for w in self._tracked])

    def _checksums(self) -> bytes:
        """Checksums of all weights that can be edited, one for every `CHECKSUM_BYTES`."""
        weights = [w.detach().contiguous() for w in self._weights]
        places = [w.data_ptr() + at for w in weights for at in range(0, w.nbytes, CHECKSUM_BYTES)]
        sizes = [min(CHECKSUM_BYTES, w.nbytes - at) for w in weights for at in range(0, w.nbytes, CHECKSUM_BYTES)]
        out, count = (ctypes.c_uint64 * len(places))(), len(places)
        arrays = (ctypes.c_void_p * count)(*places), (ctypes.c_int64 * count)(*sizes)
        self._lib.selfspec_checksums(*arrays, count, out, torch.get_num_threads())
        return bytes(out)

    def _call(self, rows: PackedRows) -> tuple[c.Call, int]:
        """The structure of a packed call, and the longest row's length in tokens. It is cached in `rows.plans`."""
        known = rows.plans.get("compiled")
        if known is None:
            longest, (cos, sin) = self.reach(rows)
            spans = rows.spans
            width = max(len(span.pages) for span in spans)
            firsts = [0, *accumulate(span.length for span in spans)]
            pages = [page for span in spans for page in (*span.pages, *[0] * (width - len(span.pages)))]
            positions = [at for span in spans for at in range(span.start, span.start + span.length)]
            lists = [(ctypes.c_int64 * len(each))(*each) for each in (positions, firsts, pages)]
            places = [ctypes.addressof(each) for each in lists]
            call = c.Call(rows.num_tokens, len(spans), *places, width, cos.data_ptr(), sin.data_ptr())
            known = rows.plans["compiled"] = call, longest, (lists, cos, sin)  # the last part keeps the memory
        return known[0], known[1]

    def structs(self, cache: PagedCache) -> tuple[c.Model, Any]:
        """The structures of the model and of its layers, which point to the keys and values of a cache."""
        return self._all_structs(cache)[:2]

    def _all_structs(self, cache: PagedCache) -> tuple[c.Model, Any, dict[int, Any]]:
        """`structs`, and the 4-bit layers that `rounded_structs` has made for this cache, by their number."""
        known = self._structs.get(cache)
        if known is None:
            shape, made = self.last_norm.new_empty(0, self._sizes["kv_heads"], self.head_dim), []
            keep = cache.two_byte_layer if self.has_two_byte_cache else cache.layer
            for one, products, norms in zip(self.layers, self._products, self._norms, strict=True):
                places = [None if n is None else n.data_ptr() for n in norms]
                places += [each.data_ptr() for each in keep(one.layer_idx, shape, shape)]
                places += [None] * (len(norms) + 4 - len(places))  # without scales
                table = self._rotary.index(one.layer_type)
                made.append(c.Layer(*(p.struct for p in products), *places, one.window or 0, table))
            model = c.Model(page_size=cache.page_size, **self._sizes, **self._numbers)
            known = self._structs[cache] = model, (c.Layer * len(made))(*made), {}
        return known

    def rounded_structs(self, cache: PagedCache, count: int) -> tuple[c.Model, Any]:
        """The structures of the model and of its first `count` layers with 4-bit weights."""
        model, layers, known = self._all_structs(cache)
        if count not in known:
            known[count] = self.rounded.structs(layers, count)
        return model, known[count]


def _eps_of(layer: Layer) -> list[float | None]:
    return [norm and norm.eps for norm in layer.norms]
