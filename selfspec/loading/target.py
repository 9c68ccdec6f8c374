"""`Target`: an opened model: its parts, its exit heads, and what is known of its speed and of its acceptance."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any, Self

from torch import nn

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.control.registry import CHOOSES_EXIT, DEFAULT_POLICY, make_policy
from selfspec.control.tensor_parallel import RankZeroPolicy
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.decoding.prefix_store import PrefixStore
from selfspec.drafting.responses import Responses
from selfspec.errors import got, whole
from selfspec.executors.cpu.install import Choice, check_backend, choose
from selfspec.executors.cuda.body_choice import BodyChoice
from selfspec.executors.cuda.exact import exact_split
from selfspec.executors.cuda.runner import install
from selfspec.learn import Learner
from selfspec.loading import checked
from selfspec.loading.policy_store import PolicyKey, PolicyStore
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.fingerprint import device_name, hidden_size_of, shape_of, weights_of
from selfspec.model.refusals import refuse_autocast
from selfspec.model.split_model import SplitModel
from selfspec.model.views import copied_state
from selfspec.params import SpeculativeConfig

_log = logging.getLogger("selfspec")

# What a target is made from.
MADE_FROM = ("model", "tokenizer", "_check", "_exit_heads", "_backend", "_attention", "_graphs", "_owned", "_file_key")


class Target:
    """A causal LM with its tokenizer: the only judge of what is right, and its own drafter.

    Args:
        model: any transformers causal LM, with PEFT adapters or without. It is never changed; its weights are shared.
            What else changes about it later (adapters, device, dtype) is noticed when the next engine is made; an
            engine keeps the model as it was when it was made, but for weights edited in place through torch.
        tokenizer: its tokenizer; without one, prompts are token ids and completions have no text.
        check: run the self-check, which compares the split model with the whole one (a few short forwards).
        exit_heads: adapters for some exit layers; they change drafts only.
        attention: who computes attention, see `selfspec.model.attention_backends`; "auto": the fastest here.
        graphs: on CUDA, capture rounds and layers in graphs and replay those, which takes the time of launching kernels
            from Python away and gives the same tokens. They may keep up to 2 GiB.
        backend: what runs the layers: "views" (the model's own modules, for every family), "compiled" (the layers of
            Llama-shaped models in one function, compiled on this machine when it is first wanted; float32 or bfloat16
            on CPU; its packed copies take as much memory as the weights, and for bfloat16 there are embedding and head
            in float32 beside), or "auto": compiled where it serves the model and fits half of the free memory.
        file_key: a key of the model's file; a file that passed the self-check on this machine is not checked again.
        owned: whether selfspec loaded the model itself, so that weights may be moved in memory: on CUDA, those that are
            multiplied with the same input are put one after the other. Their numbers stay.

    Raises:
        UnsupportedModelError: the model cannot be split, with the reason.
        NoCompilerError: backend "compiled" on a machine without a C++ compiler.
        ValueError: exit heads of a model of another shape, or a backend that does not
            serve it or is not here.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        check: bool = True,
        exit_heads: ExitHeads | None = None,
        backend: str = "auto",
        attention: str = "auto",
        graphs: bool = True,
        owned: bool = False,
        file_key: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self._check, self._owned = model, tokenizer, check, owned
        self._attention, self._graphs, self._backend = attention, graphs, check_backend(backend)
        self._file_key = file_key
        if not check and backend not in ("auto", "views"):
            raise ValueError(f"backend {backend!r} is used after the self-check alone; leave check=False out")
        if attention != "auto" and backend == "compiled":
            raise ValueError(f"backend 'compiled' has attention of its own; leave attention={attention!r} out")
        if attention != "auto" and backend == "auto":
            self._backend = "views"
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
        made.policies, made.learner, made.responses = self.policies.copy(), None, Responses()
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What it was made from: a deep copy or an unpickled target opens the model anew, and has no learner yet."""
        return {name: self.__dict__[name] for name in MADE_FROM}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.learner = None
        self._open()

    def _open(self) -> None:
        self._state = copied_state(self.model)
        self.responses = Responses()
        """Finished responses of the calls that reuse them; another model may not know their tokens."""
        self.prefixes = PrefixStore()
        """Keys and values of earlier calls."""
        self.split = SplitModel(self.model, self._attention)
        refuse_autocast(self.split.device)
        if not self._check:
            self.split.leave_out_heads()  # they are only ever used once the self-check has found them equal
        self.split_error = self._checked() if self._check else None
        """Largest logit difference between split and whole model, in standard deviations of the logits."""
        self.defaults = GenerationDefaults(self.split.model, self.tokenizer)
        """What the model's generation config asks for."""
        if self._graphs:
            self._install_recordings()
        self.exit_heads = self._exit_heads

    def _checked(self) -> float:
        """Choose what runs the layers, and return the split error."""
        if self._file_key is None:
            return choose(self.split, self._backend).error
        source = checked.source_of(self._file_key, self._backend, self._attention)
        known = checked.read(source, Choice)
        choice = choose(self.split, self._backend, known)
        if choice is not known:
            checked.write(source, choice)
        return choice.error

    def _install_recordings(self) -> None:
        """Set what decodes from recordings. Weights for which that was checked and chosen before are not checked again.

        A model of the caller's is, whose modules may do what they like, and one over several ranks, which must agree.
        """
        split = self.split
        if not self._owned or split.ranks is not None:
            install(split, owned=self._owned)
            return

        @cache
        def source() -> str:
            about = shape_of(split), weights_of(split), self._backend, self._attention, split.dtype
            return checked.source_of("recordings", *about, device_name(split.device))

        choice = install(split, owned=True, known=lambda: checked.read(source(), BodyChoice))
        if choice is not None:
            checked.write(source(), choice)

    @property
    def exit_heads(self) -> ExitHeads | None:
        """Adapters between early layers and the model's own head; None: early layers use the head as it is.

        Setting them puts them on the model's device and in its dtype, and forgets acceptance statistics.

        Raises:
            ValueError: they are of a model of another shape.
        """
        return self.split.exit_heads

    @exit_heads.setter
    def exit_heads(self, heads: ExitHeads | None) -> None:
        split = self.split
        if heads is not None:
            heads.check(split.num_layers, hidden_size_of(split))
            if heads.weights and heads.weights != weights_of(split):
                _log.warning("these exit heads were trained for other weights; drafts may be worse, output is the same")
        self._exit_heads = heads
        # the caller's may serve other targets, of other devices and dtypes
        split.exit_heads = None if heads is None else copy.deepcopy(heads).to(split.device, split.dtype)
        if heads is not None and heads.counts:
            split.frequencies.add_counts(heads.counts)  # drafts begin over the vocabulary that they were trained for
        self._exact: SplitModel | None = None  # it would have the earlier exit heads
        self.policies = PolicyStore(split)
        """What rounds cost here, and how often its layers are right; forgotten with the exit heads."""

    @property
    def backend(self) -> str:
        """What runs the layers: "views" or "compiled"."""
        return self.split.backend

    @property
    def attention_backend(self) -> str:
        """Who computes attention: sdpa, triton, reference or compiled; in graphs it is always triton."""
        return "compiled" if self.backend == "compiled" else self.split.attention.name

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-text tokens, see `GenerationDefaults`."""
        return self.defaults.eos_token_ids

    @property
    def default_exit_layer(self) -> int | None:
        """The exit layer stored with the model (`exit_layer` in generation_config.json), if there is one."""
        return getattr(self.defaults.config, "exit_layer", None)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The draft length stored with the model (`num_speculative_tokens` in generation_config.json), if any."""
        return getattr(self.defaults.config, "num_speculative_tokens", None)

    @property
    def exact_split(self) -> SplitModel:
        """What runs exact mode: compiled layers, whose results depend on nothing else in a call as they are; else fused
        layers on CUDA, made when first asked for.

        Raises:
            UnsupportedModelError: neither serves this model here.
        """
        if self.split.backend == "compiled":
            return self.split
        if self._exact is None:
            self._exact = exact_split(self.split)
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
        return self.policies.costs(self.exact_split if exact else self.split, batch_size, exact)

    def refresh(self, exact: bool = False) -> SplitModel:
        """What decodes now: the model is opened anew where its adapter, device, dtype or hooks have changed."""
        if copied_state(self.model) != self._state:
            self._file_key = None
            self._open()
        split = self.exact_split if exact else self.split
        split.refresh(deeply=True)
        return split

    def policy(self, config: SpeculativeConfig, max_num_seqs: int = 1, exact: bool = False) -> Policy:
        """The policy that a configuration names; an exit layer or draft length without a policy is `fixed`.

        `adaptive` continues with what the call before learned, where it had the same arguments.

        Raises:
            ValueError: there is no policy of this name, or an exit layer that the model does not have.
        """
        split = self.exact_split if exact else self.split
        name, exit_layer, num_tokens = self._completed(config)

        def costs() -> Costs:
            return self.costs(max_num_seqs, exact)

        key = PolicyKey.of(config, exact)
        if key is not None and split.num_layers > 1 and split.ranks is None:
            kept = self.policies.take(key, costs)
            if kept is not None:
                return kept
        prior = self.prior if name == "adaptive" else None
        drafters = config.drafters
        made = make_policy(
            name, split.num_layers, exit_layer, num_tokens, costs, prior, drafters, split.default_draft_vocab
        )
        made.set_vocabulary(split.frequencies if split.has_draft_heads else None)
        made.set_copies(split.has_copies)
        return made if split.ranks is None else RankZeroPolicy(made, split.ranks.leads, split.ranks.agreed)

    def policy_name(self, config: SpeculativeConfig) -> str | Policy:
        """The policy that a configuration leads to: "plain" where that drafts nothing."""
        name, _, num_tokens = self._completed(config)
        return "plain" if num_tokens == 0 else name

    def _completed(self, config: SpeculativeConfig) -> tuple[str | Policy, int | None, int | None]:
        """Policy, exit layer and draft length of a configuration, completed by what is stored with the model."""
        name, exit_layer, num_tokens = config.policy, config.exit_layer, config.num_speculative_tokens
        if name is None:
            name = DEFAULT_POLICY if exit_layer is None and num_tokens is None else "fixed"
        if name not in CHOOSES_EXIT:
            exit_layer = self.default_exit_layer if exit_layer is None else exit_layer
            num_tokens = self.default_num_speculative_tokens if num_tokens is None else num_tokens
        return name, exit_layer, num_tokens

    def keep_policy(self, policy: Policy, config: SpeculativeConfig, exact: bool = False) -> None:
        """Let later calls continue with what a policy learned; its caller must not use it any more."""
        key = PolicyKey.of(config, exact)
        if key is None or not isinstance(policy, Adaptive):
            self.policies.learn_from(policy)
        else:
            self.policies.keep(policy, key)

    def learner_of(self, config: SpeculativeConfig) -> Learner | None:
        """Who trains exit heads while decoding by this configuration; None: nobody does.

        Raises:
            ValueError: `config.learn` is no bool and no `Learner` of this model.
        """
        learn = config.learn
        if learn is True:
            learn = self.learner = self.learner or Learner(self)
        if not isinstance(learn, Learner):
            if not isinstance(learn, bool):
                raise ValueError(f"learn must be True, False or a selfspec.learn.Learner, {got(learn)}")
            return None
        learn.follow(self.split)
        if config.exit_layer is not None and 1 <= config.exit_layer < self.split.num_layers:
            learn.cover([config.exit_layer])
        return learn

    @property
    def prior(self) -> dict[str, Any] | None:
        """Acceptance statistics of earlier calls, or of earlier programs that kept theirs, or those that came with the
        model; None when there are none."""
        return self.policies.prior

    @prior.setter
    def prior(self, prior: dict[str, Any] | None) -> None:
        self.policies.prior = prior

    def save_prior(self) -> None:
        """Keep the acceptance statistics of this target's calls for later programs, in the user's cache folder."""
        self.policies.save()
