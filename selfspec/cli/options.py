"""Options come from the fields of dataclasses: `command` makes a typer command of a function that takes such objects.

A field's option has its name, default and type, and as help its entry in the `Args` of the dataclass's docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from typer import Argument, Option

from selfspec.cli.failure import RUN, USAGE, Failure
from selfspec.control.registry import POLICIES
from selfspec.errors import DatastoreError
from selfspec.params import SamplingParams, SpeculativeConfig
from selfspec.serving.config import ENV_API_KEY, ServerConfig

MODEL_HELP = "demo, smollm2, a folder, a .gguf file, or a hub id such as org/name or org/name:Q4_K_M."
ModelArgument = Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
DEFAULT_HELP = f"{MODEL_HELP} Default: smollm2 where its package is installed, else demo."
ModelOption = Annotated[
    str | None,
    Option("--model", "-m", metavar="MODEL", help=DEFAULT_HELP, rich_help_panel="Model", show_default=False),
]
Learn = Annotated[
    Path | None,
    Option(
        help="Train exit heads on finished answers, and keep them in FOLDER: from there the next run goes on. At most "
        "a twentieth of the time; the text stays the same.",
        metavar="FOLDER",
        rich_help_panel="Speculative",
    ),
]
IgnoreGenerationConfig = Annotated[
    bool,
    Option(
        "--ignore-generation-config",
        help="Take no length, stop text, penalty or sampling from the model's generation_config.json.",
        rich_help_panel="Sampling",
    ),
]
System = Annotated[str | None, Option(help="System message.", metavar="TEXT")]
Json = Annotated[bool, Option("--json", help="One JSON document.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.")]
ServedModelName = Annotated[
    list[str] | None,
    Option(help="How requests call the model; it may have several names. Default: MODEL.", metavar="NAME"),
]
Replicas = Annotated[
    int | None,
    Option(
        help="So many processes on Ray, with a GPU each where there are GPUs. Needs the extra 'ray'.", min=1, max=1024
    ),
]
MaxReplicas = Annotated[
    int | None,
    Option(
        help="With --replicas: start further ones, up to so many, while more requests are open than have places. "
        "Default: none.",
        min=1,
        max=1024,
    ),
]

# Fields without an option: those that only a program can give, and those that commands give by options of their own.
NO_OPTION = {
    "aliases",
    "generation_config",
    "learn",
    "logit_bias",
    "logits_processors",
    "model",
    "prediction",
    "prompt_logprobs",
    "speculative",
    "structured_outputs",
}
TYPES: dict[str, Any] = {  # of fields whose annotation typer cannot read
    "allowed_origins": list[str] | None,
    "api_key": list[str] | None,
    "corpus": Path | None,
    "drafters": list[str] | None,
    "policy": Literal[tuple(POLICIES)] | None,
    "stop": list[str] | None,
    "stop_token_ids": list[str] | None,
}
DETAILS: dict[str, dict[str, Any]] = {
    "allowed_origins": {"metavar": "ORIGIN"},
    "api_key": {"envvar": ENV_API_KEY, "metavar": "KEY"},
    "corpus": {
        "exists": True,
        "dir_okay": False,
        "metavar": "FILE",
        "help": "Look drafts up in a corpus, too: a file that 'selfspec corpus build' wrote.",
    },
    "drafters": {"metavar": "exit,lookup,..."},
    "max_tokens": {"help": "Most new tokens. Default: the model's own, else 128; chat: 1024."},
    "policy": {
        "help": "How drafts are made; no policy changes the text. Default: adaptive, or fixed where one of the next "
        "two is given."
    },
    "reuse_responses": {
        "help": "Look drafts up in responses that this run finished before, too. The text stays the same; the speed of "
        "a request may tell that a similar one came before it."
    },
    "stop": {"metavar": "TEXT"},
    "stop_token_ids": {"metavar": "ID,ID,..."},
    "temperature": {
        "help": "0 is greedy. Default: the model's own if its generation config samples, else 0; chat: 0.7."
    },
    "threads": {"min": 1, "max": 1024},
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is opened: arguments of `LLM`, and the threads that torch uses.

    Args:
        adapter: a folder with a PEFT adapter for the model.
        exit_heads: a folder with exit heads, which change drafts only, or none; default: those in the model's folder.
        dtype: default: float32 on CPU, the checkpoint's own elsewhere.
        device: default: cuda if there is one; else cpu. One of several is cuda:N.
        quantize: round the layers' weights (needs torchao), which makes it another model.
        precision: of activations, keys and values of a GGUF file on CPU: two bytes, with a scale per 32 numbers, or
            float32; auto: two bytes.
        backend: what runs the layers: the model's own modules (views), or C++ for this machine (compiled); auto:
            compiled where it serves the model.
        exact: text and logits are the same to the last bit however they were drafted and batched, in bfloat16 too. It
            needs compiled layers on CPU, or fused layers on CUDA, and may cost some speed.
        threads: default: one per physical core, or OMP_NUM_THREADS.
    """

    adapter: str | None = None
    exit_heads: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] | None = None
    device: str | None = None
    quantize: Literal["int8", "int4"] | None = None
    precision: Literal["auto", "float32"] = "auto"
    backend: Literal["auto", "views", "compiled"] = "auto"
    exact: bool = False
    threads: int | None = None


def command(run: Callable[..., Any], without: Collection[str] = ()) -> Callable[..., Any]:
    """A function for typer. Parameters of `run` that are dataclasses become an option per field, and are made of them.

    Args:
        without: further fields that get no option.
    """
    hints = get_type_hints(run, include_extras=True)
    parameters, objects = list[inspect.Parameter](), dict[str, tuple[Any, list[Field[Any]]]]()
    for name, parameter in inspect.signature(run).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            shown = [one for one in fields(kind) if one.name not in NO_OPTION and one.name not in without]
            objects[name] = kind, shown
            parameters += _parameters(kind, shown)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def called(**given: Any) -> Any:
        with as_sentences():
            for name, (kind, shown) in objects.items():
                given[name] = kind(**{one.name: _value(one.name, given.pop(one.name)) for one in shown})
        return run(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _parameters(kind: Any, shown: Sequence[Field[Any]]) -> Iterator[inspect.Parameter]:
    """A parameter per field, as typer reads them; "SamplingParams" are in a panel "Sampling"."""
    panel, helps = re.sub("(Options|Params|Config)$", "", kind.__name__), _helps(kind)
    for one in shown:
        given = TYPES.get(one.name) or eval(str(one.type), vars(sys.modules[kind.__module__]))
        names = [flag(one.name)] if one.default is False else []  # a default of True has --no-..., too
        details = {"rich_help_panel": panel, "help": helps.get(one.name), **DETAILS.get(one.name, {})}
        annotated: Any = Annotated
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        annotation = annotated[given, Option(*names, **details)]
        yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _helps(kind: type) -> dict[str, str]:
    """The entries of a docstring's `Args`."""
    block = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
    return {name: text[0].upper() + " ".join(text.split())[1:] for name, text in entries}


def _value(name: str, given: Any) -> Any:
    """What an option gives its field: lists may be written with commas."""
    if name not in ("drafters", "stop_token_ids") or given is None:
        return given
    return numbers(name, given, 0) if name == "stop_token_ids" else split(given)


def split(given: Sequence[str]) -> list[str]:
    """The parts of texts such as "1,2" and "3"."""
    return [part.strip() for text in given for part in text.split(",")]


def numbers(name: str, given: Sequence[str], least: int, most: int = (1 << 31) - 1, example: str = "") -> list[int]:
    """The numbers in texts such as "1,2,4" and "8"."""
    for part in (parts := split(given)):
        if not (part.isascii() and part.isdecimal() and len(part) < 11 and least <= int(part) <= most):
            raise Failure(f"{flag(name)} must be whole numbers in {least}..{most}{example}, got {part!r}")
    return [int(part) for part in parts]


def flag(name: str) -> str:
    """How an option is called on the command line."""
    return "PROMPT" if name == "prompt" else "--" + name.replace("_", "-")


@contextmanager
def as_sentences() -> Iterator[None]:
    """Turn what the library raises at its border into failures: bad values are usage, all else belongs to the run."""
    try:
        yield
    except ValueError as problem:
        raise Failure(_with_flag(str(problem)), RUN if isinstance(problem, DatastoreError) else USAGE) from problem
    except (OSError, ImportError, RuntimeError) as problem:
        if type(problem) is RuntimeError or isinstance(problem, BrokenPipeError):
            raise  # a mistake of ours: its traceback is wanted
        raise Failure(_with_flag(str(problem)), RUN) from problem


def _with_flag(sentence: str) -> str:
    """The library's sentences begin with a parameter's name, or say what to set it to; say the option's instead."""
    kinds: tuple[Any, ...] = (ModelOptions, SamplingParams, SpeculativeConfig, ServerConfig)
    names = "|".join(one.name for kind in kinds for one in fields(kind))
    sentence = re.sub(rf"\b({names})='(\S+)'", lambda found: f"{flag(found[1])} {found[2]}", sentence)
    return re.sub(rf"^({names})\b(?!:)", lambda found: flag(found[0]), sentence)
