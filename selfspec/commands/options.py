"""The options of `selfspec generate`: names, defaults and help are written here, once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from selfspec.commands.failure import Failure
from selfspec.commands.threads import check_threads

# The names of `selfspec.control.registry.POLICIES`, whose import would bring numpy and torch with it.
PolicyName = Literal[
    "adaptive",
    "plain",
    "fixed",
    "fs",
    "dv",
    "gammatune",
    "gammatune+",
    "del",
    "dsde",
    "smartspec",
    "smartspec-lookup",
    "synergy",
    "pld",
]
EngineName = Literal["auto", "views", "compiled"]
QuantizeName = Literal["int8", "int4"]
SOURCES = ("exit", "copies", "lookup", "tree")  # `control.plan.DRAFTS`, for the same reason
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DEVICE = "cpu|cuda|cuda:N"
MODEL_HELP = "demo, smollm2, a folder, a .gguf file, or a hub id."
ADAPTER_HELP = "PEFT adapter for the model."
EXIT_HEADS_HELP = "Exit heads for the model, or none. Default: those in the model's folder."
DTYPE_HELP = "Default: float32 on CPU, the checkpoint's own elsewhere."
DEVICE_HELP = "Default: cuda if there is one."
ENGINE_HELP = (
    "What runs the layers: the model's own modules (views), or functions compiled on this machine (compiled). "
    "Default: compiled where it serves the model."
)
QUANTIZE_HELP = (
    "Round the layers' weights (needs torchao): a smaller model with a text of its own, which drafting does not change."
)
THREADS_HELP = "Default: one per physical core, or OMP_NUM_THREADS."
_DRAFT, _SAMPLE, _CHAT, _OUT, _LOAD = "Drafting", "Sampling", "Chat", "Output", "Model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """What one call of `selfspec generate` was asked to do."""

    prompt: Annotated[
        str | None, Argument(metavar="[PROMPT|-]", help="Text to continue; '-' or a pipe reads stdin.")
    ] = None
    prompts: Annotated[
        str | None,
        Option(
            metavar="FILE.jsonl",
            help='Continue many prompts as one batch: one {"prompt": ...} per line, optional id, max_new_tokens, seed. '
            "Writes JSON lines in that order.",
        ),
    ] = None

    model: Annotated[
        str,
        Option(
            "--model", "-m", metavar="demo|smollm2|FOLDER|FILE.gguf|HUB_ID", help="Which model.", rich_help_panel=_LOAD
        ),
    ] = "demo"
    adapter: Annotated[Path | None, Option(metavar="FOLDER", help=ADAPTER_HELP, rich_help_panel=_LOAD)] = None
    exit_heads: Annotated[str | None, Option(metavar="FOLDER|none", help=EXIT_HEADS_HELP, rich_help_panel=_LOAD)] = None
    dtype: Annotated[Dtype | None, Option(help=DTYPE_HELP, rich_help_panel=_LOAD)] = None
    device: Annotated[str | None, Option(metavar=DEVICE, help=DEVICE_HELP, rich_help_panel=_LOAD)] = None
    engine: Annotated[EngineName, Option(help=ENGINE_HELP, rich_help_panel=_LOAD)] = "auto"
    quantize: Annotated[QuantizeName | None, Option(help=QUANTIZE_HELP, rich_help_panel=_LOAD)] = None
    threads: Annotated[int | None, Option(metavar="N", help=THREADS_HELP, rich_help_panel=_LOAD)] = None

    policy: Annotated[
        PolicyName | None,
        Option(
            help="How to draft; no choice changes the text. Default: adaptive, which finds exit layer and lengths by "
            "what they gain, or fixed where one is given. plain drafts nothing; the others are published methods.",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    exit_layer: Annotated[
        int | None,
        Option(
            metavar="E", help="Layers that draft. Default: found, or stored with the model.", rich_help_panel=_DRAFT
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        Option(
            metavar="D",
            help="Tokens drafted per round. Default: found, or stored with the model.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    drafts: Annotated[
        str | None,
        Option(
            metavar="exit,copies,lookup,tree",
            help="Where the drafts of adaptive may come from: early layers, what followed earlier in the text; copies "
            "lets 4-bit copies of early layers draft in their place, tree lets drafts have branches. Default: all.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    datastore: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Look drafts up in a corpus, too: a file that 'selfspec datastore build' wrote for this model.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    learn: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Improve the exit heads by what is refused, and keep them in FOLDER: from there the next run goes on. "
            "At most a twentieth of the time; the text stays the same.",
            rich_help_panel=_DRAFT,
        ),
    ] = None

    exact: Annotated[
        bool,
        Option(
            "--exact",
            help="Run every call in constant shapes: text and logits are then the same to the last bit however they "
            "were drafted and batched, in bfloat16 too. Idle tokens cost some speed.",
            rich_help_panel=_DRAFT,
        ),
    ] = False

    max_new_tokens: Annotated[
        int | None,
        Option(metavar="N", help="Most tokens to write. Default: the model's own, else 128.", rich_help_panel=_SAMPLE),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            metavar="T",
            help="0 is greedy. Default: 0, or the model's own if its generation config says that it samples.",
            rich_help_panel=_SAMPLE,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            metavar="K", help="Keep the K likeliest; 0: all. Default: the model's own, else 0.", rich_help_panel=_SAMPLE
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            metavar="P",
            help="Keep this much probability. Default: the model's own, else 1.",
            rich_help_panel=_SAMPLE,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            metavar="P",
            help="Keep tokens this likely beside the likeliest. Default: the model's own, else 0.",
            rich_help_panel=_SAMPLE,
        ),
    ] = None
    seed: Annotated[int, Option(metavar="S", help="Same seed, same text.", rich_help_panel=_SAMPLE)] = 0
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=_SAMPLE)
    ] = None

    ignore_generation_config: Annotated[
        bool,
        Option(
            "--ignore-generation-config",
            help="Take no length, stop text, penalty or sampling from the model's generation_config.json.",
            rich_help_panel=_SAMPLE,
        ),
    ] = False

    chat: Annotated[
        bool | None,
        Option("--chat/--no-chat", help="Use the chat template. Default: if there is one.", rich_help_panel=_CHAT),
    ] = None
    system: Annotated[str | None, Option(metavar="TEXT", help="System message.", rich_help_panel=_CHAT)] = None

    stream: Annotated[bool, Option(help="Write text as it becomes certain.", rich_help_panel=_OUT)] = True
    show_drafts: Annotated[
        bool, Option("--show-drafts", help="Colour accepted drafts; strike rejected ones out.", rich_help_panel=_OUT)
    ] = False
    compare: Annotated[
        bool,
        Option(
            "--compare",
            help="Time plain decoding and transformers' generate too, and compare the tokens.",
            rich_help_panel=_OUT,
        ),
    ] = False
    show_plan: Annotated[
        bool, Option("--show-plan", help="Every round's plan and what became of it, on stderr.", rich_help_panel=_OUT)
    ] = False
    stats: Annotated[bool, Option("--stats", help="Acceptance and time, as a table.", rich_help_panel=_OUT)] = False
    as_json: Annotated[bool, Option("--json", help="One JSON document instead of text.", rich_help_panel=_OUT)] = False
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Also save the coloured run as a picture.", rich_help_panel=_OUT)
    ] = None
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=_OUT)] = False

    @property
    def sources(self) -> list[str] | None:
        """The parts of --drafts; None: not given."""
        return None if self.drafts is None else [part.strip() for part in self.drafts.split(",")]

    def check(self) -> None:
        """Refuse what is wrong whatever the model, before seconds are spent on loading one."""
        check_threads(self.threads)
        _check_numbers(self)
        _check_pairs(self)
        _check_drafts(self)


def _check_numbers(given: Generate) -> None:
    at_least = {"num_draft_tokens": 0, "exit_layer": 1, "max_new_tokens": 1, "top_k": 0}
    for name, least in at_least.items():
        value = getattr(given, name)
        if value is not None and value < least:
            raise Failure(f"{_flag(name)} must be at least {least}, got {value}")
    if given.temperature is not None and not (math.isfinite(given.temperature) and given.temperature >= 0):
        raise Failure(f"--temperature must be a number of at least 0 (0 is greedy), got {given.temperature}")
    if given.top_p is not None and not 0 < given.top_p <= 1:
        raise Failure(f"--top-p must lie in (0, 1] (1 keeps all tokens), got {given.top_p}")
    if given.min_p is not None and not 0 <= given.min_p <= 1:
        raise Failure(f"--min-p must lie in [0, 1] (0 keeps all tokens), got {given.min_p}")
    if not -(1 << 63) <= given.seed < 1 << 63:
        raise Failure(f"--seed must be a 64-bit integer, got {given.seed}")


def _check_pairs(given: Generate) -> None:
    if given.prompts is not None:
        for name in ("prompt", "show_drafts", "svg"):
            if getattr(given, name):
                raise Failure(
                    f"--prompts goes without {_flag(name)}; put every prompt into the file, or leave --prompts out"
                )
    if given.compare and given.policy == "plain":
        raise Failure("--compare measures a policy that drafts against plain decoding, got --policy plain")
    if given.learn is not None and (given.policy == "plain" or given.num_draft_tokens == 0):
        raise Failure("--learn learns from refused drafts, and plain decoding drafts nothing; leave one of them out")
    if given.learn is not None and given.learn.exists() and not given.learn.is_dir():
        raise Failure(f"--learn needs a folder, got the file {given.learn}")
    if given.show_plan and given.quiet:
        raise Failure("--show-plan writes to stderr, which --quiet keeps empty; leave one of them out")
    if given.chat is False and given.system is not None:
        raise Failure("--system needs the chat template that --no-chat turns off; leave one of them out")
    if any(not text for text in given.stop or ()):
        raise Failure("--stop must be a non-empty text, got ''")
    if given.svg is not None and (given.svg.is_dir() or not given.svg.resolve().parent.is_dir()):
        raise Failure(f"--svg needs a file in an existing folder, got {given.svg}")


def _check_drafts(given: Generate) -> None:
    sources = given.sources
    if sources is not None and not set(sources) <= set(SOURCES):
        from selfspec.control.registry import removed_among

        raise Failure(f"--drafts must hold some of {','.join(SOURCES)}, got {given.drafts!r}{removed_among(sources)}")
    if sources is not None and set(sources) <= {"copies", "tree"}:
        raise Failure(f"--drafts {given.drafts} only says how others draft; name exit or lookup beside it")
    store = given.datastore
    if store is not None and sources is not None and "lookup" not in sources:
        raise Failure(f"--datastore is for drafts by lookup, got --drafts {given.drafts}; add lookup to them")
    if store is not None and not store.expanduser().is_file():
        raise Failure(f"--datastore {store} is no file; make one with: selfspec datastore build MODEL CORPUS -o FILE")
    by_default = given.exit_layer is None and given.num_draft_tokens is None
    if given.policy == "adaptive" or (given.policy is None and by_default):
        return
    name = given.policy or "fixed, which an exit layer or a draft length given alone stands for"
    for flag, value in (("--drafts", given.drafts), ("--datastore", store)):
        if value is not None:
            raise Failure(f"{flag} says what the policy adaptive may use, got the policy {name}; add --policy adaptive")


def _flag(name: str) -> str:
    return "PROMPT" if name == "prompt" else "--" + name.replace("_", "-")
