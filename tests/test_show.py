"""Coloured drafts: the pieces add up to the text, whatever is struck out between them."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfspec import show
from selfspec.control.plan import NUM_BINS, Plan, SurvivalStop
from selfspec.control.rows import StageSeconds
from selfspec.decoding.results import Round, RowResult
from selfspec.decoding.stats import SpecStats
from selfspec.pieces import Painter, Piece, Pieces
from tests import cli_fixtures
from tests.target import load

model_folder = cli_fixtures.model_folder
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def target(model_folder):
    return load(model_folder)


def pieces_of(target, prompt, stop=(), **options):
    """Every piece of a run, and its completion."""
    ids = target.tokenizer(prompt)["input_ids"]
    cutter = Pieces(target.tokenizer, ids, stop)
    rows = [row for round_ in target.stream([ids], stop=list(stop), **options) for row in round_.rows]
    return [cutter.of(row) for row in rows], rows


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("stop", [(), ("Y,", "?")])
def test_pieces_without_the_rejected_ones_are_the_text(target, temperature, stop):
    for seed, prompt in enumerate(["abc", "def f(x):", "user: hi\nbot:"]):
        options = {"temperature": temperature, "seed": seed, "max_new_tokens": 60}
        pieces, rows = pieces_of(target, prompt, stop, **options)
        text = "".join(piece.text for part in pieces for piece in part if piece.kind != "rejected")
        assert text == rows[-1].completion.text


def test_kinds_say_who_wrote_what(target):
    class Letters:
        """Token n is the n-th letter of the alphabet."""

        def decode(self, ids, **options):
            return "".join(chr(97 + i) for i in ids)

    cutter = Pieces(Letters(), [0])
    [*pieces] = cutter.of(RowResult(0, [1, 2, 3], "bcd", [1, 2, 25, 24], 2, None))
    shown = [piece for piece in pieces if piece.text]
    assert shown == [("b", "accepted"), ("c", "accepted"), ("z", "rejected"), ("d", "own")]
    assert cutter.of(RowResult(0, [4], "e", [], 0, None)) == [("e", "own")]


def paint(pieces, width, colour=True):
    console = Console(
        file=io.StringIO(), force_terminal=colour, color_system="standard" if colour else None, width=200, _environ={}
    )
    painter = Painter(console, width)
    for piece in pieces:
        painter.write([piece])
    painter.end()
    return console.file.getvalue()


TEXTS = st.lists(
    st.tuples(st.text("ab c\n\t漢", max_size=6), st.sampled_from(["accepted", "own", "rejected"])), max_size=20
)


@given(TEXTS)
def test_painting_changes_no_character(pieces):
    pieces = [Piece(*piece) for piece in pieces]
    text = "".join(piece.text for piece in pieces).replace("\t", " " * 4)
    assert ANSI.sub("", paint(pieces, None)) == text + "\n"
    assert paint(pieces, None, colour=False) == text + "\n"


@given(TEXTS)
def test_lines_are_broken_between_words_only(pieces):
    pieces = [Piece(text.replace("\t", ""), kind) for text, kind in pieces]
    painted = ANSI.sub("", paint(pieces, 12))
    assert painted.split() == "".join(piece.text for piece in pieces).split()
    assert all(len(line) <= 12 or not line.strip() or len(line.split()) == 1 for line in painted.split("\n"))


def test_text_cannot_steer_the_terminal():
    assert "\x1b[2J" not in paint([Piece("a\x1b[2Jb\x9b\x07", "own")], None)


def test_the_closing_line_tells_speed_acceptance_and_speedup():
    stats = SpecStats()
    stats.add_round(4, 3, 4)
    stats.add_round(4, 1, 2)

    class Comparison:
        plain, speedup, first_difference = 0.2, 2.0, None
        generate, generate_difference = None, None

    assert show.closing_line(6, 0.1, stats).plain == "60 tokens/s · acceptance length 3.00"
    line = show.closing_line(6, 0.1, stats, Comparison()).plain
    assert line == "60 tokens/s · acceptance length 3.00 · 2.00x plain decoding (30 tokens/s) · same 6 tokens"
    Comparison.first_difference = 2
    assert "tokens differ from number 3 on" in show.closing_line(6, 0.1, stats, Comparison()).plain
    Comparison.generate, Comparison.generate_difference = 0.3, 4
    line = show.closing_line(6, 0.1, stats, Comparison()).plain
    assert line.endswith(" · 3.00x transformers' generate (20 tokens/s) · tokens differ from number 5 on (rounding)")


def line_of(number, plan, *rows, exit_layer=-1):
    drafts = plan.exit_layer if exit_layer < 0 else exit_layer
    return show.plan_line(number, Round([*rows], plan, StageSeconds(), drafts)).plain


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (Plan(None, (0,), speedup=1.0), "round    7  plain"),
        (Plan(3, (4,)), "round    7  exit  3  up to  4  drafted  2  accepted  1"),
        (
            Plan(3, (18,), stop=SurvivalStop((0.5,) * NUM_BINS, 0.618), speedup=2.342),
            "round    7  exit  3  up to 18  drafted  2  accepted  1  2.34x expected  stops below 62%",
        ),
        (
            Plan(12, (18,), min_confidence=0.4),
            "round    7  exit 12  up to 18  drafted  2  accepted  1  stops at a token below 40%",
        ),
    ],
    ids=["plain", "fixed", "with a stop", "with a confidence"],
)
def test_a_plan_is_a_line(plan, line):
    assert line_of(7, plan, RowResult(0, [5, 6], "", [5, 7], 1, None)) == line


def test_a_round_of_several_rows_gives_sums():
    rows = [RowResult(0, [5, 6], "", [5, 7], 1, None), RowResult(1, [5], "", [], 0, None)]
    assert line_of(123, Plan(3, (4, 0)), *rows) == "round  123   2 rows  exit  3  up to  4  drafted  2  accepted  1"
    assert line_of(1, Plan(None, (0, 0)), *rows) == "round    1   2 rows  plain"


def test_a_round_by_lookup_says_so_whoever_drafts_the_others():
    row = RowResult(0, [5, 6], "", [5, 6], 2, None)
    assert line_of(1, Plan(0, (2,)), row) == "round    1  lookup  drafted  2  accepted  2"
    assert line_of(1, Plan(3, (4,), speedup=2.0), row, exit_layer=0) == "round    1  lookup  drafted  2  accepted  2"


def test_a_round_with_branches_says_how_much_was_drafted_beside_the_one_that_was_followed():
    row = RowResult(0, [5, 6], "", [5], 1, None, num_beside=4)
    assert line_of(1, Plan(3, (8,)), row) == "round    1  exit  3  up to  8  drafted  1 +4 beside  accepted  1"


def test_the_table_tells_tokens_beside_the_branch_that_was_followed():
    stats = SpecStats()
    stats.add_round(3, 2, 3)
    for beside, told in ((0, False), (4, True)):
        stats.add_round(3, 2, 3, beside)
        console = Console(file=io.StringIO(), width=60, _environ={})
        console.print(show.stats_table(stats, {"draft": 1.0}))
        lines = [line.split() for line in console.file.getvalue().splitlines()]
        assert (["beside", "the", "branch", "that", "was", "followed", "4"] in lines) == told


def test_the_legend_names_layers_where_they_stay_the_same():
    assert show.legend(1, 8).plain.startswith("drafted by layer 1, accepted")
    assert show.legend(4, 8).plain.startswith("drafted by layers 1-4, accepted")
    assert show.legend(None, 8).plain.startswith("drafted by early layers, accepted")
    assert show.legend(None, 8, ["lookup"]).plain.startswith("drafted by early layers or lookup, accepted")
    assert show.legend(0, 8, ["lookup"]).plain.startswith("drafted by lookup, accepted")
    everything = show.legend(None, 32, ["lookup", "others"]).plain
    assert everything.startswith("drafted by early layers, lookup or others, accepted")
    assert len(everything) <= show.PICTURE_WIDTH


def test_streams_of_one_file_end_up_in_the_same_place(tmp_path):
    with (tmp_path / "a").open("w") as one, (tmp_path / "a").open("a") as same, (tmp_path / "b").open("w") as other:
        assert show.same_place(one, same)
        assert not show.same_place(one, other)
        assert not show.same_place(io.StringIO(), one)


def test_the_table_tells_rounds_by_exit_layer():
    console = Console(file=io.StringIO(), width=60, _environ={})
    console.print(show.stats_table(SpecStats(), {"draft": 0.25, "verify": 0.75}, {"3": 8, "5": 11, "plain": 1}))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[2:5] == [["exit", "3", "40%"], ["exit", "5", "55%"], ["plain", "5%"]]


def test_a_picture_holds_every_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    pieces = [Piece("x = ", "prompt"), Piece("one", "accepted"), Piece(" two", "own")]
    pieces.append(Piece("three", "rejected"))
    drawn = show.picture(pieces, show.legend(2, 8), show.closing_line(2, 1.0, SpecStats()), "title")
    assert drawn.lstrip().startswith("<svg")
    assert "line-through" in drawn and "bold" in drawn
    assert all(word in drawn for word in ("title", "one", "two", "three", "layers&#160;1-2", "all&#160;8&#160;layers"))
