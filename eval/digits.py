"""Figures as they are written down."""

from __future__ import annotations

from typing import Any


def rounded(value: Any) -> Any:
    """The same with six significant digits: no clock is better than that."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
