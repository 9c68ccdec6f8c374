"""`Target`: an opened model: what drafts, what verifies, and what is known of its speed and of its acceptance."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch import nn

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.decoding.engine import Engine, page_size_of
from selfspec.decoding.generation_config import Stored
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.prefix_store import PrefixStore
from selfspec.decoding.request import Options, Prompts, Request, make_requests
from selfspec.decoding.results import Round
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.responses import Responses
from selfspec.errors import got, refuse_unknown, whole
from selfspec.executors.cpu.install import check_engine, choose
from selfspec.executors.cuda.exact import exact_stack
from selfspec.executors.cuda.runner import install
from selfspec.kernels.large_pages import trim_memory
from selfspec.learn import Learner
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.file_weights import FileWeights
from selfspec.model.fingerprint import hidden_size_of, weights_of
from selfspec.model.refusals import refuse_autocast
from selfspec.model.stack import Stack
from selfspec.model.views import copied_state
from selfspec.remembered import Remembered, Way, way_of

_log = logging.getLogger("selfspec")


MADE_FROM = ("model", "tokenizer", "_check", "_exit_heads", "_engine", "_attention", "_graphs", "_owned")  # a target is
WHOLE_BURST = 0.25  # seconds: nobody sees rounds one by one, and an interrupt need not wait for long


class Target:
    """A causal LM with its tokenizer: the only judge of what is right, and its own drafter.

    Args:
        model: any transformers causal LM, with PEFT adapters or without. It is never changed; its weights are shared.
            What else changes about it later (adapters, device, dtype) is noticed by `generate` and `stream`; an
            `Engine` keeps the model as it was when the engine was made, but for weights edited in place through torch.
        tokenizer: its tokenizer; without one, prompts are token ids and completions have no text.
        check: run the self-check, which compares the split model with the whole one (a few short forwards).
        exit_heads: adapters for some exit layers; they change drafts only.
        attention: who computes attention, see `selfspec.model.attention_backends`; "auto": the fastest here.
        graphs: on CUDA, capture rounds and layers in graphs and replay those, which takes the time of launching kernels
            from Python away and gives the same tokens. They may keep up to 2 GiB.
        engine: what runs the layers: "views" (the model's own modules, for every family), "compiled" (the layers of
            Llama-shaped models in one function, compiled on this machine when it is first wanted; float32 or bfloat16
            on CPU; its packed copies take as much memory as the weights, and for bfloat16 there are embedding and head
            in float32 beside), or "auto": compiled where it serves the model and fits half of the free memory.
        file: what the model's GGUF file holds of its weights. The compiled engine packs that; the float32 weights are
            then only in memory where something else reads them.
        owned: whether selfspec loaded the model itself, so that weights may be moved in memory: on CUDA, those that are
            multiplied with the same input are put one after the other. Their numbers stay.

    Raises:
        UnsupportedModelError: the model cannot be split, with the reason.
        NoCompilerError: engine "compiled" on a machine without a C++ compiler.
        ValueError: exit heads of a model of another shape, or an engine or attention backend that does not
            serve it or is not here.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        check: bool = True,
        exit_heads: ExitHeads | None = None,
        engine: str = "auto",
        attention: str = "auto",
        graphs: bool = True,
        file: FileWeights | None = None,
        owned: bool = False,
    ) -> None:
        self.model, self.tokenizer, self._check, self._owned = model, tokenizer, check, owned
        self._attention, self._graphs, self._file = attention, graphs, file
        self._engine = check_engine(engine)
        if not check and engine not in ("auto", "views"):
            raise ValueError(f"engine {engine!r} is used after the self-check alone; leave check=False out")
        if attention != "auto" and engine == "compiled":
            raise ValueError(f"engine 'compiled' has attention of its own; leave attention={attention!r} out")
        if attention != "auto" and engine == "auto":
            self._engine = "views"
        if not isinstance(exit_heads, ExitHeads | None):
            raise ValueError(f"exit_heads must be selfspec.ExitHeads or None, got {exit_heads!r}")
        self.learner: Learner | None = None
        """The one that `learn=True` made, and goes on with."""
        self._exit_heads = exit_heads
        self._open()

    def __copy__(self) -> Self:
        """The same opened model; statistics and responses of its calls are its own from now on."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.remembered, made.learner, made.responses = self.remembered.copy(), None, Responses()
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What it was made from: a deep copy or an unpickled target opens the model anew, and has no learner yet."""
        return {name: self.__dict__[name] for name in MADE_FROM}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.learner = None
        self._file = None  # copies of the weights are in no file
        self._open()

    def _open(self) -> None:
        self._state = copied_state(self.model)
        self.responses = Responses()
        """Finished responses of the calls that reuse them; another model may not know their tokens."""
        self._prefixes = PrefixStore()
        self.stack = Stack(self.model, self._attention, self._file)
        refuse_autocast(self.stack.device)
        if not self._check:
            self.stack.leave_out_heads()  # they are only ever used once the self-check has found them equal
        self.split_error = choose(self.stack, self._engine) if self._check else None
        """Largest logit difference between split and whole model, in standard deviations of the logits."""
        self._stored = Stored(self.stack.model)
        if self._graphs:
            install(self.stack, owned=self._owned)
        self.exit_heads = self._exit_heads
        if self._file is not None and self.engine == "compiled":
            self._file.release()  # nobody else has the model yet
            trim_memory()

    @property
    def exit_heads(self) -> ExitHeads | None:
        """Adapters between early layers and the model's own head; None: early layers use the head as it is.

        Setting them puts them on the model's device and in its dtype, and forgets acceptance statistics.

        Raises:
            ValueError: they are of a model of another shape.
        """
        return self.stack.exit_heads

    @exit_heads.setter
    def exit_heads(self, heads: ExitHeads | None) -> None:
        stack = self.stack
        if heads is not None:
            heads.check(stack.num_layers, hidden_size_of(stack))
            if heads.weights and heads.weights != weights_of(stack):
                _log.warning("these exit heads were trained for other weights; drafts may be worse, output is the same")
        self._exit_heads = heads
        self._exact: Stack | None = None  # it would have the earlier ones
        # the caller's may serve other targets, of other devices and dtypes
        stack.exit_heads = None if heads is None else copy.deepcopy(heads).to(stack.device, stack.dtype)
        self.remembered = Remembered(stack)
        """What rounds cost here, and how often its layers are right; forgotten with the exit heads."""

    @property
    def engine(self) -> str:
        """What runs the layers: "views" or "compiled"."""
        return self.stack.engine

    @property
    def attention_backend(self) -> str:
        """Who computes attention: sdpa, triton, flash, varlen, reference or compiled; in graphs it is always triton."""
        return "compiled" if self.engine == "compiled" else self.stack.backend.name

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-text tokens: the generation config's, else the config's, else the tokenizer's."""
        for holder in (self._generation_config, self.stack.config, self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @property
    def stored(self) -> Stored | None:
        """What the model's generation config asks for where a call's options name nothing else; None: not looked at."""
        return self._stored

    @property
    def default_exit_layer(self) -> int | None:
        """The exit layer stored with the model (`exit_layer` in generation_config.json), if there is one."""
        return getattr(self._generation_config, "exit_layer", None)

    @property
    def default_num_draft_tokens(self) -> int | None:
        """The draft length stored with the model (`num_draft_tokens` in generation_config.json), if there is one."""
        return getattr(self._generation_config, "num_draft_tokens", None)

    @property
    def exact_stack(self) -> Stack:
        """What runs exact mode: compiled layers, whose results depend on nothing else in a call as they are; else fused
        layers on CUDA, made when first asked for.

        Raises:
            UnsupportedModelError: neither serves this model here.
        """
        if self.stack.engine == "compiled":
            return self.stack
        if self._exact is None:
            self._exact = exact_stack(self.stack)
        return self._exact

    def costs(self, batch_size: int = 1, exact: bool = False) -> Costs:
        """Seconds that the pieces of a round take on this machine.

        Read from the profile in the user's cache folder, else measured now, which takes a second or two for a small
        model, and saved there; `selfspec calibrate` measures more thoroughly.

        Args:
            batch_size: rows that will be decoded together; more than were measured so far are measured too, up to 32.
            exact: those of exact mode.

        Raises:
            ValueError: a batch size below 1, or a model of a single layer.
        """
        batch_size = whole("batch_size", batch_size, 1)
        return self.remembered.costs(self.exact_stack if exact else self.stack, batch_size, exact)

    @property
    def _generation_config(self) -> Any:
        return getattr(self.stack.model, "generation_config", None)

    def requests(self, prompts: Prompts, options: Mapping[str, Any]) -> list[Request]:
        """A request per prompt, completed by the model's own generation config.

        Args:
            prompts: a text, a list of texts, or a list of token-id lists.
            options: some of `decoding.request.Options`, shared by all prompts.

        Raises:
            ValueError: an empty prompt, an unknown option or one out of range; a generation config that asks for beams
                or another kind of decoding.
        """
        refuse_unknown(options, Options.__optional_keys__)
        requests = make_requests(prompts, self.tokenizer, options)
        if self.stored is None:
            return requests
        self.stored.mind_chat(prompts, self.tokenizer)
        return self.stored.complete(requests, options, self)

    def rounds(
        self,
        requests: Sequence[Request],
        *,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        drafts: Sequence[str] | None = None,
        datastore: str | Path | Datastore | None = None,
        reuse_responses: bool = False,
        max_batch_size: int = 8,
        learn: Learner | bool = False,
        exact: bool = False,
        burst: float | None = None,
        prefix_cache_tokens: int | None = None,
    ) -> Iterator[Round]:
        """Decode requests in an engine of their own; a row's `request_id` is the request's index.

        Arguments are checked at the call, before the first round is asked for. `adaptive` goes on with the statistics
        of the call before, and leaves its own to the next one.

        Args:
            policy: one of `selfspec.control.registry.POLICIES`, or an object of your own; default: `adaptive`, which
                chooses exit layer and draft lengths, or `fixed` where one of the next two is named.
            exit_layer: layers the draft runs, 1..num_layers - 1; `fixed` and its kin default to the model's own, else a
                quarter of the layers.
            num_draft_tokens: tokens drafted per round, likewise; else 4.
            drafts: where those of `adaptive` may come from, some of `control.plan.DRAFTS`; default: all.
            datastore: a file that `selfspec corpus build` wrote with this tokenizer, opened at every call, or an open
                `selfspec.Datastore`: `adaptive` looks drafts up in this corpus, too.
            reuse_responses: look drafts up in the finished responses of earlier calls with this option, too.
            max_batch_size: rows decoded together; the others wait and join as rows end.
            learn: train the exit heads on refused drafts meanwhile, see `selfspec.learn.Learner`; True: with one that
                is made at the first such call and kept.
            exact: no bit depends on the other tokens of a call, see `exact_stack`.
            burst: seconds after which no further round of a program begins; default: a thirtieth.
            prefix_cache_tokens: read prompts that begin alike once, and keep keys and values of so many tokens for the
                next call that names a number here, the least recently used ones going first. One call at a time gets
                what was kept. 0: keep none after the call; None: read every prompt. See `Engine`.

        Raises:
            ValueError: an argument out of range, or a request that does not fit the model; a `DatastoreError` where the
                datastore is damaged, or of another tokenizer.
            OSError: the datastore cannot be read.
            UnsupportedModelError: `exact` for a model without compiled or fused layers here.
        """
        whole("max_batch_size", max_batch_size, 1)
        kept = None if prefix_cache_tokens is None else whole("prefix_cache_tokens", prefix_cache_tokens, 0)
        if copied_state(self.model) != self._state:  # another adapter, device, dtype, hook since the model was opened
            self._file = None
            self._open()
        (self.exact_stack if exact else self.stack).refresh(deeply=True)
        learner = self.learner_of(learn, exit_layer)
        batch = max(1, min(max_batch_size, len(requests)))
        limit = self.stack.context_limit
        longest = max((min(len(r.prompt) + r.max_new_tokens, limit) for r in requests), default=1)
        longest += -longest % page_size_of(self.stack)  # whole pages, so that every row of a full batch has its own
        way = None
        if self.stack.num_layers > 1 and self.stack.ranks is None:
            way = way_of(policy, exit_layer, num_draft_tokens, drafts, exact, datastore is not None)
        known = None if way is None else self.remembered.go_on(way, lambda: self.costs(batch, exact))
        prefix, stack = None, self.exact_stack if exact else self.stack
        if kept is not None:
            kept = kept if stack.ranks is None else 0
            prefix = self._prefixes.take(stack, batch * longest, kept, page_size_of(stack))
        try:
            engine = Engine(
                self,
                policy=policy if known is None else known,
                exit_layer=exit_layer,
                num_draft_tokens=num_draft_tokens,
                drafts=drafts,
                datastore=Datastore.of(datastore, self.tokenizer),
                responses=self.responses if reuse_responses else None,
                max_batch_size=batch,
                max_cached_tokens=batch * longest,
                learn=learner,
                exact=exact,
                burst=burst,
                prefix_cache=False if prefix is None else prefix,
            )
            for request in requests:
                engine.submit(request)
        except BaseException:
            if prefix is not None:
                self._prefixes.keep(stack, prefix, kept or 0)
            if way is not None and known is not None:
                self.remembered.keep(known, way)
            raise
        return self._remembering(engine, way, prefix, kept or 0)

    def learner_of(self, learn: Learner | bool, exit_layer: int | None) -> Learner | None:
        """Who trains exit heads for a caller who says `learn`, see `rounds`; None: nobody does."""
        if learn is True:
            learn = self.learner = self.learner or Learner(self)
        if not isinstance(learn, Learner):
            if not isinstance(learn, bool):
                raise ValueError(f"learn must be True, False or a selfspec.learn.Learner, {got(learn)}")
            return None
        learn.follow(self.stack)
        if exit_layer is not None and 1 <= exit_layer < self.stack.num_layers:
            learn.cover([exit_layer])
        return learn

    def _remembering(
        self, engine: Engine, way: Way | None, prefix: PrefixCache | None, num_kept: int
    ) -> Iterator[Round]:
        """The engine's rounds; what its policy saw of this model's acceptance is where the next one starts, and with
        the keys and values in `prefix`."""
        prefixes = self._prefixes
        is_exiting = sys.is_finalizing  # a local, since modules are empty when the interpreter closes open generators
        try:
            yield from engine.run()
        except GeneratorExit:  # between two rounds
            if not is_exiting():
                self._end(engine, way)
                if prefix is not None:
                    engine.leave()
                    prefixes.keep(engine.stack, prefix, num_kept)
            raise
        except BaseException:  # anywhere: nobody knows what state the policy is in
            with suppress(Exception):  # what was raised matters more than statistics
                self.remember(engine)
            raise
        self._end(engine, way)
        if prefix is not None:
            prefixes.keep(engine.stack, prefix, num_kept)

    def _end(self, engine: Engine, way: Way | None) -> None:
        if way is None or not isinstance(engine.policy, Adaptive):
            self.remember(engine)
            return
        self.remembered.keep(engine.policy, way)

    def remember(self, engine: Engine) -> None:
        """Take what an engine's policy saw of this model's acceptance as where the next one starts."""
        self.remembered.take(engine.policy)

    @property
    def prior(self) -> dict[str, Any] | None:
        """Acceptance statistics of earlier calls, or of earlier programs that kept theirs, or those that came with the
        model; None when there are none."""
        return self.remembered.prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        self.remembered.prior = prior

    def save_prior(self) -> None:
        """Keep the acceptance statistics of this target's calls for later programs, in the user's cache folder."""
        self.remembered.save()
