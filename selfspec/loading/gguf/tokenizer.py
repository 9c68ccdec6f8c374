"""The tokenizer of a GGUF file, from its metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf.file import GgufFile
from selfspec.loading.gguf.pre_tokenizers import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPACE = "▁"  # stands for a space in SentencePiece's tokens
# Special tokens where the file does not name them.
DEFAULTS: dict[str, dict[str, int]] = {"gpt2": {"bos": 11, "eos": 11}, "llama": {"bos": 1, "eos": 2, "unknown": 0}}
# Tokens that end a turn or a text, whatever else the file says.
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
# Tokens between files and repositories, after which a text does not go on, either.
FILE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def read_tokenizer(file: GgufFile) -> Any:
    """The tokenizer of a GGUF file, a `PreTrainedTokenizerFast`; None where the file has none.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a way of dividing texts, that is not known.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind = str(file.metadata.get("tokenizer.ggml.model"))
    if kind == "gpt2":
        made, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        made, adds_bos = _sentencepiece(file, tokens), True
    else:
        raise UnsupportedModelError(
            f"{file.name}: its tokenizer is of the kind {kind!r}, which is not supported (gpt2 and llama are); choose "
            "another file, or give a tokenizer"
        )
    added = _added(file, tokens)
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    special = {name: special_token(file, key) for name, key in _SPECIAL.items()}
    named = {name: tokens[number] for name, number in special.items() if number is not None}
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and special["bos_token"] is not None
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False) and special["eos_token"] is not None
    if begins or ends:
        around = [tokens[special["bos_token"]]] if begins else [], [tokens[special["eos_token"]]] if ends else []
        made.post_processor = _template(tokens, *around)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Given(made),
        clean_up_tokenization_spaces=False,
        chat_template=_chat_templates(file),
        model_max_length=int(file.metadata.get(f"{file.architecture}.context_length", 0)) or int(1e30),
        **named,
    )


class _Given:
    """A tokenizer that is handed over: transformers copies what it is given, by way of JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._tokenizer


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def special_token(file: GgufFile, name: str) -> int | None:
    """The id of the file's token for beginnings (`bos`), ends (`eos`, `eot`, `eom`), padding and so on; or None."""
    count = len(file.metadata["tokenizer.ggml.tokens"])
    default = DEFAULTS.get(str(file.metadata.get("tokenizer.ggml.model")), {}).get(name)
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if number is not None and int(number) >= count:
        number = default
    return int(number) if number is not None and int(number) < count else None


def end_tokens(file: GgufFile) -> list[int]:
    """The ids of all tokens that end a turn or a text, ascending: those that the file names, and known texts."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return []
    named = {special_token(file, name) for name in ("eos", "eot", "eom", *FILE_ENDS)}
    found = {number for number, token in enumerate(tokens) if token in ENDS} | {one for one in named if one is not None}
    for name, known in FILE_ENDS.items():
        if special_token(file, name) is None:
            found |= {number for number, token in enumerate(tokens) if token in known}
    texts = {tokens[number] for number in found}
    if ("<|call|>" in texts and "<|return|>" in texts) or ({"<|flush|>"} & texts and {"<|call|>", "<|calls|>"} & texts):
        found -= {number for number in found if tokens[number] == "<|end|>"}  # it ends a part of a turn there
    if "<|tool_response>" in texts:
        found -= {number for number in found if tokens[number] == "</s>"}  # an ordinary text there
    return sorted(found)


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether a text begins with a token of its own."""
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"{file.name}: its tokenizer divides texts as tokenizer.ggml.pre = {name!r} says, which is not known; "
            "choose another file, or give a tokenizer"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise OSError(f"{file.name} lacks the key tokenizer.ggml.merges; convert it again")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    pairs = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary and a + b in vocabulary]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    made.decoder = decoders.ByteLevel()
    return made, pre.add_bos


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """BPE as SentencePiece does it: the pair whose token has the highest score is merged first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise OSError(f"{file.name} lacks the key tokenizer.ggml.scores; convert it again")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    types = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    is_merged = [kind in (NORMAL, USER_DEFINED) for kind in types]
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    merges = [pair for number in order if is_merged[number] for pair in _pairs(tokens[number], vocabulary)]
    unknown = special_token(file, "unknown")
    has_bytes = "<0x0A>" in vocabulary
    made = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    begins = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if begins else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if begins else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made


def _pairs(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that a token is made of."""
    for at in range(1, len(token)):
        if token[:at] in vocabulary and token[at:] in vocabulary:
            yield token[:at], token[at:]


def _added(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    """Tokens that are found in a text before anything else."""
    types = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    strips = any(name in str(file.metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    made = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL) or (kind != USER_DEFINED and token in ENDS):
            made.append(AddedToken(token, special=True, normalized=False, rstrip=strips and token not in kept))
        elif kind == USER_DEFINED:
            made.append(AddedToken(token, special=False, normalized=False, rstrip=strips and token not in kept))
    return made


def _template(tokens: list[str], before: list[str], after: list[str]) -> Any:
    numbers = [(token, tokens.index(token)) for token in {*before, *after}]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B:1", *after], special_tokens=numbers
    )


def _chat_templates(file: GgufFile) -> Any:
    """The chat template, or several by name."""
    default = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates")
    if names is None:
        return default
    named = {str(name): file.metadata[f"tokenizer.chat_template.{name}"] for name in names}
    return {**({} if default is None else {"default": default}), **named}
