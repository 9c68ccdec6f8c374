"""How byte-level BPE tokenizers of GGUF files divide a text before merges, by the name in tokenizer.ggml.pre."""

from __future__ import annotations

from typing import NamedTuple

# Contractions, and the word patterns of GPT-2, GPT-4, Llama 3 and their like. A Split isolates matches; what is between
# matches is a piece, too.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, contraction: str = _CONTRACTION + "|", letters: str = r"\p{L}", other: str = "") -> str:
    """The pattern of Llama 3 and Qwen 2; they differ in how many digits are a piece."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s\p{{L}}{other}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str = "") -> str:
    """The pattern of GPT-4o: an upper-case run and a lower-case run are a piece."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_DIGITS = r"\p{N}"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Letters with a case, but those of Georgian and of mathematics.
_DEEPSEEK_LETTERS = r"\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}\x{1D400}-\x{1D7FF}]"


class PreTokenizer(NamedTuple):
    """How a text is divided, and what else the name says."""

    patterns: tuple[str, ...]
    """Each one divides the pieces of the one before."""
    ignore_merges: bool = False
    """Whether a piece that is a token is taken as it is."""
    add_bos: bool = False
    """Whether a text begins with the token of beginnings where the file does not say."""


_TABLE: dict[PreTokenizer, str] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
    PreTokenizer((_LLAMA3,), True, True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer(
        (_GPT2,)
    ): "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
    PreTokenizer((_DIGITS, _GPT2)): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2",
    PreTokenizer((_words(_DIGITS, letters=r"\p{L}\p{M}", other=r"\p{M}"),)): "qwen35",
    PreTokenizer((_words(_DIGITS, contraction=""),)): "ufakzeka",
    PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), True): "minicpm5",
    PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGITS)): "deepseek-coder",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((_BLOOM,)): "poro-chat bloom gpt3-finnish",
    PreTokenizer((_BLOOM, _DIGITS)): "viking",
    PreTokenizer((_cased_words(_DIGITS),), True, True): "tekken",
    PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"),)): "gpt-4o llama4 kanana2 minimax-m2",
    PreTokenizer(
        (
            rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer(
        (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGITS}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ): "seed-coder",
    PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGITS}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "exaone-moe",
}
PRE_TOKENIZERS = {name: one for one, names in _TABLE.items() for name in names.split()}
