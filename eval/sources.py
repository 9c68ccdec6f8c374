"""Policies by name in comparisons: `adaptive:exit+tree` is `adaptive` whose drafts come from these alone."""

from __future__ import annotations

from selfspec.control.plan import DRAFTS
from selfspec.control.registry import POLICIES

WITH_SOURCES = "adaptive"
BESIDE = {"copies", "tree"}  # which only change how others draft
CHAIN = f"{WITH_SOURCES}:exit"
FORMS = tuple([f"{WITH_SOURCES}:{one}" for one in (*[d for d in DRAFTS if d not in BESIDE], "+".join(DRAFTS))])


def split_policy(name: str) -> tuple[str, tuple[str, ...] | None]:
    """A policy's own name, and where its drafts may come from; None: wherever they do.

    Raises:
        ValueError: there is no such policy or source.
    """
    policy, colon, rest = name.partition(":")
    drafts = tuple(rest.split("+")) if colon else None
    fits = drafts is None or (policy == WITH_SOURCES and len(set(drafts)) == len(drafts) and {*drafts} <= {*DRAFTS})
    if policy not in POLICIES or not fits or (drafts and {*drafts} <= BESIDE):
        known = ", ".join(POLICIES)
        raise ValueError(f"policies must be among {known}, or such as {FORMS[0]} or {FORMS[-1]}, got {name!r}")
    return policy, drafts
