"""How a GGUF file wants its model to be continued: the tokens that end a text, and sampling."""

from __future__ import annotations

from typing import Any

import transformers

from selfspec.errors import UnsupportedModelError
from selfspec.loading.gguf.file import GgufFile
from selfspec.loading.gguf.tokenizer import end_tokens, special_token

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
REFUSED = ("mirostat", "xtc_probability")  # where they are not zero


def read_generation_config(file: GgufFile) -> transformers.GenerationConfig:
    """The generation config that a GGUF file amounts to.

    Raises:
        UnsupportedModelError: the file asks for a kind of sampling that is not supported.
    """
    fields: dict[str, Any] = {}
    start = "general.sampling."
    given = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    for key in REFUSED:
        if given.get(key):
            raise UnsupportedModelError(
                f"{file.name} asks for general.sampling.{key} = {given[key]}, which is not supported; choose another"
            )
    for key, name in SAMPLING.items():
        if key in given:
            fields[name] = given[key]
    if fields:
        fields["do_sample"] = fields.get("temperature", 1.0) > 0
    if "tokenizer.ggml.tokens" in file.metadata:
        fields["bos_token_id"], fields["pad_token_id"] = special_token(file, "bos"), special_token(file, "padding")
        fields["eos_token_id"] = end_tokens(file)
    suppressed = file.metadata.get("tokenizer.ggml.suppress_tokens")
    if suppressed is not None and len(suppressed):
        fields["suppress_tokens"] = [int(token) for token in suppressed]
    return transformers.GenerationConfig(**fields)
