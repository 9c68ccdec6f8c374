"""Method names: what stands before and between their colons."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from eval.sources import FORMS as WITH_SOURCES
from eval.sources import split_policy
from selfspec.control.registry import POLICIES

PEERS = ("transformers", "early_exit", "prompt_lookup", "assistant")
PLAIN_KINDS = ("plain", "transformers")  # methods that guess nothing: what a speedup may be over
FORMS = (
    *POLICIES,
    "fixed:E,D",
    "transformers",
    "transformers:early_exit:E",
    "transformers:prompt_lookup:N",
    "transformers:assistant:MODEL",
    *WITH_SOURCES,
    "external:NAME",
)


class MethodName(NamedTuple):
    """A parsed name: its kind (a policy, one of PEERS, or "external"), and what the name tells beside it."""

    name: str
    kind: str
    options: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(option) for option in self.options)

    @property
    def is_ours(self) -> bool:
        return self.kind in POLICIES


def parse_method(name: str) -> MethodName:
    """The parts of a method's name.

    Raises:
        ValueError: no such method; the closest name is told.
    """
    first, _, rest = name.partition(":")
    second, _, option = rest.partition(":")
    if name in POLICIES or name == "transformers":
        return MethodName(name, name)
    if first == "fixed" and re.fullmatch(r"[1-9]\d*,[1-9]\d*", rest):
        return MethodName(name, first, tuple(rest.split(",")))
    if first == "adaptive" and (drafts := _sources(name)):
        return MethodName(name, first, drafts)
    fits = second == "assistant" or re.fullmatch(r"[1-9]\d*", option)
    if first == "transformers" and second in PEERS[1:] and option and fits:
        return MethodName(name, second, (option,))
    if first == "external" and rest:
        return MethodName(name, first, (rest,))
    raise ValueError(f"method {name!r} is unknown; {_hint(name)}")


def _sources(name: str) -> tuple[str, ...]:
    try:
        return split_policy(name)[1] or ()
    except ValueError:
        return ()


def _hint(name: str) -> str:
    """The closest form, its letters for numbers and names left as they are."""
    close = difflib.get_close_matches(name, FORMS, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {' '.join(FORMS)}"


def file_name(method: str) -> str:
    """A name that any file system takes, different for different methods of a run in all but contrived cases."""
    return re.sub(r"[^\w.,+-]+", "-", method)
