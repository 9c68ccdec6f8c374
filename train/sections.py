"""The sections of a configuration: frozen dataclasses that check their values. configs/train explains every key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path


def check(ok: bool, key: str, allowed: str, got: object) -> None:
    """Raise ValueError, with what the key must be and what it is, unless `ok`."""
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def check_least(section: str, values: object, least: int, *names: str) -> None:
    """Raise ValueError where one of these fields of a section is below `least`."""
    for name in names:
        value = getattr(values, name)
        check(value >= least, f"{section}.{name}", f"at least {least}", value)


def check_positive(section: str, values: object, *names: str) -> None:
    """Raise ValueError where one of these fields of a section is not above 0."""
    for name in names:
        value = getattr(values, name)
        check(value > 0, f"{section}.{name}", "positive", value)


def _check_choice(key: str, value: str, *allowed: str) -> None:
    check(value in allowed, key, f"one of {', '.join(allowed)}", value)


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """A folder of Python files to learn from, and which of them to keep for evaluation."""

    root: str = ""
    skip: tuple[str, ...] = ("site-packages",)
    max_chars: int = 250_000
    held_out_percent: float = 2.0
    library_repeat: int = 1

    def __post_init__(self) -> None:
        check_least("corpus", self, 1, "max_chars", "library_repeat")
        check(0 < self.held_out_percent < 100, "corpus.held_out_percent", "between 0 and 100", self.held_out_percent)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Texts or conversations to learn from, in place of the corpus of Python files; an empty path means the corpus."""

    path: str = ""
    name: str = ""
    split: str = "train"
    streaming: bool = False
    shuffle_buffer: int = 1000
    text_field: str = "text"
    messages_field: str = ""
    max_length: int = 0
    held_out_percent: float = 2.0

    def __post_init__(self) -> None:
        check(self.shuffle_buffer >= 1, "data.shuffle_buffer", "at least 1", self.shuffle_buffer)
        check(self.max_length == 0 or self.max_length > 1, "data.max_length", "0 or at least 2", self.max_length)
        check(0 < self.held_out_percent < 100, "data.held_out_percent", "between 0 and 100", self.held_out_percent)
        check(bool(self.text_field or self.messages_field), "data.text_field", "the name of a field", self.text_field)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Texts that the model writes itself, after its own prompts or those of data; 0 of them means none."""

    num_texts: int = 0
    num_held_out: int = 64
    prompt_tokens: int = 64
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("text", self, 0, "num_texts", "seed")
        check_least("text", self, 1, "num_held_out", "prompt_tokens", "max_new_tokens", "batch_size")
        warm = self.temperatures
        check(bool(warm) and min(warm) >= 0, "text.temperatures", "a list of temperatures from 0", list(warm))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model to continue from, or else the shape of a new one in the words of transformers' LlamaConfig."""

    base: str = ""
    dtype: str = "float32"
    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 16
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        _check_choice("model.dtype", self.dtype, "float32", "bfloat16")
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            check(isinstance(value, str) or value > 0, f"model.{each.name}", "positive", value)
        check(self.vocab_size >= 257, "model.vocab_size", "at least 257 (all bytes and one special)", self.vocab_size)
        check(self.num_hidden_layers >= 2, "model.num_hidden_layers", "at least 2", self.num_hidden_layers)
        heads = self.num_attention_heads
        check(self.hidden_size % (2 * heads) == 0, "model.hidden_size", f"a multiple of {2 * heads}", self.hidden_size)
        kv_heads = self.num_key_value_heads
        check(heads % kv_heads == 0, "model.num_key_value_heads", f"a divisor of {heads}", kv_heads)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) on a base model whose own weights stay as they are; rank 0 means none."""

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers_to_transform: tuple[int, ...] = ()
    merge: bool = True

    def __post_init__(self) -> None:
        check(self.rank >= 0, "lora.rank", "at least 0", self.rank)
        check(self.alpha > 0, "lora.alpha", "positive", self.alpha)
        check(0 <= self.dropout < 1, "lora.dropout", "at least 0 and below 1", self.dropout)
        check(bool(self.target_modules), "lora.target_modules", "a list of module names", self.target_modules)
        lowest = min(self.layers_to_transform, default=0)
        check(lowest >= 0, "lora.layers_to_transform", "a list of layer numbers from 0", lowest)


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """LayerSkip (arXiv 2404.16710): losses at early layers, and layers dropped at random."""

    curriculum: str = "rotational"
    period: int = 8
    scale: float = 0.5
    weights: str = "uniform"
    distill: float = 0.0
    teacher: str = "last"
    dropout_max: float = 0.1
    dropout_ramp: bool = False

    def __post_init__(self) -> None:
        _check_choice("exits.curriculum", self.curriculum, "rotational", "gradual", "all")
        check(self.period >= 1, "exits.period", "at least 1", self.period)
        check(self.scale >= 0, "exits.scale", "at least 0", self.scale)
        _check_choice("exits.weights", self.weights, "uniform", "cumulative")
        check(0 <= self.distill <= 1, "exits.distill", "between 0 and 1", self.distill)
        _check_choice("exits.teacher", self.teacher, "last", "base")
        check(0 <= self.dropout_max < 1, "exits.dropout_max", "at least 0 and below 1", self.dropout_max)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Muon for the layers' matrices and AdamW for the rest, or AdamW alone; warmup, plateau, decay."""

    kind: str = "muon"
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    decay_fraction: float = 0.3
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _check_choice("optim.kind", self.kind, "muon", "adamw")
        check_positive("optim", self, "muon_lr", "adamw_lr", "max_grad_norm")
        check_least("optim", self, 0, "weight_decay", "warmup_steps")
        check(0 < self.decay_fraction <= 1, "optim.decay_fraction", "above 0 and at most 1", self.decay_fraction)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long to train, on how much at once, and where to put the results."""

    output: str = "runs/demo"
    export: str = ""
    card: str = ""
    notes: str = ""
    exit_layer: int = 0
    num_draft_tokens: int = 0
    seed: int = 0
    max_steps: int = 2000
    max_minutes: float = 0.0
    windows: tuple[int, ...] = (512,)
    tokens_per_batch: int = 4096
    gradient_accumulation_steps: int = 2
    gradient_checkpointing: bool = False
    save_steps: int = 100
    log_steps: int = 10
    report_to: str = "none"
    compile: bool = True
    bf16: bool = True

    def __post_init__(self) -> None:
        check(not self.card or Path(self.card).is_file(), "run.card", "a file of Markdown text", self.card)
        check_least("run", self, 0, "exit_layer", "num_draft_tokens", "seed", "max_minutes")
        check_least("run", self, 1, "max_steps", "tokens_per_batch", "gradient_accumulation_steps")
        check_least("run", self, 1, "save_steps", "log_steps")
        check(min(self.windows, default=0) > 1, "run.windows", "a list of lengths of at least 2 tokens", self.windows)
        tokens = self.tokens_per_batch
        for length in self.windows:
            check(tokens % length == 0, "run.tokens_per_batch", f"a multiple of {length}", tokens)
        both = self.compile and self.gradient_checkpointing
        check(not both, "run.compile", "false where run.gradient_checkpointing is true", self.compile)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is measured on held-out text, while training and for the model card."""

    every_steps: int = 500
    window: int = 512
    num_windows: int = 64
    prompt_tokens: int = 256
    num_prompts: int = 96
    new_tokens: int = 64
    docstring_windows: int = 0
    gsm8k: str = ""
    gsm8k_questions: int = 0
    gsm8k_tokens: int = 256
    batch_size: int = 16

    def __post_init__(self) -> None:
        may_be_zero = ("docstring_windows", "gsm8k_questions")
        counts = [each.name for each in dataclasses.fields(self) if each.type == "int"]
        check_least("eval", self, 1, *(name for name in counts if name not in may_be_zero))
        check_least("eval", self, 0, *may_be_zero)
        check(not self.gsm8k or Path(self.gsm8k).is_file(), "eval.gsm8k", "a .jsonl file", self.gsm8k)
        check(self.window >= 2, "eval.window", "at least 2", self.window)
