"""Runs of eval without full garbage collections, which take longer than the questions of a test."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    monkeypatch.setattr("eval.asking.no_garbage_collection", nullcontext)
    monkeypatch.setattr("eval.asking.gc", SimpleNamespace(collect=lambda *generation: None))
