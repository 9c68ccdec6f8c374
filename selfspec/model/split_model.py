"""`SplitModel`: any range of a model's layers over packed rows, and the model's head after any layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from selfspec.model import attention_backends as backends
from selfspec.model.attention import NAME, attend
from selfspec.model.draft_vocabulary import DraftHead, Frequencies, Subset, default_size
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.kv_cache import PackedRows, PagedCache
from selfspec.model.llama_weights import LlamaWeights, activation_bytes
from selfspec.model.quiet_imports import quiet_imports
from selfspec.model.row_counts import RowCounts
from selfspec.model.shortlist import ShortHead, sample_of
from selfspec.model.tensor_parallel import ranks_of
from selfspec.model.views import base_of, family_of, head_view, layer_view, make_twin, unwrap

with quiet_imports():
    from transformers import AttentionInterface

AttentionInterface.register(NAME, attend)  # no mask function: transformers then builds no mask

Value = TypeVar("Value")
Taps = dict[int, Tensor | None]  # number of layers -> hidden states after so many, set by the call


class Layers(Protocol):
    """A faster implementation of layers than the views. The methods do what those of `SplitModel` do."""

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor: ...
    def refresh(self, deeply: bool = False) -> None: ...


class Body(Layers, Protocol):
    """A faster implementation of layers and head than the views. The methods do what those of `SplitModel` do."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def is_rounded(self) -> bool: ...
    @property
    def version(self) -> int: ...
    def logits(self, hidden: Tensor, normed: bool) -> Tensor: ...
    def subset_logits(self, hidden: Tensor, subset: Subset) -> Tensor: ...
    def through_heads(
        self, hidden: Tensor, heads: ExitHeads, layers: Sequence[int], last: Tensor | None = None
    ) -> Tensor: ...
    def shadow_picks(self, *inputs: Any) -> tuple[Tensor, Tensor] | None: ...


class SplitModel:
    """A causal LM whose layers can run in parts. It shares the weights of the model, which does not change.

    Args:
        attention: the name of an attention backend, see `selfspec.model.attention_backends`; "auto":
            `triton` on CUDA where it is installed, else `sdpa`.

    Raises:
        UnsupportedModelError: the family cannot be split (recurrent layers, own attention code), with the reason.
        ValueError: an attention backend that this machine does not have.
    """

    def __init__(self, model: nn.Module, attention: str = "auto") -> None:
        self.model: Any = unwrap(model)
        self.family = family_of(self.model)
        self.ranks = ranks_of(self.model)
        """The processes of a tensor-parallel model; None: there is one process."""
        self._twin: Any = make_twin(self.model)
        self._twin.set_attn_implementation(NAME)
        self._base: Any = base_of(self._twin, self.family)
        self._head: Any = head_view(self._twin, self.family)
        self._views: dict[tuple[int, int], Any] = {}
        self.config: Any = self._twin.config
        self.num_layers = len(self.layer_modules)
        self.llama = LlamaWeights.of(self._twin) if self.ranks is None else None
        """Weights for executors that compute the layers themselves; None where the layers are of another kind."""
        self.rounds = any(activation_bytes(weight) == 2 for weight in self.model.parameters())
        """Whether activations, keys and values are rounded to two bytes, see `selfspec.kernels.rounding`."""
        self.compiled: Body | None = None
        """The implementation that replaces the views, see `selfspec.executors.cpu.install`; None: the views run."""
        self.recorded: Layers | None = None
        """What runs the layers in recordings, see `selfspec.executors.cuda.body_choice`; None: the views."""
        self._call = threading.local()  # the taps of the current call, per thread
        self._register_tap_hooks()
        embedding = self._twin.get_input_embeddings().weight
        sized = self.ranks is None  # spread over ranks, a weight may show this rank's part
        self.vocab_size = int(embedding.shape[0] if sized else self.config.get_text_config().vocab_size)
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        auto = attention == "auto"
        self.attention = backends.choose(self.device) if auto else backends.named(attention, self.device)
        """The attention backend."""
        self.runner: Any = None
        """A `selfspec.executors.cuda.runner.Runner`, which replays CUDA graphs of rounds; or None."""
        linear = self._twin.get_output_embeddings() if self.ranks is None else None
        self._short = ShortHead.of(self._head, linear)
        self.others = sample_of(0, self.device) if self._short is None else self._short.others
        """A fixed sample of the vocabulary, int64; see `short_logits`."""
        self._draft_head = DraftHead.of(self._head, linear)
        self.frequencies = Frequencies(self.vocab_size)
        """Token frequencies, which choose the tokens of draft vocabularies."""
        self.exit_heads: ExitHeads | None = None
        """Adapters of early hidden states before norm and head; None: there are none."""
        self.head_rows: RowCounts | None = None
        """The numbers of rows with which the head runs in exact mode, see `selfspec.executors.cuda.exact`."""
        self.exact: Callable[..., Tensor] | None = None
        """What `run` does outside of recordings in exact mode; None: another mode."""
        self.wide = 0
        """In exact mode, tokens of a block of a prompt; 0: another mode."""

    @property
    def has_short_head(self) -> bool:
        """Whether shadow picks may be over a few tokens per position."""
        return self._short is not None

    @property
    def has_draft_heads(self) -> bool:
        """Whether drafts may be over a part of the vocabulary."""
        return self._draft_head is not None

    @property
    def default_draft_vocab(self) -> int | None:
        """The size of the part of the vocabulary that a fixed exit layer drafts over by default; None: all of it.

        An eighth where the head weighs more than two layers, see `draft_vocabulary.default_size`; less where exit heads
        were trained for texts of fewer tokens.
        """
        if not self.has_draft_heads:
            return None
        head = self._twin.get_output_embeddings().weight.numel()
        layer = sum(weight.numel() for weight in self.layer_modules[0].parameters())
        size, focus = default_size(self.vocab_size, head, layer), self.frequencies.focus
        return size if size is None or focus is None else min(size, focus)

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The modules of the layers."""
        modules: Sequence[nn.Module] = getattr(self._base, self.family.layers)
        return modules

    @property
    def has_copies(self) -> bool:
        """Whether 4-bit copies of the layers can draft, see `CompiledBody.rounded`, and would be smaller than these."""
        return self.compiled is not None and self.exit_heads is None and not self.compiled.is_rounded

    @property
    def backend(self) -> str:
        """The implementation that runs the layers: "views" or "compiled"."""
        return "views" if self.compiled is None else "compiled"

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden states, keys and values: the model's, but float32 with compiled layers."""
        return self.dtype if self.compiled is None else torch.float32

    def refresh(self, deeply: bool = False) -> None:
        """Update derived weights after in-place edits; `deeply`: also after edits through `.data`."""
        for body in (self.compiled, self.recorded):
            if body is not None:
                body.refresh(deeply)
        if deeply and self.runner is not None:
            self.runner.refresh()

    @property
    def context_limit(self) -> int:
        """The maximum length of a row in tokens.

        Rotary frequencies that depend on the longest row of a call (`dynamic`, `longrope`) would make a row's output
        depend on other rows. Such models are limited to their original length, at which frequencies are constant.
        """
        limit = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        rope = getattr(self.config, "rope_parameters", None) or {}
        nested = [inner for inner in rope.values() if isinstance(inner, dict)]  # some families: one per layer type
        for one in [rope, *nested]:
            if one.get("rope_type") in ("dynamic", "longrope"):
                limit = min(limit, int(one.get("original_max_position_embeddings") or limit))
        return limit

    def num_wide(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a prompt are computed in other shapes than tokens of an output,
        so that their keys and values may differ in bits."""
        return num_tokens // self.wide * self.wide if self.wide else 0

    def agreed(self, value: Value) -> Value:
        """Rank 0's value on every rank of a tensor-parallel model; else `value`."""
        return value if self.ranks is None else self.ranks.agreed(value)

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """Run layers [start, stop) on N packed tokens, writing their keys and values.

        Args:
            given: token ids `[N]` (int64) when start is 0, else the hidden states `[N, hidden_size]` after layer
                `start`.
            taps: each key between start and stop is set to the hidden states `[N, hidden_size]` after so many layers,
                before the final norm.

        Returns:
            Hidden states `[N, hidden_size]`; after the final norm when `stop` is the number of layers, else before it.
        """
        if rows.attend is None:
            rows.attend = self.attention.attend
        if self.exact is not None and not rows.is_static:
            return self.exact(rows, start, stop, given, taps)
        body = self.recorded if rows.is_static else self.compiled
        if body is not None:
            return body.run(rows, start, stop, given, taps)
        return self.run_views(rows, start, stop, given, taps)

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """Make a KV cache for this split model."""
        if self.runner is None:
            return PagedCache(num_pages, page_size, self.num_layers, rounds=self.rounds)
        made: PagedCache = self.runner.new_cache(num_pages, page_size)
        return made

    def run_views(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """Do what `run` does by the model's own modules. `rows` has an attention function."""
        self._call.taps = taps
        view = self._views.get((start, stop))
        if view is None:
            assert 0 <= start < stop <= self.num_layers, f"no layers [{start}, {stop}) among {self.num_layers}"
            view = self._views[start, stop] = layer_view(self._base, self.family, start, stop)
        key = "input_ids" if start == 0 else "inputs_embeds"
        call = {key: given[None], "position_ids": rows.positions, "past_key_values": rows, "use_cache": True}
        try:
            return view(**call, packed=rows).last_hidden_state[0]
        finally:
            self._call.taps = None

    def _register_tap_hooks(self) -> None:
        """Register hooks on the twin's layers that store their outputs in the taps of the current call."""

        def after(depth: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                taps = getattr(self._call, "taps", None)
                if taps is not None and depth in taps:
                    hidden = output[0] if isinstance(output, tuple) else output
                    taps[depth] = hidden[0]  # [1, N, hidden_size]

            return hook

        for index, layer in enumerate(self.layer_modules):
            layer.register_forward_hook(after(index + 1))

    def logits(self, hidden: Tensor, exit_layer: int | None = None) -> Tensor:
        """Logits `[N, vocab]` in fp32 from hidden states `[N, hidden_size]`, through the model's own head.

        Args:
            exit_layer: number of layers before these hidden states, if the final norm is not applied yet.
        """
        if exit_layer is None or exit_layer >= self.num_layers:
            return self.head_logits(hidden, False)
        return self.head_logits(self.through_heads(hidden[None], (exit_layer,))[0], True)

    def subset_of(self, tokens: Tensor) -> Subset | None:
        """A part of the vocabulary, int64 `[size]`, ascending, for `subset_logits`; None without such a head."""
        return None if self._draft_head is None else self._draft_head.of_tokens(tokens)

    def subset_logits(self, hidden: Tensor, exit_layer: int | None, subset: Subset) -> Tensor:
        """Logits over a part of the vocabulary, `[N, size]` in fp32; with gradients if `hidden` has some.

        For drafts only.

        Args:
            hidden: `[N, hidden_size]` after `exit_layer` layers, before the final norm.
            exit_layer: None: `hidden` went through the exit's head already.
        """
        head = self._draft_head
        hidden = hidden if exit_layer is None else self.through_heads(hidden[None], (exit_layer,))[0]
        assert head is not None, "subsets are made by the head"
        if self.compiled is not None and not hidden.requires_grad:
            return self.compiled.subset_logits(hidden, subset)
        return head.logits(self.normed(hidden), subset)

    def leave_out_heads(self, short: bool = True, draft: bool = True) -> None:
        """Disable the heads of `short_logits` and `subset_logits`; the whole vocabulary is used instead."""
        self._short = None if short else self._short
        self._draft_head = None if draft else self._draft_head

    def draft_subset(self, size: int | None) -> Subset | None:
        """The `size` most frequent tokens with the head's rows for them; None: drafts are over the whole vocabulary."""
        if size is None or self._draft_head is None or size >= self.vocab_size:
            return None
        return self._draft_head.subset(size, self.frequencies)

    def through_heads(self, hidden: Tensor, layers: Sequence[int], last: Tensor | None = None) -> Tensor:
        """Hidden states `[K, N, hidden_size]` after K early layers, through the exit heads of those that have one.

        Args:
            last: `[N, hidden_size]`, the model's final states one token before; None: unknown, as zeros.
        """
        heads = self.exit_heads  # read once: another thread may set it
        if heads is None or not set(layers) & set(heads.layers):
            return hidden
        if self.compiled is None or hidden.requires_grad:
            return heads.of_layers(hidden, layers, last)
        return self.compiled.through_heads(hidden, heads, layers, last)

    def head_logits(self, hidden: Tensor, lacks_norm: bool) -> Tensor:
        """Logits `[N, vocab]` in fp32 through the model's own head; `lacks_norm`: apply the final norm first."""
        if self.compiled is not None:
            return self.compiled.logits(hidden, normed=not lacks_norm)
        if lacks_norm:
            hidden = self.normed(hidden)
        elif self.head_rows is not None:
            return self.head_rows.apply(self._head_logits, hidden)
        return self._head_logits(hidden)

    def _head_logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=normed[None]).logits
        return logits[0].float()

    def short_logits(self, hidden: Tensor, top: Tensor) -> Tensor | None:
        """Logits `[K, N, T + len(others)]` in fp32 of a few tokens per position, for several layers.

        Args:
            hidden: `[K, N, hidden_size]`, after the layers' exit heads, before the final norm.
            top: int64 `[N, T]`, tokens per position. The tokens of `others` follow them in the result.

        Returns:
            None where the model's head is no plain linear layer.
        """
        if self._short is None:
            return None
        return self._short.logits(self.normed(hidden), top)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., hidden_size]` after the model's final norm."""
        norm = getattr(self._base, self.family.norm, None)
        return hidden if norm is None else norm(hidden)
