"""The options of all commands: names, defaults, help and checks are written here, once."""

# ruff: noqa: RUF009 - what the calls make are `dataclasses.field`s
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

from typer import Argument, Option

from selfspec.cli.failure import Failure, flag
from selfspec.serving.config import LEAST_CACHED

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
    "backend": "engine",
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
    "port": ("lie in 0..65535 (0 takes a free one)", lambda n: 0 <= n <= 65535),
    "max_num_seqs": ("be at least 1", lambda n: n >= 1),
    "max_num_cached_tokens": (
        f"be at least {LEAST_CACHED}, a short prompt and its answer (left out: 2048 per output)",
        lambda n: n >= LEAST_CACHED,
    ),
    "max_waiting_requests": ("be at least 0", lambda n: n >= 0),
    "max_waiting_tokens": ("be at least 0", lambda n: n >= 0),
    "request_timeout": ("be a number of seconds above 0", lambda s: 0 < s < math.inf),
    "max_body_bytes": ("be at least 1", lambda n: n >= 1),
    "replicas": ("lie in 1..1024", lambda n: 1 <= n <= 1024),
}


MODEL_HELP = "demo, smollm2, a folder, a .gguf file, or a hub id."
CACHED_HELP = "Tokens whose keys and values fit at once. Default: 2048, or the context, per output."
REPLICAS_HELP = "So many processes on Ray, with a GPU each where there are GPUs. Needs the extra 'ray'."


def _option(panel: str | None, help: str, *names: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"typer": Option(*names, help=help, rich_help_panel=panel, **more)})


def _argument(metavar: str, help: str, default: Any = MISSING) -> Any:
    shown = Argument(metavar=metavar, help=help, show_default=False)
    return field(default=default, metadata={"typer": shown})


_other, _model, _draft, _sample, _chat, _server, _out = (
    partial(_option, panel) for panel in (None, "Model", "Drafting", "Sampling", "Chat", "Server", "Output")
)
_json = partial(_out, "One JSON document.", "--json", default=False)
_quiet = partial(_out, "Nothing on stderr but errors.", "--quiet", "-q", default=False)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model's weights are loaded."""

    adapter: Path | None = _model("PEFT adapter for the model.", metavar="FOLDER")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] | None = _model(
        "Default: float32 on CPU, the checkpoint's own elsewhere."
    )
    device: str | None = _model("Default: cuda if there is one.", metavar="cpu|cuda|cuda:N")

    def check(self) -> None:
        """Refuse what is wrong whatever the model, before seconds are spent on loading one."""
        for name, (law, holds) in LAWS.items():
            value = getattr(self, name, None)
            if value is not None and not holds(value):
                raise Failure(f"{flag(name)} must {law}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Opening(Loading):
    """How a model is opened up."""

    exit_heads: str | None = _model(
        "Exit heads for the model, or none. Default: those in its folder.", metavar="FOLDER|none"
    )
    backend: Literal["auto", "views", "compiled"] = _model(
        "What runs the layers: the model's own modules (views), or functions compiled on this machine (compiled). "
        "Default: compiled where it serves the model.",
        default="auto",
    )
    quantize: Literal["int8", "int4"] | None = _model(
        "Round the layers' weights (needs torchao): a smaller model with a text of its own, which drafting does not "
        "change."
    )
    threads: int | None = _model("Default: one per physical core, or OMP_NUM_THREADS.", metavar="N")

    @property
    def parts(self) -> dict[str, Any]:
        """What opening a model is told beside its name."""
        names = ("adapter", "exit_heads", "dtype", "device", "quantize")
        return {name: getattr(self, name) for name in names} | {"engine": self.backend}


@dataclass(frozen=True, kw_only=True)
class Drafting(Opening):
    """How drafts are made."""

    policy: PolicyName | None = _draft(
        "How to draft; no choice changes the text. Default: adaptive, which finds exit layer and lengths by what they "
        "gain, or fixed where one is given. plain drafts nothing; the others are published methods."
    )
    exit_layer: int | None = _draft("Layers that draft. Default: found, or stored with the model.", metavar="E")
    num_speculative_tokens: int | None = _draft(
        "Tokens drafted per round. Default: found, or stored with the model.", metavar="D"
    )
    drafters: str | None = _draft(
        "Where the drafts of adaptive may come from: early layers (exit), what followed earlier in the text (lookup); "
        "copies lets 4-bit copies of early layers draft in their place, tree lets drafts have branches. Default: all.",
        metavar="exit,copies,lookup,tree",
    )
    corpus: Path | None = _draft(
        "Look drafts up in a corpus, too: a file that 'selfspec corpus build' wrote.", metavar="FILE"
    )
    reuse_responses: bool = _draft(
        "Look drafts up in responses that this run finished before, too. The text stays the same; the speed of a "
        "request may tell that a similar one came before it.",
        "--reuse-responses/--no-reuse-responses",
        default=True,
    )
    learn: Path | None = _draft(
        "Improve the exit heads by what is refused, and keep them in FOLDER: from there the next run goes on. At most "
        "a twentieth of the time; the text stays the same.",
        metavar="FOLDER",
    )
    exact: bool = _draft(
        "Text and logits are the same to the last bit however they were drafted and batched, in bfloat16 too. It needs "
        "compiled layers on CPU, or fused layers on CUDA, and may cost some speed.",
        "--exact",
        default=False,
    )

    @property
    def sources(self) -> list[str] | None:
        """The parts of --drafters; None: not given."""
        return None if self.drafters is None else [part.strip() for part in self.drafters.split(",")]

    def check(self) -> None:
        super().check()
        if self.learn is not None and (self.policy == "plain" or self.num_speculative_tokens == 0):
            raise Failure("--learn learns from refused drafts, and plain decoding has none; leave one of them out")
        if self.learn is not None and self.learn.exists() and not self.learn.is_dir():
            raise Failure(f"--learn needs a folder, got the file {self.learn}")
        _check_drafters(self)


@dataclass(frozen=True, kw_only=True)
class Decoding(Drafting):
    """How texts are continued: which model, how it drafts, and how tokens are chosen."""

    model: str = _model("Which model.", "--model", "-m", metavar="demo|smollm2|FOLDER|FILE.gguf|HUB_ID", default="demo")

    max_tokens: int | None = _sample(
        "Most tokens to write. Default: the model's own, else 128; chat: 1024.", metavar="N"
    )
    temperature: float | None = _sample(
        "0 is greedy. Default: 0, or the model's own if its generation config samples.", metavar="T"
    )
    top_k: int | None = _sample("Keep the K likeliest; 0: all.", metavar="K")
    top_p: float | None = _sample("Keep this much probability.", metavar="P")
    min_p: float | None = _sample("Keep tokens this likely beside the likeliest.", metavar="P")
    repetition_penalty: float | None = _sample("Make tokens of prompt and output less likely; 1: none.", metavar="X")
    presence_penalty: float | None = _sample("Subtracted from the logits of tokens in the output.", metavar="X")
    frequency_penalty: float | None = _sample("The same, for every time that a token is there.", metavar="X")
    no_repeat_ngram_size: int | None = _sample("Write no N tokens in a row twice; 0 allows it.", metavar="N")
    seed: int = _sample("Same seed, same text.", metavar="S", default=0)
    stop: list[str] | None = _sample("End before this text; may be repeated.", metavar="TEXT")
    stop_token_ids: list[str] | None = _sample("End after one of these tokens, too.", metavar="ID,ID,...")
    ignore_generation_config: bool = _sample(
        "Take no length, stop text, penalty or sampling from the model's generation_config.json.",
        "--ignore-generation-config",
        default=False,
    )

    system: str | None = _chat("System message.", metavar="TEXT")

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen, as the library names it; without what was not given."""
        names = ["temperature", "top_k", "top_p", "min_p", "stop", "repetition_penalty", "presence_penalty"]
        names += ["frequency_penalty", "no_repeat_ngram_size"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = whole_numbers("stop_token_ids", self.stop_token_ids, 0, (1 << 31) - 1)
        if self.ignore_generation_config:
            given["generation_config"] = False
        return {name: value for name, value in given.items() if value is not None}

    def check(self) -> None:
        super().check()
        if any(not text for text in self.stop or ()):
            raise Failure("--stop must be a non-empty text, got ''")
        _ = self.sampling


@dataclass(frozen=True, kw_only=True)
class Generate(Decoding):
    """`selfspec generate`."""

    prompt: str | None = _argument("[PROMPT|-]", "Text to continue; '-' or a pipe reads stdin.", default=None)
    prompts: str | None = _other(
        'Continue many prompts as one batch: one {"prompt": ...} per line, optional id, max_tokens, seed. Writes JSON '
        "lines in that order.",
        metavar="FILE.jsonl",
    )
    n: int = _other("Completions per prompt, with seeds S, S+1, ...; JSON lines.", "--n", metavar="N", default=1)
    chat: bool | None = _chat("Use the chat template. Default: if there is one.", "--chat/--no-chat")
    stream: bool = _out("Write text as it becomes certain.", default=True)
    show_drafts: bool = _out("Colour accepted drafts; strike rejected ones out.", "--show-drafts", default=False)
    compare: bool = _out(
        "Time plain decoding and transformers' generate too, and compare the tokens.", "--compare", default=False
    )
    show_plan: bool = _out("Every round's plan and what became of it, on stderr.", "--show-plan", default=False)
    stats: bool = _out("Acceptance and time, as a table.", "--stats", default=False)
    as_json: bool = _out("One JSON document instead of text.", "--json", default=False)
    logprobs: int | None = _out("In JSON: log-probability of every token, and of the K likeliest.", metavar="K")
    svg: Path | None = _out("Also save the coloured run as a picture.", metavar="FILE")
    quiet: bool = _quiet()

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
class Chat(Decoding):
    """`selfspec chat`."""

    model: str = _model("Which model.", "--model", "-m", metavar="smollm2|FOLDER|FILE.gguf|HUB_ID", default="smollm2")

    stats: bool = _out("After a reply: tokens, speed, acceptance, tokens from the cache.", "--stats", default=False)
    quiet: bool = _quiet()


@dataclass(frozen=True, kw_only=True)
class Serve(Drafting):
    """`selfspec serve`."""

    model: str = _argument("MODEL", MODEL_HELP)

    host: str = _server("Address to listen at.", metavar="ADDRESS", default="127.0.0.1")
    port: int = _server("Port to listen at.", metavar="N", default=8000)
    api_key: str | None = _server(
        "What clients of /v1 must send as a bearer token.", metavar="TEXT", envvar="SELFSPEC_API_KEY"
    )
    served_model_name: str | None = _server("How clients call the model. Default: MODEL.", metavar="NAME")
    max_num_seqs: int = _server("Outputs decoded together; more wait.", metavar="N", default=16)
    max_num_cached_tokens: int | None = _server(CACHED_HELP, metavar="N")
    max_waiting_requests: int = _server("Outputs that may wait; more are told 429.", metavar="N", default=256)
    max_waiting_tokens: int = _server("Prompt tokens that may wait.", metavar="N", default=1 << 18)
    request_timeout: float = _server(
        "Seconds after which a request is ended; as many for those that run when the server is told to stop.",
        metavar="S",
        default=600.0,
    )
    max_body_bytes: int = _server("Largest request body.", metavar="N", default=8 << 20)
    log_prompts: bool = _server("Write prompts to the log, on stderr.", "--log-prompts", default=False)
    replicas: int | None = _server(REPLICAS_HELP, metavar="N")
    quiet: bool = _quiet()

    def check(self) -> None:
        super().check()
        if self.api_key == "":
            raise Failure("--api-key must not be empty; leave it out to serve anybody")
        if self.replicas is not None:
            check_replicas(self)
            if self.log_prompts:
                raise Failure("--log-prompts is for a single process; leave it or --replicas out")


@dataclass(frozen=True, kw_only=True)
class Batch(Drafting):
    """`selfspec batch`."""

    model: str = _argument("MODEL", MODEL_HELP)

    input: Path = _server("Requests, a line each: .jsonl or .parquet.", metavar="FILE", default=MISSING)
    output: Path = _server("Answers, a line each: .jsonl or .parquet.", metavar="FILE", default=MISSING)
    served_model_name: str | None = _server("How requests call the model. Default: MODEL.", metavar="NAME")
    max_num_seqs: int = _server("Outputs decoded together.", metavar="N", default=16)
    max_num_cached_tokens: int | None = _server(CACHED_HELP, metavar="N")
    replicas: int | None = _server(REPLICAS_HELP, metavar="N")
    quiet: bool = _quiet()

    def check(self) -> None:
        super().check()
        if self.replicas is not None:
            check_replicas(self)


@dataclass(frozen=True, kw_only=True)
class Inspect(Loading):
    """`selfspec inspect`."""

    model: str = _argument("MODEL", MODEL_HELP)
    as_json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class Calibrate(Opening):
    """`selfspec calibrate`."""

    model: str = _argument("MODEL", MODEL_HELP)
    batch_sizes: list[str] | None = _other(
        "Rows decoded together; may be repeated. Default: 1,2,4,8.", metavar="B,B,..."
    )
    plan: bool = _other("Also show how far to draft, by batch size.", "--plan", default=False)
    as_json: bool = _json()
    quiet: bool = _quiet()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes in order; a single row is always among them."""
        given = self.batch_sizes or ["1,2,4,8"]
        return sorted({1, *whole_numbers("batch_sizes", given, 1, 1024, ", such as 1,2,4,8")})

    def check(self) -> None:
        _ = self.sizes
        super().check()


@dataclass(frozen=True, kw_only=True)
class CorpusBuild:
    """`selfspec corpus build`."""

    model: str = _argument("MODEL", f"Whose tokenizer: {MODEL_HELP}")
    files: list[Path] = _argument("CORPUS...", "Files, UTF-8.")
    output: Path = _other("The index.", "--output", "-o", metavar="FILE", default=MISSING)
    field: str = _other("Where a line of a JSON-lines file (.jsonl, .ndjson) has its text.", default="text")
    as_json: bool = _json()
    quiet: bool = _quiet()


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """`selfspec corpus info`."""

    file: Path = _argument("FILE", "The index.")
    verify: bool = _other("Read all of it and compare it with its checksum.", "--verify", default=False)
    as_json: bool = _json()


def whole_numbers(name: str, given: Sequence[str], least: int, most: int, example: str = "") -> list[int]:
    """The numbers in texts such as "1,2,4" and "8"."""
    parts = [part.strip() for text in given for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) < 11 and least <= int(part) <= most):
            raise Failure(f"{flag(name)} must be whole numbers in {least}..{most}{example}, got {part!r}")
    return [int(part) for part in parts]


def command_of(options: type[Any], run: Callable[[Any], object]) -> Callable[..., Any]:
    """A function whose parameters are the fields of a dataclass, as typer reads them; old names fill their fields."""

    defaults = {one.name: one.default for one in fields(options)}

    def command(**given: Any) -> object:
        for name, old in OLD_NAMES.items():
            value = given.pop(old, None)
            if value is not None and given[name] == defaults[name]:
                given[name] = value
        return run(options(**given))

    hints, annotated, parameters = get_type_hints(options), cast(Any, Annotated), []
    for one in fields(options):
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        named = [(one.name, one.metadata["typer"], default)]
        if one.name in OLD_NAMES:
            named.append((OLD_NAMES[one.name], Option(hidden=True), None))
        for name, info, given in named:
            kind = annotated[hints[one.name] if given is not None else hints[one.name] | None, info]
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=kind))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def check_replicas(given: Drafting) -> None:
    """Refuse what several processes cannot share."""
    if given.learn is not None:
        raise Failure("--learn is for a single process; leave it or --replicas out")
    if given.device not in (None, "cpu", "cuda"):
        raise Failure(f"--device must be cpu or cuda with --replicas, which take a device each, got {given.device}")


def _check_drafters(given: Drafting) -> None:
    sources = given.sources
    if sources is not None and not set(sources) <= set(DRAFTERS):
        raise Failure(f"--drafters must hold some of {','.join(DRAFTERS)}, got {given.drafters!r}")
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
