"""A tiny model, opened, or in a folder for commands that open a model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.models import open_llm, with_policy
from tests.models import build


def save_model(path):
    """A tiny random model with a tokenizer of single bytes."""
    build("llama", vocab_size=260).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i + 3 for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def tiny_llm(**settings):
    """A tiny random model, decoded plainly or with a policy."""
    return with_policy(open_llm(build("llama")), **{"policy": "plain", **settings})
