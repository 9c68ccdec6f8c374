"""Names of methods: selfspec's policies, transformers' own decoders, llama.cpp, and any other engine.

plain, adaptive, fs, ...            a policy of selfspec
fixed:E,D                           exit layer E, D drafted tokens
adaptive:exit+copies                adaptive, with drafts from these sources alone
transformers                        `model.generate`
transformers:early_exit:E           with assistant_early_exit=E
transformers:prompt_lookup:N        with prompt_lookup_num_tokens=N
transformers:assistant:MODEL        with a second model that drafts
llama.cpp, llama.cpp:FILE           llama.cpp on the model's own GGUF file, or on FILE
external:NAME                       a command, see eval/external.py
"""

from __future__ import annotations

import difflib
import re
from typing import Any, NamedTuple

from selfspec.control.plan import DRAFTS
from selfspec.control.registry import POLICIES

BESIDE = {"copies", "tree"}  # sources of drafts that only change how others draft
PEERS = ("early_exit", "prompt_lookup", "assistant")
LLAMA_CPP = "llama.cpp"
PLAIN_KINDS = ("plain", "transformers")  # methods that draft nothing: a run's speedups are over the fastest of them
FORMS = (
    *POLICIES,
    "fixed:E,D",
    *(f"adaptive:{one}" for one in DRAFTS if one not in BESIDE),
    f"adaptive:{'+'.join(DRAFTS)}",
    "transformers",
    "transformers:early_exit:E",
    "transformers:prompt_lookup:N",
    "transformers:assistant:MODEL",
    LLAMA_CPP,
    "llama.cpp:FILE",
    "external:NAME",
)


class MethodName(NamedTuple):
    """A method's name and what it says.

    Attributes:
        kind: a policy, "transformers", one of PEERS, "llama.cpp" or "external".
        option: what follows the last colon; empty where nothing does.
    """

    name: str
    kind: str
    option: str = ""

    @property
    def is_ours(self) -> bool:
        return self.kind in POLICIES

    @property
    def settings(self) -> dict[str, Any]:
        """Of one of ours: how the library is asked for it (see `eval.models.rounds`)."""
        found: dict[str, Any] = {"policy": self.kind}
        if self.kind == "adaptive" and self.option:
            found["drafts"] = tuple(self.option.split("+"))
        elif self.option:
            found["exit_layer"], found["num_draft_tokens"] = map(int, self.option.split(","))
        return found


def parse_method(name: str) -> MethodName:
    """The parts of a method's name.

    Raises:
        ValueError: no such method; the closest name is told.
    """
    first, _, rest = name.partition(":")
    second, _, option = rest.partition(":")
    if name in (*POLICIES, "transformers", LLAMA_CPP):
        return MethodName(name, name)
    if first == "fixed" and re.fullmatch(r"[1-9]\d*,[1-9]\d*", rest):
        return MethodName(name, first, rest)
    if first == "adaptive" and _are_sources(rest.split("+")):
        return MethodName(name, first, rest)
    if first == "transformers" and second in PEERS and option:
        if second == "assistant" or re.fullmatch(r"[1-9]\d*", option):
            return MethodName(name, second, option)
    elif first in (LLAMA_CPP, "external") and rest:
        return MethodName(name, first, rest)
    close = difflib.get_close_matches(name, FORMS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {' '.join(FORMS)}"
    raise ValueError(f"method {name!r} is unknown; {hint}")


def _are_sources(names: list[str]) -> bool:
    return len(set(names)) == len(names) and {*names} <= {*DRAFTS} and not {*names} <= BESIDE


def check_exit_layer(method: MethodName, exit_layer: int | None, num_layers: int) -> None:
    """ValueError unless the model has this exit layer."""
    if exit_layer is not None and not exit_layer < num_layers:
        raise ValueError(
            f"method {method.name!r}: the exit layer must lie in 1..{num_layers - 1} for this model, got {exit_layer}"
        )


def file_name(method: str) -> str:
    """A name that any file system takes, different for different methods of a run in all but contrived cases."""
    return re.sub(r"[^\w.,+-]+", "-", method)
