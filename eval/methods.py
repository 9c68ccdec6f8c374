"""Names of methods: selfspec's policies, transformers' own decoders, and llama.cpp.

plain, adaptive, fs, ...            a policy of selfspec
fixed:E,D                           exit layer E, D drafted tokens
adaptive:exit+copies                adaptive, with these drafters only
transformers                        `model.generate`
transformers:early_exit:E           with assistant_early_exit=E
transformers:prompt_lookup:N        with prompt_lookup_num_tokens=N
transformers:assistant:MODEL        with a second model as the drafter
llama.cpp, llama.cpp:FILE           llama.cpp on the model's own GGUF file, or on FILE
"""

from __future__ import annotations

import difflib
import re
from typing import Any, NamedTuple

from selfspec.control.registry import POLICIES
from selfspec.params import DRAFTERS

DRAFTER_OPTIONS = {"copies"}  # it changes how another drafter drafts, and drafts nothing alone
PEERS = ("early_exit", "prompt_lookup", "assistant")
LLAMA_CPP = "llama.cpp"
PLAIN_KINDS = ("plain", "transformers")  # methods that draft nothing: the default baselines
FORMS = (
    *POLICIES,
    "fixed:E,D",
    *(f"adaptive:{one}" for one in DRAFTERS if one not in DRAFTER_OPTIONS),
    f"adaptive:{'+'.join(DRAFTERS)}",
    "transformers",
    "transformers:early_exit:E",
    "transformers:prompt_lookup:N",
    "transformers:assistant:MODEL",
    LLAMA_CPP,
    "llama.cpp:FILE",
)


class MethodName(NamedTuple):
    """A parsed method name.

    Attributes:
        kind: a policy, "transformers", one of PEERS or "llama.cpp".
        option: the text after the last colon; empty where there is none.
    """

    name: str
    kind: str
    option: str = ""

    @property
    def is_ours(self) -> bool:
        return self.kind in POLICIES

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `SpeculativeConfig` for a policy of selfspec."""
        found: dict[str, Any] = {"policy": self.kind}
        if self.kind == "adaptive" and self.option:
            found["drafters"] = tuple(self.option.split("+"))
        elif self.option:
            found["exit_layer"], found["num_speculative_tokens"] = map(int, self.option.split(","))
        return found


def parse_method(name: str) -> MethodName:
    """Parse a method's name.

    Raises:
        ValueError: there is no such method; the message names the closest one.
    """
    first, _, rest = name.partition(":")
    second, _, option = rest.partition(":")
    if name in (*POLICIES, "transformers", LLAMA_CPP):
        return MethodName(name, name)
    if first == "fixed" and re.fullmatch(r"[1-9]\d*,[1-9]\d*", rest):
        return MethodName(name, first, rest)
    if first == "adaptive" and _are_drafters(rest.split("+")):
        return MethodName(name, first, rest)
    if first == "transformers" and second in PEERS and option:
        if second == "assistant" or re.fullmatch(r"[1-9]\d*", option):
            return MethodName(name, second, option)
    elif first == LLAMA_CPP and rest:
        return MethodName(name, first, rest)
    close = difflib.get_close_matches(name, FORMS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {' '.join(FORMS)}"
    raise ValueError(f"method {name!r} is unknown; {hint}")


def _are_drafters(names: list[str]) -> bool:
    return len(set(names)) == len(names) and {*names} <= {*DRAFTERS} and not {*names} <= DRAFTER_OPTIONS


def check_exit_layer(method: MethodName, exit_layer: int | None, num_layers: int) -> None:
    """ValueError unless the model has this exit layer."""
    if exit_layer is not None and not exit_layer < num_layers:
        raise ValueError(
            f"method {method.name!r}: the exit layer must lie in 1..{num_layers - 1} for this model, got {exit_layer}"
        )


def file_name(method: str) -> str:
    """The method's name with every character that is unusual in file names replaced by a dash."""
    return re.sub(r"[^\w.,+-]+", "-", method)
