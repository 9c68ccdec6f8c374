"""What a run is made of: a frozen dataclass per command, filled from a YAML file and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eval.keys import check_key, knob, read_keys
from eval.sources import split_policy
from selfspec.control.registry import POLICIES

FOLDER = Path(__file__).parents[1] / "configs" / "eval"
DEFAULT, QUICK, REPLAY = FOLDER / "bench.yaml", FOLDER / "quick.yaml", FOLDER / "replay.yaml"
LIVE = FOLDER / "live.yaml"
MEASURED = "measured"
STARTS = ("fresh", "warm")
STORED = "stored"
PRIORS = (STORED, "none")
RENUMBERED = ("no", "new", "random")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One benchmark run. Every key's meaning is also the help of its command-line option."""

    model: str = knob("demo", "What selfspec.load opens: 'demo' (the embedded model), a folder or a hub id.")
    device: str = knob("", "Where the model runs; empty lets selfspec.load choose.")
    dtype: str = knob("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = knob(0, "CPU threads of torch; 0 keeps torch's own default.")
    questions: str = knob(
        "prompts.jsonl", "Question file, JSON lines with 'turns'; relative to the configuration file."
    )
    num_questions: int = knob(0, "How many questions to use, from the first on; 0 uses all.")
    max_new_tokens: int = knob(64, "Tokens every method writes per prompt; ends of text are ignored.")
    repeats: int = knob(5, "How often every finalist decodes every prompt.")
    warmup_tokens: int = knob(16, "Tokens that every method writes untimed before each stage.")
    exit_layers: tuple[int, ...] = knob((), "Exit layers E to try; none given: every eighth of the layers up to half.")
    draft_lengths: tuple[int, ...] = knob((2, 3, 4, 6, 8), "Draft lengths D to try with every exit layer.")
    early_exit_draft_lengths: tuple[int, ...] = knob(
        (0, 4), "num_assistant_tokens to try for transformers' early exit at every exit layer; 0 is its default."
    )
    lookup_lengths: tuple[int, ...] = knob((4, 10), "prompt_lookup_num_tokens to try for transformers' prompt lookup.")
    coarse_questions: int = knob(4, "Prompts of the coarse pass, which tries the whole grid once.")
    finalists: int = knob(2, "Fixed settings that go on from the coarse pass to the full comparison.")
    batch_size: int = knob(8, "Prompts decoded together in the batch comparison.")
    batch_repeats: int = knob(3, "Repeats of the batch comparison.")
    load_repeats: int = knob(3, "Fresh processes in which loading to the first token is timed; 0 leaves it out.")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "warmup_tokens", "repeats", "coarse_questions", "finalists", "batch_repeats"):
            check_key(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("threads", "num_questions", "load_repeats"):
            check_key(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check_key(self.batch_size >= 2, "batch_size", "at least 2", self.batch_size)
        for name, least in (
            ("exit_layers", 1),
            ("draft_lengths", 1),
            ("early_exit_draft_lengths", 0),
            ("lookup_lengths", 1),
        ):
            given = getattr(self, name)
            check_key(all(n >= least for n in given), name, f"numbers of at least {least}", list(given))
        for name in ("draft_lengths", "early_exit_draft_lengths", "lookup_lengths"):
            check_key(bool(getattr(self, name)), name, "at least one number", [])

    def exits_of(self, num_layers: int) -> tuple[int, ...]:
        """The exit layers to try on a model of `num_layers`."""
        return _exits_of(self.exit_layers, num_layers)


def _exits_of(given: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if not given:
        return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in range(1, 5)}))
    fits = all(layer < num_layers for layer in given)
    check_key(fits, "exit_layers", f"in 1..{num_layers - 1} for this model", list(given))
    return given


class Task(NamedTuple):
    """A kind of text, the model that writes it, and the questions it continues."""

    name: str
    model: str
    questions: str


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """One comparison of policies by replay. Every key's meaning is also the help of its command-line option."""

    tasks: tuple[Task, ...] = knob((), "Kinds of text: name, model, and questions relative to the configuration file.")
    device: str = knob("", "Where the models run; empty lets selfspec.load choose.")
    dtype: str = knob("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = knob(0, "CPU threads of torch; 0 keeps torch's own default.")
    num_questions: int = knob(0, "How many questions of every task to use, from the first on; 0 uses all.")
    lengths: tuple[int, ...] = knob((128, 512), "Tokens per prompt, as far as a model's context holds them.")
    temperature: float = knob(0.0, "How the outputs are picked: 0 is greedy, else they are sampled.")
    seed: int = knob(0, "Seed of the first prompt's sampled output; the next has the next seed.")
    head_layers: tuple[str | float, ...] = knob(
        (MEASURED, 0.0, 0.5, 1.0, 2.0, 4.0), "What the output head costs, in layers, or 'measured' as it is here."
    )
    starts: tuple[str, ...] = knob(
        ("fresh",),
        "'fresh': every prompt for itself; 'warm': policies that can go on from one to the next.",
    )
    prior: str = knob(
        STORED, "What the first prompt, or every fresh one, begins with: 'stored' statistics of its model, or 'none'."
    )
    policies: tuple[str, ...] = knob(
        (), "Policies to compare, such as adaptive:exit+tree for some sources of drafts; none given: all there are."
    )
    renumbered: str = knob(
        "no",
        "'new': make every token of the traces a new one, so that there is nothing to look up; 'random': a random one, "
        "so that lookup misleads. What layers picked stays. Where no policies are given: adaptive's sources.",
    )
    exit_layer: int = knob(
        0, "Exit layer of the policies that do not choose it; 0: stored with the model, else a quarter."
    )
    num_draft_tokens: int = knob(
        0, "Draft length, likewise, or that of the first round; 0: stored with the model, else 4."
    )
    repeats: int = knob(15, "How often every piece of a round is timed.")

    def __post_init__(self) -> None:
        for name, least in (("lengths", 1), ("head_layers", 0)):
            given = getattr(self, name)
            numbers = [n for n in given if n != MEASURED]
            fits = all(not isinstance(n, str) and isfinite(n) and n >= least for n in numbers)
            word = f" or {MEASURED!r}" if name == "head_layers" else ""
            check_key(bool(given) and fits, name, f"numbers of at least {least}{word}", list(given))
        for name, least in (("threads", 0), ("num_questions", 0), ("exit_layer", 0), ("num_draft_tokens", 0)):
            check_key(getattr(self, name) >= least, name, f"at least {least}", getattr(self, name))
        check_key(self.repeats >= 1, "repeats", "at least 1", self.repeats)
        check_key(self.temperature >= 0 and isfinite(self.temperature), "temperature", "at least 0", self.temperature)
        check_key(bool(self.starts) and set(self.starts) <= set(STARTS), "starts", f"among {STARTS}", list(self.starts))
        check_key(self.prior in PRIORS, "prior", f"among {PRIORS}", self.prior)
        check_key(self.renumbered in RENUMBERED, "renumbered", f"among {RENUMBERED}", self.renumbered)
        for name in self.policies:
            split_policy(name)
        _check_tasks(self.tasks)


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """One comparison of live policies. Every key's meaning is also the help of its command-line option."""

    tasks: tuple[Task, ...] = knob((), "Kinds of text: name, model, and questions relative to the configuration file.")
    device: str = knob("", "Where the models run; empty lets selfspec.load choose.")
    dtype: str = knob("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = knob(0, "CPU threads of torch; 0 keeps torch's own default.")
    num_questions: int = knob(0, "How many questions of every task to use, from the first on; 0 uses all.")
    tokens: int = knob(128, "Tokens per prompt, as far as a model's context holds them; ends of text are ignored.")
    batch_sizes: tuple[int, ...] = knob((1, 2, 4, 8, 16, 32), "Rows decoded together, each a comparison of its own.")
    exit_layers: tuple[int, ...] = knob((), "Exit layers E of fixed settings; none given: every eighth up to half.")
    draft_lengths: tuple[int, ...] = knob((1, 2, 3, 4, 6, 8), "Draft lengths D to try with every exit layer.")
    finalists: int = knob(2, "Fixed settings, the best in replay, that are timed; the fastest is the best fixed one.")
    policies: tuple[str, ...] = knob((), "Further policies to time, beside plain, adaptive and fixed.")
    repeats: int = knob(7, "How often every method decodes all prompts.")
    warmup_tokens: int = knob(16, "Tokens per prompt that every method writes untimed at every batch size.")
    cost_repeats: int = knob(15, "How often every piece of a round is timed, for the costs.")
    synthetic: bool = knob(True, "Also time adaptive on synthetic targets whose acceptance falls from 1 to nearly 0.")
    synthetic_batch_sizes: tuple[int, ...] = knob((1, 8), "Rows decoded together there.")
    synthetic_hidden_size: int = knob(256, "Their hidden size: how much a token is beside what the interpreter takes.")

    def __post_init__(self) -> None:
        for name in ("tokens", "finalists", "repeats", "warmup_tokens", "cost_repeats"):
            check_key(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("threads", "num_questions"):
            check_key(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        size = self.synthetic_hidden_size
        check_key(size >= 16 and size % 16 == 0, "synthetic_hidden_size", "a multiple of 16", size)
        for name in ("batch_sizes", "draft_lengths", "synthetic_batch_sizes", "exit_layers"):
            given = getattr(self, name)
            fits = all(n >= 1 for n in given) and len(set(given)) == len(given)
            check_key(
                fits and bool(given or name == "exit_layers"), name, "different numbers of at least 1", list(given)
            )
        check_key(set(self.policies) <= set(POLICIES), "policies", f"among {', '.join(POLICIES)}", list(self.policies))
        _check_tasks(self.tasks)
        check_key(bool(self.tasks) or self.synthetic, "tasks", "at least one where synthetic is off", [])

    def exits_of(self, num_layers: int) -> tuple[int, ...]:
        """The exit layers to try on a model of `num_layers`."""
        return _exits_of(self.exit_layers, num_layers)


def _check_tasks(tasks: tuple[Task, ...]) -> None:
    names = [task.name for task in tasks]
    check_key(len(set(names)) == len(names), "tasks", "of different names", names)


Config = TypeVar("Config", BenchConfig, ReplayConfig, LiveConfig)


def load_config(path: str | Path, **given: Any) -> BenchConfig:
    """Read a YAML file; values that are given and not None replace the file's.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown, of the wrong type or out of range.
    """
    values = read_keys(path, BenchConfig)
    values["questions"] = str(Path(path).parent / values.get("questions", BenchConfig().questions))
    return _made(BenchConfig, values, given)


def load_replay_config(path: str | Path, tasks: tuple[Task, ...] = (), **given: Any) -> ReplayConfig:
    """Read a YAML file as `load_config` does; given tasks join the file's, or replace those of the same name."""
    return _made(ReplayConfig, _with_tasks(read_keys(path, ReplayConfig), path, tasks), given)


def load_live_config(path: str | Path, tasks: tuple[Task, ...] = (), **given: Any) -> LiveConfig:
    """The same for a comparison of live policies."""
    return _made(LiveConfig, _with_tasks(read_keys(path, LiveConfig), path, tasks), given)


def _with_tasks(values: dict[str, Any], path: str | Path, tasks: tuple[Task, ...]) -> dict[str, Any]:
    own = [task._replace(questions=str(Path(path).parent / task.questions)) for task in values.get("tasks", ())]
    return {**values, "tasks": (*(task for task in own if task.name not in {t.name for t in tasks}), *tasks)}


def _made(kind: type[Config], values: dict[str, Any], given: dict[str, Any]) -> Config:
    return kind(**{**values, **{key: value for key, value in given.items() if value is not None}})
