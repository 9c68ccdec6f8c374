"""`selfspec chat`: a conversation."""

from __future__ import annotations

from selfspec.cli.options import Chat


def chat(options: Chat) -> None:
    raise NotImplementedError
