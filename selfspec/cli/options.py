"""The options that commands share: names, defaults, help and checks are written here, once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

from typer import Argument, Option

from selfspec.cli.failure import Failure, flag

# The names of `selfspec.control.registry.POLICIES`, whose import would bring numpy and torch with it.
PolicyName = Literal[
    "adaptive", "plain", "fixed", "fs", "dv", "gammatune", "gammatune+", "del", "dsde",
    "smartspec", "smartspec-lookup", "synergy", "pld",
]  # fmt: skip
DRAFTERS = ("exit", "copies", "lookup", "tree")  # `control.plan.DRAFTS`, for the same reason
OLD_NAMES = {  # accepted until 0.3, and not shown
    "max_tokens": "max_new_tokens",
    "num_speculative_tokens": "num_draft_tokens",
    "drafters": "drafts",
    "corpus": "datastore",
}
LAWS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "threads": ("lie in 1..1024", lambda n: 1 <= n <= 1024),
    "exit_layer": ("be at least 1", lambda n: n >= 1),
    "num_speculative_tokens": ("be at least 0", lambda n: n >= 0),
    "max_tokens": ("be at least 1", lambda n: n >= 1),
    "n": ("be at least 1", lambda n: n >= 1),
    "temperature": ("be a number of at least 0 (0 is greedy)", lambda t: math.isfinite(t) and t >= 0),
    "top_k": ("be at least 0", lambda n: n >= 0),
    "top_p": ("lie in (0, 1] (1 keeps all tokens)", lambda p: 0 < p <= 1),
    "min_p": ("lie in [0, 1] (0 keeps all tokens)", lambda p: 0 <= p <= 1),
    "seed": ("be a 64-bit integer", lambda n: -(1 << 63) <= n < 1 << 63),
    "repetition_penalty": ("be above 0 (1 is none)", lambda p: 0 < p < math.inf),
    "presence_penalty": ("lie in [-2, 2]", lambda p: -2 <= p <= 2),
    "frequency_penalty": ("lie in [-2, 2]", lambda p: -2 <= p <= 2),
    "no_repeat_ngram_size": ("be at least 0 (0 allows all)", lambda n: n >= 0),
    "logprobs": ("lie in 0..20", lambda n: 0 <= n <= 20),
}


def _panel(name: str, help: str, *names: str, **more: Any) -> Any:
    return Option(*names, help=help, rich_help_panel=name, **more)


_model, _draft, _sample = (partial(_panel, name) for name in ("Model", "Drafting", "Sampling"))
_chat, _out = (partial(_panel, name) for name in ("Chat", "Output"))

MODEL_HELP = "demo, smollm2, a folder, a .gguf file, or a hub id."
_DTYPE_HELP = "Default: float32 on CPU, the checkpoint's own elsewhere."
Model = Annotated[str, Argument(metavar="MODEL", show_default=False, help=MODEL_HELP)]
Adapter = Annotated[Path | None, _model("PEFT adapter for the model.", metavar="FOLDER")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16", "float64"] | None, _model(_DTYPE_HELP)]
Device = Annotated[str | None, _model("Default: cuda if there is one.", metavar="cpu|cuda|cuda:N")]
Json = Annotated[bool, _out("One JSON document.", "--json")]
Quiet = Annotated[bool, _out("Nothing on stderr but errors.", "--quiet", "-q")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is opened."""

    adapter: Adapter = None
    exit_heads: Annotated[
        str | None,
        _model("Exit heads for the model, or none. Default: those in its folder.", metavar="FOLDER|none"),
    ] = None
    dtype: Dtype = None
    device: Device = None
    engine: Annotated[
        Literal["auto", "views", "compiled"],
        _model(
            "What runs the layers: the model's own modules (views), or functions compiled on this machine (compiled). "
            "Default: compiled where it serves the model."
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        _model(
            "Round the layers' weights (needs torchao): a smaller model with a text of its own, which drafting does "
            "not change."
        ),
    ] = None
    threads: Annotated[int | None, _model("Default: one per physical core, or OMP_NUM_THREADS.", metavar="N")] = None

    @property
    def parts(self) -> dict[str, Any]:
        """What opening a model is told beside its name."""
        names = ("adapter", "exit_heads", "dtype", "device", "engine", "quantize")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Refuse what is wrong whatever the model, before seconds are spent on loading one."""
        for name, (law, holds) in LAWS.items():
            value = getattr(self, name, None)
            if value is not None and not holds(value):
                raise Failure(f"{flag(name)} must {law}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(ModelOptions):
    """How texts are continued: which model, how it drafts, and how tokens are chosen."""

    model: Annotated[str, _model("Which model.", "--model", "-m", metavar="demo|smollm2|FOLDER|FILE.gguf|HUB_ID")] = (
        "demo"
    )

    policy: Annotated[
        PolicyName | None,
        _draft(
            "How to draft; no choice changes the text. Default: adaptive, which finds exit layer and lengths by what "
            "they gain, or fixed where one is given. plain drafts nothing; the others are published methods."
        ),
    ] = None
    exit_layer: Annotated[
        int | None, _draft("Layers that draft. Default: found, or stored with the model.", metavar="E")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, _draft("Tokens drafted per round. Default: found, or stored with the model.", metavar="D")
    ] = None
    drafters: Annotated[
        str | None,
        _draft(
            "Where the drafts of adaptive may come from: early layers (exit), what followed earlier in the text "
            "(lookup); copies lets 4-bit copies of early layers draft in their place, tree lets drafts have branches. "
            "Default: all.",
            metavar="exit,copies,lookup,tree",
        ),
    ] = None
    corpus: Annotated[
        Path | None,
        _draft("Look drafts up in a corpus, too: a file that 'selfspec corpus build' wrote.", metavar="FILE"),
    ] = None
    learn: Annotated[
        Path | None,
        _draft(
            "Improve the exit heads by what is refused, and keep them in FOLDER: from there the next run goes on. At "
            "most a twentieth of the time; the text stays the same.",
            metavar="FOLDER",
        ),
    ] = None
    exact: Annotated[
        bool,
        _draft(
            "Run every call in constant shapes: text and logits are then the same to the last bit however they were "
            "drafted and batched, in bfloat16 too. Idle tokens cost some speed.",
            "--exact",
        ),
    ] = False

    max_tokens: Annotated[
        int | None, _sample("Most tokens to write. Default: the model's own, else 128; chat: 1024.", metavar="N")
    ] = None
    temperature: Annotated[
        float | None,
        _sample("0 is greedy. Default: 0, or the model's own if its generation config samples.", metavar="T"),
    ] = None
    top_k: Annotated[int | None, _sample("Keep the K likeliest; 0: all.", metavar="K")] = None
    top_p: Annotated[float | None, _sample("Keep this much probability.", metavar="P")] = None
    min_p: Annotated[float | None, _sample("Keep tokens this likely beside the likeliest.", metavar="P")] = None
    repetition_penalty: Annotated[
        float | None, _sample("Make tokens of prompt and output less likely; 1 is none.", metavar="X")
    ] = None
    presence_penalty: Annotated[
        float | None, _sample("Taken from the logits of tokens in the output; -2 to 2.", metavar="X")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sample("The same, once for every time that a token occurs there.", metavar="X")
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, _sample("Never write so many tokens in a row twice; 0 allows it.", metavar="N")
    ] = None
    seed: Annotated[int, _sample("Same seed, same text.", metavar="S")] = 0
    stop: Annotated[list[str] | None, _sample("End before this text; may be repeated.", metavar="TEXT")] = None
    stop_token_ids: Annotated[
        list[str] | None, _sample("End after one of these tokens, too; may be repeated.", metavar="ID,ID,...")
    ] = None
    ignore_generation_config: Annotated[
        bool,
        _sample(
            "Take no length, stop text, penalty or sampling from the model's generation_config.json.",
            "--ignore-generation-config",
        ),
    ] = False

    system: Annotated[str | None, _chat("System message.", metavar="TEXT")] = None

    @property
    def sources(self) -> list[str] | None:
        """The parts of --drafters; None: not given."""
        return None if self.drafters is None else [part.strip() for part in self.drafters.split(",")]

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen, as the library names it; without what was not given."""
        names = ["temperature", "top_k", "top_p", "min_p", "stop", "repetition_penalty", "presence_penalty"]
        names += ["frequency_penalty", "no_repeat_ngram_size"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = whole_numbers("stop_token_ids", self.stop_token_ids, 0, (1 << 31) - 1)
        return {name: value for name, value in given.items() if value is not None}

    def check(self) -> None:
        super().check()
        if any(not text for text in self.stop or ()):
            raise Failure("--stop must be a non-empty text, got ''")
        if self.learn is not None and (self.policy == "plain" or self.num_speculative_tokens == 0):
            raise Failure("--learn learns from refused drafts, and plain decoding has none; leave one of them out")
        if self.learn is not None and self.learn.exists() and not self.learn.is_dir():
            raise Failure(f"--learn needs a folder, got the file {self.learn}")
        _ = self.sampling
        _check_drafters(self)


@dataclass(frozen=True, kw_only=True)
class Generate(DecodingOptions):
    """What one call of `selfspec generate` was asked to do."""

    prompt: Annotated[
        str | None, Argument(metavar="[PROMPT|-]", help="Text to continue; '-' or a pipe reads stdin.")
    ] = None
    prompts: Annotated[
        str | None,
        Option(
            metavar="FILE.jsonl",
            help='Continue many prompts as one batch: one {"prompt": ...} per line, optional id, max_tokens, seed. '
            "Writes JSON lines in that order.",
        ),
    ] = None
    n: Annotated[
        int,
        Option("--n", metavar="N", help="Completions per prompt, of seeds S, S+1, ...; several are JSON lines."),
    ] = 1
    chat: Annotated[bool | None, _chat("Use the chat template. Default: if there is one.", "--chat/--no-chat")] = None
    stream: Annotated[bool, _out("Write text as it becomes certain.")] = True
    show_drafts: Annotated[bool, _out("Colour accepted drafts; strike rejected ones out.", "--show-drafts")] = False
    compare: Annotated[
        bool, _out("Time plain decoding and transformers' generate too, and compare the tokens.", "--compare")
    ] = False
    show_plan: Annotated[bool, _out("Every round's plan and what became of it, on stderr.", "--show-plan")] = False
    stats: Annotated[bool, _out("Acceptance and time, as a table.", "--stats")] = False
    as_json: Annotated[bool, _out("One JSON document instead of text.", "--json")] = False
    logprobs: Annotated[
        int | None, _out("In JSON: log-probability of every token, and of the K likeliest.", metavar="K")
    ] = None
    svg: Annotated[Path | None, _out("Also save the coloured run as a picture.", metavar="FILE")] = None
    quiet: Quiet = False

    @property
    def writes_lines(self) -> bool:
        """Whether the output is JSON lines."""
        return self.prompts is not None or self.n > 1

    @property
    def sampling(self) -> dict[str, Any]:
        given = super().sampling
        return given if self.logprobs is None else given | {"logprobs": self.logprobs}

    def check(self) -> None:
        super().check()
        if self.writes_lines:
            name, advice = "--n", "ask for one completion"
            if self.prompts is not None:
                name, advice = "--prompts", "put every prompt into the file, or leave --prompts out"
            for other in ("show_drafts", "svg", *(["prompt"] if self.prompts is not None else [])):
                if getattr(self, other):
                    raise Failure(f"{name} goes without {flag(other)}; {advice}")
        if self.compare and self.policy == "plain":
            raise Failure("--compare measures a policy that drafts against plain decoding, got --policy plain")
        if self.show_plan and self.quiet:
            raise Failure("--show-plan writes to stderr, which --quiet keeps empty; leave one of them out")
        if self.chat is False and self.system is not None:
            raise Failure("--system needs the chat template that --no-chat turns off; leave one of them out")
        if self.logprobs is not None and not (self.as_json or self.writes_lines):
            raise Failure("--logprobs are written in JSON; add --json")
        if self.svg is not None and (self.svg.is_dir() or not self.svg.resolve().parent.is_dir()):
            raise Failure(f"--svg needs a file in an existing folder, got {self.svg}")


@dataclass(frozen=True, kw_only=True)
class Chat(DecodingOptions):
    """What one call of `selfspec chat` was asked to do."""

    stats: Annotated[
        bool, _out("After a reply: tokens, speed, acceptance, tokens taken from the cache.", "--stats")
    ] = False
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class Calibrate(ModelOptions):
    """What one call of `selfspec calibrate` was asked to do."""

    model: Model
    batch_sizes: Annotated[
        list[str] | None,
        Option(metavar="B,B,...", help="Rows decoded together; may be repeated. Default: 1,2,4,8."),
    ] = None
    plan: Annotated[bool, Option("--plan", help="Also show how far to draft, by batch size.")] = False
    as_json: Json = False
    quiet: Quiet = False

    @property
    def sizes(self) -> list[int]:
        """Batch sizes in order; a single row is always among them."""
        given = self.batch_sizes or ["1,2,4,8"]
        return sorted({1, *whole_numbers("batch_sizes", given, 1, 1024, ", such as 1,2,4,8")})

    def check(self) -> None:
        _ = self.sizes
        super().check()


def whole_numbers(name: str, given: Sequence[str], least: int, most: int, example: str = "") -> list[int]:
    """The numbers in texts such as "1,2,4" and "8"."""
    parts = [part.strip() for text in given for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) < 11 and least <= int(part) <= most):
            raise Failure(f"{flag(name)} must be whole numbers in {least}..{most}{example}, got {part!r}")
    return [int(part) for part in parts]


def command_of(options: type[Any], run: Callable[[Any], object]) -> Callable[..., None]:
    """A function whose parameters are the fields of a dataclass, as typer reads them; old names fill their fields."""

    def command(**given: Any) -> None:
        for name, old in OLD_NAMES.items():
            value = given.pop(old, None)
            if value is not None and given[name] is None:
                given[name] = value
        run(options(**given))

    hints = get_type_hints(options, include_extras=True)
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = []
    for field in options.__dataclass_fields__.values():
        default = field.default if isinstance(field.default, str | int | None) else empty
        parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=hints[field.name]))
        if (old := OLD_NAMES.get(field.name)) is not None:
            hidden = cast(Any, Annotated)[hints[field.name].__origin__, Option(hidden=True)]
            parameters.append(inspect.Parameter(old, keyword, default=None, annotation=hidden))
            hints[old] = hidden
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


def _check_drafters(given: DecodingOptions) -> None:
    sources = given.sources
    if sources is not None and not set(sources) <= set(DRAFTERS):
        from selfspec.control.registry import removed_among

        gone = removed_among(sources)
        raise Failure(f"--drafters must hold some of {','.join(DRAFTERS)}, got {given.drafters!r}{gone}")
    if sources is not None and set(sources) <= {"copies", "tree"}:
        raise Failure(f"--drafters {given.drafters} only says how others draft; name exit or lookup beside it")
    corpus = given.corpus
    if corpus is not None and sources is not None and "lookup" not in sources:
        raise Failure(f"--corpus is for drafts by lookup, got --drafters {given.drafters}; add lookup to them")
    if corpus is not None and not corpus.expanduser().is_file():
        raise Failure(f"--corpus {corpus} is no file; make one with: selfspec corpus build MODEL CORPUS -o FILE")
    by_default = given.exit_layer is None and given.num_speculative_tokens is None
    if given.policy == "adaptive" or (given.policy is None and by_default):
        return
    name = given.policy or "fixed, which an exit layer or a draft length given alone stands for"
    for option, value in (("--drafters", given.drafters), ("--corpus", corpus)):
        if value is not None:
            raise Failure(
                f"{option} says what the policy adaptive may use, got the policy {name}; add --policy adaptive"
            )
