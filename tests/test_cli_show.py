"""Coloured drafts: the pieces add up to the text, whatever is struck out between them."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from selfspec import LLM, SamplingParams
from selfspec.cli import show
from selfspec.cli.compare import Comparison
from selfspec.cli.drafts import Piece, PieceCutter, legend, paint, picture
from selfspec.cli.session import STAGES, Run
from selfspec.control.plan import GRAMMAR, NUM_BINS, SurvivalStop
from selfspec.core import LOOKUP, Plan, Request, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.decoding.outputs import SpecStats

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SEQUENCE = Sequence(0, Request([0]), [0], 9)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("stop", [(), ("Y,", "?")])
def test_pieces_without_the_rejected_ones_are_the_text(model_folder, temperature, stop):
    llm = LLM(model_folder)
    for seed, prompt in enumerate(["abc", "def f(x):", "user: hi\nbot:"]):
        rows = []
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, stop=stop)
        [output] = llm.generate(prompt, params, on_round=lambda round_, rows=rows: rows.extend(round_.rows))
        cutter = PieceCutter(llm.tokenizer, rows[0].sequence.request)
        text = "".join(piece.text for row in rows for piece in cutter.pieces(row) if piece.kind != "rejected")
        assert text == output.outputs[0].text


def test_kinds_say_who_wrote_what():
    class Letters:
        """Token n is the n-th letter of the alphabet."""

        def decode(self, ids, **options):
            return "".join(chr(97 + i) for i in ids)

    cutter = PieceCutter(Letters(), SEQUENCE.request)
    pieces = cutter.pieces(RowRound(SEQUENCE, 4, 2, [1, 2, 3], [1, 2, 25, 24]))
    shown = [piece for piece in pieces if piece.text]
    assert shown == [("b", "accepted"), ("c", "accepted"), ("z", "rejected"), ("d", "own")]
    assert cutter.pieces(RowRound(SEQUENCE, 0, 0, [4])) == [("e", "own")]


def painted(pieces, colour=True):
    console = Console(
        file=io.StringIO(), force_terminal=colour, color_system="standard" if colour else None, width=20, _environ={}
    )
    for piece in pieces:
        paint(console, [piece])
    return console.file.getvalue()


TEXTS = st.lists(
    st.tuples(st.text("ab c\n\t漢", max_size=6), st.sampled_from(["accepted", "own", "rejected"])), max_size=20
)


@given(TEXTS)
def test_painting_changes_no_character(pieces):
    pieces = [Piece(*piece) for piece in pieces]
    text = "".join(piece.text for piece in pieces).replace("\t", " " * 4)
    assert ANSI.sub("", painted(pieces)) == text
    assert painted(pieces, colour=False) == text


def test_text_cannot_steer_the_terminal():
    assert "\x1b[2J" not in painted([Piece("a\x1b[2Jb\x9b\x07", "own")])


def run_of(num_tokens, seconds, stats):
    sequence = Sequence(0, Request([0]), [0] * (1 + num_tokens), 99, request_id="0", stats=stats)
    return Run([sequence], {"verify": seconds})


def test_the_closing_line_has_speed_acceptance_and_speedup():
    stats = SpecStats()
    stats.add_round(4, 3, 4)
    stats.add_round(4, 1, 2)
    run = run_of(6, 0.1, stats)
    assert show.closing_line(run).plain == "60 tokens/s · acceptance length 3.00"
    line = show.closing_line(run, Comparison([0.1], [0.2], None)).plain
    assert line == "60 tokens/s · acceptance length 3.00 · 2.00x plain decoding (30 tokens/s) · same 6 tokens"
    line = show.closing_line(run, Comparison([0.1], [0.2], 2, [0.3], 4)).plain
    assert "tokens differ from number 3 on" in line
    assert line.endswith(" · 3.00x transformers' generate (20 tokens/s) · tokens differ from number 5 on (rounding)")


def test_a_sentence_says_what_drafted_and_what_it_gained():
    run, same = Run(), Comparison([0.1], [0.2], None)
    assert show.what_drafted(run, same) == "Drafted: nothing. 2.00 times as fast as plain decoding."
    drafting = RowRound(SEQUENCE, 4, 3, [5, 6, 7, 8], [5, 6, 7, 9])
    for exit_layer in (LOOKUP, 2, 2):
        run.add(RoundOutput(exit_layer, [drafting], StageSeconds(), Plan(exit_layer, (4,))))
    forced = RowRound(SEQUENCE, 2, 2, [5, 6, 7], [5, 6], match_length=2, source=GRAMMAR)
    run.add(RoundOutput(LOOKUP, [forced, drafting], StageSeconds(), Plan(LOOKUP, (4, 4))))
    told = (
        "2 tokens by the grammar, 2 of them right; 8 tokens by lookup in the text so far, 6 of them right; "
        "8 tokens by early layers, 6 of them right"
    )
    assert show.what_drafted(run, same) == f"Drafted: {told}. 2.00 times as fast as plain decoding."


HALF, ALL = (RowRound(SEQUENCE, 2, at, [5, 6, 7][: at + 1], [5, 6]) for at in (1, 2))
NOTHING = RowRound(SEQUENCE, 0, 0, [5])
FORCED = RowRound(SEQUENCE, 2, 2, [5, 6, 7], [5, 6], match_length=2, source=GRAMMAR)
SURE = Plan(3, (18,), stop=SurvivalStop((0.5,) * NUM_BINS, 0.618), speedup=2.342)


@pytest.mark.parametrize(
    ("plan", "rows", "line"),
    [
        (Plan(None, (0,), speedup=1.0), [HALF], "plain"),
        (Plan(3, (4,)), [HALF], "exit  3  up to  4  drafted  2  accepted  1"),
        (SURE, [HALF], "exit  3  up to 18  drafted  2  accepted  1  2.34x expected  stops below 62%"),
        (
            Plan(12, (18,), min_confidence=0.4),
            [HALF],
            "exit 12  up to 18  drafted  2  accepted  1  stops at a token below 40%",
        ),
        (Plan(3, (4, 0)), [HALF, NOTHING], " 2 rows  exit  3  up to  4  drafted  2  accepted  1"),
        (Plan(None, (0, 0)), [HALF, NOTHING], " 2 rows  plain"),
        (Plan(LOOKUP, (2,)), [ALL], "lookup  drafted  2  accepted  2"),
        (Plan(LOOKUP, (2,)), [FORCED], "grammar  drafted  2  accepted  2"),
        (Plan(LOOKUP, (2, 2)), [FORCED, HALF], " 2 rows  lookup  drafted  4  accepted  3"),
    ],
)
def test_a_round_is_a_line(plan, rows, line):
    assert show.plan_line(7, RoundOutput(plan.exit_layer, rows, StageSeconds(), plan)) == f"round    7  {line}"


def test_a_round_by_lookup_of_another_plan_says_so():
    round_ = RoundOutput(LOOKUP, [ALL], StageSeconds(), Plan(3, (4,), speedup=2.0))
    assert show.plan_line(1, round_) == "round    1  lookup  drafted  2  accepted  2"


def table_of(*given):
    console = Console(file=io.StringIO(), width=100, _environ={})
    console.print(show.stats_table(*given))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_the_table_has_rounds_by_exit_layer():
    lines = table_of(SpecStats(), {"draft": 0.25, "verify": 0.75}, {"3": 8, "5": 11, "plain": 1})
    assert lines[2:5] == [["exit", "3", "40%"], ["exit", "5", "55%"], ["plain", "5%"]]


def test_the_table_fits_on_a_screen_however_many_layers_and_positions_there_are():
    stats = SpecStats()
    stats.add_round(128, 128, 129)
    plans = {"lookup": 5, **{str(layer): layer for layer in range(1, 80)}, "plain": 9}
    lines = table_of(stats, dict.fromkeys(STAGES, 0.1), plans)
    assert len(lines) + 2 <= 40, "with a blank line before and a closing one after"
    shares = [int(line[-1][:-1]) for line in lines if line[0] == "exit" or line[:2] == ["other", "exits"]]
    assert len(shares) == 7 and 97 <= sum(shares) <= 103 and any(line[:2] == ["position", "128"] for line in lines)


def test_a_picture_holds_every_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    pieces = [Piece("x = ", "prompt"), Piece("one", "accepted"), Piece(" two", "own")]
    pieces.append(Piece("three", "rejected"))
    drawn = picture(pieces, legend(8), show.closing_line(run_of(2, 1.0, SpecStats())), "title")
    assert drawn.lstrip().startswith("<svg")
    assert "line-through" in drawn and "bold" in drawn
    assert all(word in drawn for word in ("title", "one", "two", "three", "all&#160;8&#160;layers"))
