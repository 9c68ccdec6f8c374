"""`Screen`: what a run shows: its text on stdout, coloured or plain, and the talk around it on stderr."""

from __future__ import annotations

import sys

from rich.text import Text

from selfspec.cli import show
from selfspec.cli.compare import Comparison
from selfspec.cli.failure import RUN, Failure
from selfspec.cli.job import Job, Run
from selfspec.cli.options import Generate
from selfspec.cli.pieces import Painter, Piece, Pieces
from selfspec.cli.talk import make_console, same_place, wants_colour
from selfspec.control.plan import DRAFTS, LOOKUP
from selfspec.control.published.layerskip import Fixed
from selfspec.control.registry import BY_LOOKUP, CHOOSES_EXIT
from selfspec.decoding.policy_choice import policy_for
from selfspec.decoding.results import Round, RowResult

PROMPT_SHOWN = 1000  # characters of a long prompt that are repeated beside the coloured text, from its end


class Screen:
    """Shows a single prompt's run as it goes; of a file of prompts, only the talk.

    Where plans would go between the words of the text, the text waits for the end.
    """

    def __init__(self, job: Job, options: Generate) -> None:
        self._options = options
        self._talk = job.talk.console
        self._writes = not options.as_json and not options.writes_lines
        self._streams = options.stream and not (options.show_plan and same_place(sys.stdout, sys.stderr))
        self._legend = _legend(job)
        self._num_rounds = 0
        self._text = ""
        self._painter: Painter | None = None
        self._cutter: Pieces | None = None
        self._pieces: list[Piece] = []
        self._num_painted = 0
        if not options.writes_lines:
            self._prepare(job)

    def _prepare(self, job: Job) -> None:
        paints = self._writes and self._options.show_drafts and wants_colour(sys.stdout)
        if paints or self._options.svg:
            self._cutter = Pieces(job.target.tokenizer, job.ids[0], self._options.stop or ())
            self._pieces = [Piece(_shown(job), "prompt")]
        if not paints:
            return
        out = make_console(sys.stdout)
        self._painter = Painter(out, out.width if sys.stdout.isatty() else None, self._talk)
        if self._legend is not None:
            self._talk.print(self._legend, end="\n\n")
        if not (sys.stdout.isatty() and sys.stderr.isatty()) or self._options.quiet:
            self._num_painted = 1  # the prompt is left out
        elif not self._options.show_plan:
            self._paint()

    def _paint(self) -> None:
        assert self._painter is not None
        self._painter.write(self._pieces[self._num_painted :])
        self._num_painted = len(self._pieces)

    def show(self, round_: Round) -> None:
        """One round; its text is shown at once, or kept for the end."""
        if self._options.show_plan and round_.plan is not None:
            self._num_rounds += 1
            self._talk.print(show.plan_line(self._num_rounds, round_), soft_wrap=True)
        if not self._options.writes_lines:
            for row in round_.rows:
                self._show_text(row)

    def _show_text(self, row: RowResult) -> None:
        if self._cutter is not None:
            self._pieces += self._cutter.of(row)
        if self._streams and self._painter is not None:
            self._paint()
        elif self._streams and self._writes:
            sys.stdout.write(row.text)
            sys.stdout.flush()
        else:
            self._text += row.text

    def end(self) -> None:
        """The text is complete, or was interrupted: what is still held back goes out, and the line ends."""
        if self._painter is not None:
            self._paint()
            self._painter.end()
        elif self._writes:
            sys.stdout.write(self._text + "\n")
            sys.stdout.flush()

    def close(self, run: Run, comparison: Comparison | None) -> None:
        """The table, the closing line and the picture, whichever was asked for."""
        options = self._options
        seconds = run.seconds if comparison is None else comparison.drafted
        closing = show.closing_line(len(run.tokens), seconds, run.stats, comparison)
        talks = options.show_drafts or options.compare or options.stats
        if talks and not options.as_json:
            self._talk.print()
            if options.stats:
                self._talk.print(show.stats_table(run.stats, run.stages, run.plans))
            self._talk.print(closing, soft_wrap=True)
            if comparison is not None:
                self._talk.print(Text(comparison.about, "dim"), soft_wrap=True)
        if options.svg is not None:
            self._save_picture(closing)

    def _save_picture(self, closing: Text) -> None:
        path = self._options.svg
        assert path is not None
        flags = [flag for flag, on in (("--show-drafts", True), ("--compare", self._options.compare)) if on]
        drawn = show.picture(self._pieces, self._legend, closing, " ".join(["selfspec generate", *flags]))
        try:
            path.write_text(drawn, encoding="utf-8")
        except OSError as problem:
            raise Failure(f"--svg {path} cannot be written ({problem.strerror}); choose another", RUN) from problem


def _legend(job: Job) -> Text | None:
    """What the colours mean; nothing when the policy never drafts. Policies that weigh costs are not made for it."""
    if job.policy == "plain":
        return None
    exit_layer = job.options["exit_layer"] if job.policy == "adaptive" else None
    if job.policy not in CHOOSES_EXIT:  # all of these are told the same
        told = policy_for(job.target, "fixed", job.options["exit_layer"], job.options["num_draft_tokens"])
        exit_layer = told.exit_layer if isinstance(told, Fixed) else None
    drafts = (job.options["drafts"] or DRAFTS) if job.policy == "adaptive" else ("exit",)
    drafts = ("lookup",) if job.policy in BY_LOOKUP else drafts
    free = ["lookup"] if "lookup" in drafts else []
    return show.legend(exit_layer if "exit" in drafts else LOOKUP, job.target.stack.num_layers, free)


def _shown(job: Job) -> str:
    """The prompt as the coloured text repeats it: before a continuation, or above an answer."""
    text = job.prompts[0].text
    text = text if len(text) <= PROMPT_SHOWN else "…" + text[-PROMPT_SHOWN:]
    return text + "\n\n" if job.chat else text
