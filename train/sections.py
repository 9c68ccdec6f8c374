"""The sections of a configuration: frozen dataclasses that check their values; see `train.configuration`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from train.configuration import check, check_least, check_positive, option


def _check_choice(key: str, value: str, *allowed: str) -> None:
    check(value in allowed, key, f"one of {', '.join(allowed)}", value)


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """A folder of Python files to learn from, and which of them to keep for evaluation."""

    root: str = option("", "Folder with the Python files; empty means the standard library of the running interpreter.")
    skip: tuple[str, ...] = option(("site-packages",), "Files and folders of these names are left out.")
    max_chars: int = option(250_000, "Longer files are left out.")
    held_out_percent: float = option(2.0, "Share of the files kept for evaluation, chosen by a hash of their paths.")
    library_repeat: int = option(1, "How often code that is no test appears in an epoch.")

    def __post_init__(self) -> None:
        check_least(self, 1, "max_chars", "library_repeat")
        check(0 < self.held_out_percent < 100, "held_out_percent", "between 0 and 100", self.held_out_percent)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Texts or conversations to learn from, in place of the corpus of Python files; an empty path means the corpus."""

    path: str = option("", "File or data set of texts or conversations; empty means the corpus of Python files.")
    name: str = option("", "Configuration of the data set, where it has several.")
    split: str = option("train", "Split of the data set.")
    text_field: str = option("text", "Field of a row with its text.")
    messages_field: str = option("", "Field of a row with its conversation; empty means that rows are texts.")
    max_length: int = option(0, "Longest text in tokens; 0 means no limit.")
    held_out_percent: float = option(2.0, "Share of the texts kept for evaluation.")

    def __post_init__(self) -> None:
        check(self.max_length == 0 or self.max_length > 1, "max_length", "0 or at least 2", self.max_length)
        check(0 < self.held_out_percent < 100, "held_out_percent", "between 0 and 100", self.held_out_percent)
        check(bool(self.text_field or self.messages_field), "text_field", "the name of a field", self.text_field)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Texts that the model writes itself, after its own prompts or those of data; 0 of them means none."""

    num_texts: int = option(0, "Texts or conversations that the model writes to train on; 0 means none.")
    num_held_out: int = option(64, "Texts of the model kept for evaluation, from other prompts.")
    prompt_tokens: int = option(64, "Tokens of a prompt, or of a user's turn, at most.")
    max_new_tokens: int = option(128, "Tokens that the model writes after each prompt, at most.")
    temperatures: tuple[float, ...] = option((0.0, 0.7, 1.0), "Temperatures of the texts, in turn.")
    batch_size: int = option(64, "Texts written at once; on a CPU 16 or less.")
    seed: int = option(0, "Seed of prompts and texts.")

    def __post_init__(self) -> None:
        check_least(self, 0, "num_texts", "seed")
        check_least(self, 1, "num_held_out", "prompt_tokens", "max_new_tokens", "batch_size")
        warm = self.temperatures
        check(bool(warm) and min(warm) >= 0, "temperatures", "a list of temperatures from 0", list(warm))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model to continue from, or else the shape of a new one in the words of transformers' LlamaConfig."""

    base: str = option(
        "", "Folder or hub id of the model to continue from, or an archive of train.handover; empty means a new one."
    )
    dtype: str = option("float32", "Type of the loaded weights, float32 or bfloat16; adapters are always float32.")
    vocab_size: int = option(4096, "Pieces of the byte-level BPE, end of text included.")
    hidden_size: int = option(192, "Width of the hidden states.")
    intermediate_size: int = option(512, "Width inside the MLP.")
    num_hidden_layers: int = option(16, "Layers, each of them an exit.")
    num_attention_heads: int = option(6, "Query heads.")
    num_key_value_heads: int = option(2, "Key and value heads.")
    max_position_embeddings: int = option(2048, "Longest text.")
    rope_theta: float = option(10_000.0, "Base of the rotary embedding.")

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, "float32", "bfloat16")
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            check(isinstance(value, str) or value > 0, f"{each.name}", "positive", value)
        check(self.vocab_size >= 257, "vocab_size", "at least 257 (all bytes and one special)", self.vocab_size)
        check(self.num_hidden_layers >= 2, "num_hidden_layers", "at least 2", self.num_hidden_layers)
        heads = self.num_attention_heads
        check(self.hidden_size % (2 * heads) == 0, "hidden_size", f"a multiple of {2 * heads}", self.hidden_size)
        kv_heads = self.num_key_value_heads
        check(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of {heads}", kv_heads)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) on a base model whose own weights stay as they are; rank 0 means none."""

    rank: int = option(0, "Width of the adapters; 0 trains all weights instead.")
    alpha: float = option(16.0, "Adapters count alpha / rank times.")
    dropout: float = option(0.0, "Chance that an input of an adapter is dropped.")
    target_modules: tuple[str, ...] = option(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "Modules that get an adapter."
    )
    merge: bool = option(True, "Whether adapters are merged into the weights, or written as an adapter folder.")

    def __post_init__(self) -> None:
        check(self.rank >= 0, "rank", "at least 0", self.rank)
        check(self.alpha > 0, "alpha", "positive", self.alpha)
        check(0 <= self.dropout < 1, "dropout", "at least 0 and below 1", self.dropout)
        check(bool(self.target_modules), "target_modules", "a list of module names", self.target_modules)


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """LayerSkip (arXiv 2404.16710): losses at early layers, and layers dropped at random."""

    period: int = option(8, "Each step trains every 8th layer's exit, shifted by one each step, and always the last.")
    scale: float = option(
        0.5, "Weight of an early exit's loss relative to the last layer's, before the weights are normalised."
    )
    distill: float = option(0.0, "Share of the teacher's distribution in a target; the rest is the text's next token.")
    teacher: str = option(
        "last", "Teacher: last, the last layer, of the early exits; or base, the model without adapters, of all."
    )
    dropout_max: float = option(
        0.1, "Chance that a sequence skips the last layer; it falls exponentially to 0 at the first."
    )

    def __post_init__(self) -> None:
        check(self.period >= 1, "period", "at least 1", self.period)
        check(self.scale >= 0, "scale", "at least 0", self.scale)
        check(0 <= self.distill <= 1, "distill", "between 0 and 1", self.distill)
        _check_choice("teacher", self.teacher, "last", "base")
        check(0 <= self.dropout_max < 1, "dropout_max", "at least 0 and below 1", self.dropout_max)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Muon for the layers' matrices and AdamW for the rest, or AdamW alone; warmup, plateau, decay."""

    kind: str = option(
        "muon", "Muon for the matrices inside the layers and AdamW for the rest, or adamw for everything."
    )
    muon_lr: float = option(4e-3, "Learning rate of Muon, in AdamW's units.")
    adamw_lr: float = option(3e-3, "Learning rate of AdamW.")
    weight_decay: float = option(0.05, "Decoupled weight decay of all matrices.")
    warmup_steps: int = option(100, "Steps over which the learning rate rises.")
    decay_fraction: float = option(0.3, "Last part of the run, in steps or time, in which it falls linearly to zero.")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.")

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, "muon", "adamw")
        check_positive(self, "muon_lr", "adamw_lr", "max_grad_norm")
        check_least(self, 0, "weight_decay", "warmup_steps")
        check(0 < self.decay_fraction <= 1, "decay_fraction", "above 0 and at most 1", self.decay_fraction)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long to train, on how much at once, and where to put the results."""

    output: str = option("runs/demo", "Checkpoints, texts and logs go here.")
    export: str = option("", "The finished model and its card go here; empty means nowhere.")
    card: str = option("", "File of Markdown text that opens the model card; empty means a general text.")
    notes: str = option("", "A sentence on hardware and time for the model card.")
    exit_layer: int = option(0, "Exit layer stored with the model; 0 chooses it by agreement and size.")
    num_speculative_tokens: int = option(0, "Draft length stored with the model; 0 chooses it likewise.")
    seed: int = option(0, "Seed of weights or adapters, data order and layer dropout.")
    max_steps: int = option(2000, "Steps of the whole run.")
    max_minutes: float = option(
        0.0, "Minutes of writing, training and measuring, after which no step begins; 0 means no limit."
    )
    windows: tuple[int, ...] = option((512,), "Window lengths in turn.")
    tokens_per_batch: int = option(4096, "Tokens computed at once.")
    gradient_accumulation_steps: int = option(2, "Batches in a step.")
    gradient_checkpointing: bool = option(
        False, "Whether layers are computed again in the backward pass, to save memory."
    )
    save_steps: int = option(100, "Steps between checkpoints.")
    log_steps: int = option(10, "Steps between lines of the log.")
    compile: bool = option(True, "Whether layers and losses are compiled.")
    bf16: bool = option(True, "Whether matrix products run in bfloat16.")

    def __post_init__(self) -> None:
        check(not self.card or Path(self.card).is_file(), "card", "a file of Markdown text", self.card)
        check_least(self, 0, "exit_layer", "num_speculative_tokens", "seed", "max_minutes")
        check_least(self, 1, "max_steps", "tokens_per_batch", "gradient_accumulation_steps")
        check_least(self, 1, "save_steps", "log_steps")
        check(min(self.windows, default=0) > 1, "windows", "a list of lengths of at least 2 tokens", self.windows)
        tokens = self.tokens_per_batch
        for length in self.windows:
            check(tokens % length == 0, "tokens_per_batch", f"a multiple of {length}", tokens)
        both = self.compile and self.gradient_checkpointing
        check(not both, "compile", "false where run.gradient_checkpointing is true", self.compile)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is measured on held-out text, while training and for the model card."""

    every_steps: int = option(500, "Steps between measurements on held-out text.")
    window: int = option(512, "Tokens in a window of held-out text.")
    num_windows: int = option(64, "Windows of held-out text.")
    prompt_tokens: int = option(256, "Tokens of held-out text before a continuation.")
    num_prompts: int = option(96, "Held-out prompts that are continued greedily, to measure agreement.")
    new_tokens: int = option(64, "Tokens of such a continuation at most.")
    batch_size: int = option(16, "Prompts answered at once; on a CPU 16 or less.")

    def __post_init__(self) -> None:
        check_least(self, 1, *(each.name for each in dataclasses.fields(self)))
        check(self.window >= 2, "window", "at least 2", self.window)
