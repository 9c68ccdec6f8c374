"""`selfspec generate`: text to stdout, messages to stderr. Wrong input is refused before anything is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from selfspec import core
from selfspec.cli import show
from selfspec.cli.drafts import Piece, PieceCutter, legend, paint, picture
from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import IgnoreGenerationConfig, Learn, ModelOption, ModelOptions, Quiet, System, as_sentences
from selfspec.cli.prompts import Prompt, has_template, read_prompts, tokenize
from selfspec.cli.session import Run, chosen, opened
from selfspec.cli.status import StatusConsole, make_console
from selfspec.core import RoundOutput
from selfspec.params import SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from selfspec.cli.compare import Comparison
    from selfspec.llm import LLM

PROMPT_SHOWN = 1000  # characters of a long prompt that are repeated before the coloured text, from its end
MAX_NUM_SEQS = 64  # of a file of prompts decoded together


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is written beside the text, or in place of it.

    Args:
        prompts: continue many prompts as one batch: one {"prompt": ...} per line, optional id, max_tokens, seed; -
            reads stdin. Writes JSON lines in that order.
        stream: write text as it becomes certain.
        show_drafts: colour accepted drafts; strike rejected ones out.
        compare: time plain decoding and transformers' generate too, and compare the tokens.
        show_plan: every round's plan and what became of it, on stderr.
        stats: acceptance and time, as a table.
        json: one JSON document instead of text.
        svg: also save the coloured run as a picture.
    """

    prompts: str | None = None
    stream: bool = True
    show_drafts: bool = False
    compare: bool = False
    show_plan: bool = False
    stats: bool = False
    json: bool = False
    svg: Path | None = None

    def check(self, prompt: str | None, sampling: SamplingParams, policy: object, quiet: bool) -> None:
        """Refuse what goes without each other, whatever the model."""
        for name, is_given in (("--prompts", self.prompts is not None), ("--n", sampling.n > 1)):
            others = (("--show-drafts", self.show_drafts), ("--svg", self.svg))
            for other, value in (*others, ("PROMPT", prompt if name == "--prompts" else None)):
                if is_given and value:
                    raise Failure(f"{name} goes without {other}; leave one of them out")
        if self.compare and policy == "plain":
            raise Failure("--compare measures a policy that drafts against plain decoding, got --policy plain")
        if self.show_plan and quiet:
            raise Failure("--show-plan writes to stderr, which --quiet keeps empty; leave one of them out")
        if sampling.logprobs is not None and not (self.json or self.prompts is not None or sampling.n > 1):
            raise Failure("--logprobs are written in JSON; add --json")
        if self.svg is not None and (self.svg.is_dir() or not self.svg.resolve().parent.is_dir()):
            raise Failure(f"--svg needs a file in an existing folder, got {self.svg}")


def generate(
    *,
    prompt: Annotated[
        str | None,
        Argument(metavar="[PROMPT|-]", help="Text to continue; '-' or a pipe reads stdin.", show_default=False),
    ] = None,
    model: ModelOption = None,
    options: ModelOptions,
    speculative: SpeculativeConfig,
    learn: Learn = None,
    sampling: SamplingParams,
    ignore_generation_config: IgnoreGenerationConfig = False,
    system: System = None,
    chat: Annotated[bool | None, Option(help="Use the chat template. Default: if there is one.")] = None,
    output: OutputOptions,
    quiet: Quiet = False,
) -> None:
    """Continue one prompt, or a file of them."""
    output.check(prompt, sampling, speculative.policy, quiet)
    if chat is False and system is not None:
        raise Failure("--system needs the chat template that --no-chat turns off; leave one of them out")
    prompts = read_prompts(prompt, output.prompts)
    if ignore_generation_config:
        sampling = replace(sampling, generation_config=False)
    with (
        StatusConsole(quiet) as status,
        opened(
            model := chosen(model, status), options, speculative, status, learn=learn, max_num_seqs=MAX_NUM_SEQS
        ) as llm,
    ):
        is_chat = has_template(llm, model) and chat is not False
        for flag, wanted in (("--chat", chat), ("--system", system is not None)):
            if wanted and not is_chat:
                raise Failure(f"{flag} needs a chat template, and the tokenizer of {model} has none; leave it out")
        ids = tokenize(prompts, llm, system, is_chat)
        with as_sentences():
            params = [
                replace(
                    sampling,
                    max_tokens=sampling.max_tokens if one.max_tokens is None else one.max_tokens,
                    seed=sampling.seed if one.seed is None else one.seed,
                )
                for one in prompts
            ]
        display: _Lines | _Text = _Lines(prompts, sampling.n)
        if output.prompts is None and sampling.n == 1:
            display = _Text(llm, output, status, prompts[0].text + "\n\n" * is_chat)
        _run(llm, ids, params, output, status, display)


def _run(
    llm: LLM,
    ids: list[list[int]],
    params: list[SamplingParams],
    output: OutputOptions,
    status: StatusConsole,
    display: _Lines | _Text,
) -> None:
    before, run = llm.with_speculative(replace(llm.speculative, learn=False)), Run()

    def on_round(round_: RoundOutput) -> None:
        run.add(round_)
        if round_.plan is not None:
            reading.close()
            if output.show_plan:
                status.say(show.plan_line(run.num_rounds.total(), round_))
        display.add(round_)

    with status.waiting("preparing to decode"), as_sentences():
        outputs = llm.stream(ids, params, on_round=on_round)
    display.begin()
    try:
        with ExitStack() as reading:
            reading.enter_context(status.waiting("reading what to continue"))
            for _ in outputs:
                pass  # on_round shows them
    finally:
        display.end()
    comparison = None
    if output.compare:
        from selfspec.cli.compare import compare

        with status.waiting("timing it again, plain decoding and transformers' generate beside it"):
            comparison = compare(before, ids, params, run)
    display.close(run, comparison)
    if (output.show_drafts or output.compare or output.stats) and not output.json:
        status.say("")
        if output.stats:
            status.say(show.stats_table(run.stats, run.seconds_by_stage, run.plans), "")
        status.say(show.closing_line(run, comparison), "")
        if comparison is not None:
            status.say(show.what_drafted(run, comparison))
            status.say(comparison.about)


class _Text:
    """Writes a text as it becomes certain, or in the end; in colours, as a JSON document or as a picture where asked.

    Text that plans would interrupt is written in the end.
    """

    def __init__(self, llm: LLM, output: OutputOptions, status: StatusConsole, prompt: str) -> None:
        self._llm, self._output, self._status = llm, output, status
        self._out = make_console(sys.stdout)
        self._is_coloured = output.show_drafts and not output.json and self._out.color_system is not None
        self._cutter: PieceCutter | None = None
        self._pieces = [Piece(prompt if len(prompt) <= PROMPT_SHOWN else "…" + prompt[-PROMPT_SHOWN:], "prompt")]
        self._num_written = 0 if sys.stdout.isatty() and self._is_coloured and not status.console.quiet else 1
        drafts_nothing = llm.target.policy_name(llm.speculative) == "plain"
        self._legend = None if drafts_nothing else legend(llm.target.split.num_layers)

    def begin(self) -> None:
        """The arguments are right: what comes before the text."""
        if self._is_coloured and self._legend is not None:
            self._status.console.print(self._legend, end="\n\n")
        if not self._output.show_plan:
            self._write()

    def add(self, round_: RoundOutput) -> None:
        """Take the text of a round."""
        for row in round_.rows:
            if self._is_coloured or self._output.svg is not None:
                self._cutter = self._cutter or PieceCutter(self._llm.tokenizer, row.sequence.request)
                self._pieces += self._cutter.pieces(row)
            elif not self._output.json:
                self._pieces.append(Piece(str(row.text), "own"))
        if self._output.stream and not self._output.show_plan:
            self._write()

    def _write(self) -> None:
        new, self._num_written = self._pieces[self._num_written :], len(self._pieces)
        if self._is_coloured:
            paint(self._out, new)
        elif not self._output.json:
            sys.stdout.write("".join(text for text, kind in new if kind != "rejected"))
            sys.stdout.flush()

    def end(self) -> None:
        """The text is complete, or was interrupted: what is held back is written, and the line ends."""
        self._write()
        if not self._output.json:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def close(self, run: Run, comparison: Comparison | None) -> None:
        """Write the document and the picture."""
        output, target = self._output, self._llm.target
        if output.json:
            document = _document(run.finished[0])
            document |= {"policy": target.policy_name(self._llm.speculative), "backend": target.backend}
            document |= {"plans": run.plans, "seconds": run.seconds, "seconds_by_stage": run.seconds_by_stage}
            _write_json(document if comparison is None else document | {"compare": comparison.as_dict()})
        if output.svg is not None:
            title = "selfspec generate --show-drafts" + " --compare" * output.compare
            drawn = picture(self._pieces, self._legend, show.closing_line(run, comparison), title)
            try:
                output.svg.write_text(drawn, encoding="utf-8")
            except OSError as problem:
                reason = f"--svg {output.svg} cannot be written ({problem.strerror}); choose another"
                raise Failure(reason, RUN) from problem


class _Lines:
    """Writes a JSON line per output, in the prompts' order, each as soon as it and all before it are done."""

    def __init__(self, prompts: Sequence[Prompt], n: int) -> None:
        self._prompts, self._n, self._num_written = prompts, n, 0
        self._finished = dict[tuple[int, int], core.Sequence]()

    def begin(self) -> None:
        """Nothing comes before the lines."""

    def add(self, round_: RoundOutput) -> None:
        """Take the outputs that ended in a round."""
        for row in round_.rows:
            if row.finish_reason is not None:
                self._finished[int(row.sequence.request_id), row.sequence.index] = row.sequence
        while (at := divmod(self._num_written, self._n)) in self._finished:
            self._num_written += 1
            head = {"id": self._prompts[at[0]].id} | ({} if self._n == 1 else {"index": at[1]})
            _write_json(head | _document(self._finished.pop(at)))

    def end(self) -> None:
        """Nothing comes after the lines."""

    def close(self, run: Run, comparison: Comparison | None) -> None:
        """Every line is written."""


def _document(sequence: core.Sequence) -> dict[str, Any]:
    tokens, params = sequence.completion_token_ids, sequence.request.params
    document = {
        "text": sequence.stopper.text,
        "tokens": tokens,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stopper.stop_reason(tokens) if sequence.finish_reason == "stop" else None,
        "seed": params.seed,
        "stats": sequence.stats.as_dict(),
    }
    return (
        document if params.logprobs is None else document | {"logprobs": [one._asdict() for one in sequence.logprobs]}
    )


def _write_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
