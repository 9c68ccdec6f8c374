"""Studies of a run: what its figures need beside the answers, each measured once and kept in `studies/NAME.json`."""

from __future__ import annotations

NAMES = ("acceptance", "grid", "batch", "policies")
