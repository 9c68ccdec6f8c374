"""The class of every request field that OpenAI's, Anthropic's, vLLM's and llama-server's clients may send.

Honoured are the fields of the bodies in `protocol.py`, `responses.py` and `messages.py`. Here are the others: neutral
ones, which cannot change the output, and refused ones, which would, with the values that ask for nothing. A field that
is in none of the lists is refused, too. docs/serving.md has the same table, which a test compares.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from selfspec.serving.refusal import Refusal, shown

_log = logging.getLogger("selfspec.serving")

# They cannot change the output: accepted at any value, ignored, and logged once.
NAMES = (
    # OpenAI's and Anthropic's
    "cache_control inference_geo metadata prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier store user "
    # vLLM's
    "cache_salt include_reasoning length_penalty media_io_kwargs priority request_id return_mm_kwargs "
    "return_token_offsets routed_experts_prompt_start session_id spaces_between_special_tokens stream_interval "
    # llama-server's; some of them belong to samplers that are refused
    "cache_prompt dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent id_slot "
    "mirostat_eta mirostat_tau n_cache_reuse n_keep parse_tool_calls reasoning_format repeat_last_n return_progress "
    "sse_ping_interval timings_per_token xtc_threshold"
)
NEUTRAL = frozenset(NAMES.split())

# They ask for what is not served: refused by name, but for null and these values, which ask for nothing. By values.
_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "audio background_options container conversation image max_tool_calls moderation previous_response_id "
        "web_search_options allowed_token_ids chat_template ec_transfer_params kv_transfer_params "
        "logprob_token_ids mm_processor_kwargs prompt_embeds repetition_detection samplers",
    ),
    (
        ([],),
        "access_programs context_management functions mcp_servers bad_words logits_processors image_data lora "
        "response_fields",
    ),
    ((0,), "dry_multiplier dynatemp_range mirostat n_indent n_probs xtc_probability"),
    ((False,), "background return_prompt_text use_beam_search watermarking post_sampling_probs return_tokens"),
    ((1,), "best_of n_cmpl repeat_penalty typical_p"),
    ((-1,), "thinking_token_budget n_predict top_n_sigma"),
    ((0, -1), "t_max_predict_ms t_max_prompt_ms"),
    (({},), "output_config vllm_xargs"),
    (("",), "suffix"),
    (("disabled",), "truncation"),
    (("medium",), "verbosity"),
    (("none",), "function_call"),
    (("standard",), "speed"),
    ((0, 1), "min_keep"),
    ((["text"],), "modalities"),
    (({"type": "disabled"},), "thinking"),
)
REFUSED = {name: values for values, names in _NEUTRAL_VALUES for name in names.split()}
INSTEAD = {  # what to do in place of a refused field
    "best_of": "send n, and choose among the answers",
    "chat_template": "start the server with --chat-template",
    "conversation": "send the conversation's messages as input",
    "n_cmpl": "send n",
    "n_predict": "send max_tokens",
    "n_probs": "send logprobs",
    "repeat_penalty": "send repetition_penalty",
    "return_tokens": "send return_token_ids",
    "suffix": "put the text after the gap into the prompt",
}


def check_fields(given: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse fields without a meaning here that ask for something.

    Args:
        given: those that the request's body does not know, by name.
        prefix: the name of the part of the body that they are in, with a dot.

    Raises:
        Refusal: 400, the first of them.
    """
    for name, value in given.items():
        if value is None or any(_same(value, one) for one in REFUSED.get(name, ())):
            continue
        if name in NEUTRAL:
            _note(name)
            continue
        if name in REFUSED:
            message = f"{prefix}{name} is not supported, got {shown(value)}; {INSTEAD.get(name, 'leave it out')}"
        else:
            message = f"{prefix}{name} is no field of this request; leave it out"
        raise Refusal(message, param=prefix + name, code="unsupported_parameter")


@lru_cache(maxsize=256)
def _note(name: str) -> None:
    """Say once that a field has no effect."""
    _log.info("the field %s of a request has no effect here", name)


def _same(value: Any, neutral: Any) -> bool:
    """Whether they are equal, without taking 1 for True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
