"""selfspec: one Hugging Face causal LM drafts with its first layers and verifies with the rest. No token changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfspec.version import __version__ as __version__

if TYPE_CHECKING:
    from selfspec.control.plan import Plan, Policy
    from selfspec.decoding.results import Round, RowResult
    from selfspec.decoding.stats import SpecStats
    from selfspec.drafting.datastore import Datastore
    from selfspec.errors import CacheFullError, DatastoreError, UnsupportedModelError
    from selfspec.legacy import Engine, load
    from selfspec.llm import LLM, LLMEngine
    from selfspec.outputs import CompletionOutput, Logprob, RequestOutput
    from selfspec.params import SamplingParams, SpeculativeConfig

__all__ = [
    "LLM",
    "CacheFullError",
    "CompletionOutput",
    "Datastore",
    "DatastoreError",
    "Engine",
    "LLMEngine",
    "Logprob",
    "Plan",
    "Policy",
    "RequestOutput",
    "Round",
    "RowResult",
    "SamplingParams",
    "SpecStats",
    "SpeculativeConfig",
    "UnsupportedModelError",
    "load",
]

_HOMES = {
    "CacheFullError": "selfspec.errors",
    "CompletionOutput": "selfspec.outputs",
    "Datastore": "selfspec.drafting.datastore",
    "DatastoreError": "selfspec.errors",
    "Engine": "selfspec.legacy",
    "LLM": "selfspec.llm",
    "LLMEngine": "selfspec.llm",
    "load": "selfspec.legacy",
    "Logprob": "selfspec.outputs",
    "Plan": "selfspec.control.plan",
    "Policy": "selfspec.control.plan",
    "RequestOutput": "selfspec.outputs",
    "Round": "selfspec.decoding.results",
    "RowResult": "selfspec.decoding.results",
    "SamplingParams": "selfspec.params",
    "SpecStats": "selfspec.decoding.stats",
    "SpeculativeConfig": "selfspec.params",
    "UnsupportedModelError": "selfspec.errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import selfspec` costs nothing, torch and transformers come with the first name used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
