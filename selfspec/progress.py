"""How far something has come that may take seconds: log records of the level INFO, for whoever shows them."""

from __future__ import annotations

import logging

_log = logging.getLogger("selfspec")


def report(text: str, *values: object) -> None:
    """Tell how far what is being done has come; records carry `is_progress`, which tells them from other ones."""
    _log.info(text, *values, extra={"is_progress": True})


def tell(text: str, *values: object) -> None:
    """Tell once what was done at a start and what it took; records carry `is_told`, and the command line shows them."""
    _log.info(text, *values, extra={"is_told": True})
