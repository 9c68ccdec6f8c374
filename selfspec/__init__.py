"""selfspec: one Hugging Face causal LM drafts with its first layers and verifies with the rest. No token changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.control.plan import Plan, Policy
    from selfspec.decoding.engine import Engine
    from selfspec.decoding.request import Completion, Request
    from selfspec.decoding.results import Round, RowResult
    from selfspec.decoding.stats import SpecStats
    from selfspec.drafting.datastore import Datastore
    from selfspec.errors import CacheFullError, DatastoreError, UnsupportedModelError
    from selfspec.legacy import load
    from selfspec.target import Target

__version__ = "0.1.0"
__all__ = [
    "CacheFullError",
    "Completion",
    "Datastore",
    "DatastoreError",
    "Engine",
    "Plan",
    "Policy",
    "Request",
    "Round",
    "RowResult",
    "SpecStats",
    "Target",
    "UnsupportedModelError",
    "load",
]

_HOMES = {
    "CacheFullError": "selfspec.errors",
    "Completion": "selfspec.decoding.request",
    "Datastore": "selfspec.drafting.datastore",
    "DatastoreError": "selfspec.errors",
    "Engine": "selfspec.decoding.engine",
    "Plan": "selfspec.control.plan",
    "Policy": "selfspec.control.plan",
    "Request": "selfspec.decoding.request",
    "Round": "selfspec.decoding.results",
    "RowResult": "selfspec.decoding.results",
    "SpecStats": "selfspec.decoding.stats",
    "Target": "selfspec.target",
    "UnsupportedModelError": "selfspec.errors",
    "load": "selfspec.legacy",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import selfspec` costs nothing, torch and transformers come with the first name used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    import sys
    from importlib import import_module

    from selfspec.hushed import hushed

    home = sys.modules.get(_HOMES[name])
    if home is None:
        with hushed():
            home = import_module(_HOMES[name])
    return getattr(home, name)
