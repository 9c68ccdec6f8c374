"""selfspec: one Hugging Face causal LM drafts with its first layers and verifies with the rest. No token changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfspec.collector import uncollected
from selfspec.version import __version__ as __version__

if TYPE_CHECKING:
    from selfspec.control.plan import Policy as Policy
    from selfspec.core import Plan as Plan
    from selfspec.core import RoundOutput as RoundOutput
    from selfspec.core import RowRound as RowRound
    from selfspec.decoding.engine import LLMEngine as LLMEngine
    from selfspec.decoding.outputs import CompletionOutput as CompletionOutput
    from selfspec.decoding.outputs import Logprob as Logprob
    from selfspec.decoding.outputs import RequestOutput as RequestOutput
    from selfspec.decoding.outputs import SpecStats as SpecStats
    from selfspec.drafting.datastore import Datastore as Datastore
    from selfspec.errors import CacheFullError as CacheFullError
    from selfspec.errors import DatastoreError as DatastoreError
    from selfspec.errors import UnsupportedModelError as UnsupportedModelError
    from selfspec.llm import LLM as LLM
    from selfspec.params import SamplingParams as SamplingParams
    from selfspec.params import SpeculativeConfig as SpeculativeConfig
    from selfspec.structured.outputs import StructuredOutputs as StructuredOutputs

_MODULES = {
    "selfspec.control.plan": ("Policy",),
    "selfspec.core": ("Plan", "RoundOutput", "RowRound"),
    "selfspec.decoding.engine": ("LLMEngine",),
    "selfspec.decoding.outputs": ("CompletionOutput", "Logprob", "RequestOutput", "SpecStats"),
    "selfspec.drafting.datastore": ("Datastore",),
    "selfspec.errors": ("CacheFullError", "DatastoreError", "UnsupportedModelError"),
    "selfspec.llm": ("LLM",),
    "selfspec.params": ("SamplingParams", "SpeculativeConfig"),
    "selfspec.structured.outputs": ("StructuredOutputs",),
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import selfspec` costs nothing, torch and transformers come with the first name used."""
    from importlib import import_module

    if name == "__all__":
        return [one for names in _MODULES.values() for one in names]
    for module, names in _MODULES.items():
        if name in names:
            with uncollected():
                return getattr(import_module(module), name)
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
