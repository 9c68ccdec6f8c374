"""A run's figures: drawn where their data are there, the same bytes for the same data, never in the way of a report."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval import compare
from eval.run import drawing
from eval.run.drawing import maps, paper, speeds
from eval.run.lines import FullError
from eval.run.metrics import METRICS
from eval.run.publish import write

HOSTILE = 'external:<b a="1">&$x_1$'
STUDIES = {
    "acceptance": {
        "study": "acceptance",
        "num_layers": 4,
        "num_questions": 3,
        "num_tokens": 1234,
        "exits": [{"exit_layer": e, "joint": [e / 4, e / 8, None], "conditional": [1, 1, None]} for e in (1, 2, 3)],
    },
    "grid": {
        "study": "grid",
        "exit_layers": [1, 2],
        "draft_lengths": [2, 4],
        "plain_tokens_per_second": 100.0,
        "tokens_per_second": [[90.0, None], [150.0, 1130.0]],
        "predicted_speedup": [[1.0, 1.1], [1.4, 1.2]],
        "best": {"exit_layer": 2, "draft_length": 4, "speedup": 11.3},
        "predicted_best": {"exit_layer": 2, "draft_length": 2, "speedup": 1.5, "predicted_speedup": 1.4},
        "num_questions": 1,
        "tokens": 48,
    },
    "batch": {
        "study": "batch",
        "batch_sizes": [1, 2],
        "methods": [
            {"method": "adaptive", "speedup": [{"median": 1.5, "low": 1.4, "high": 1.6}, None]},
            {"method": "best fixed", "speedup": [{"median": 1.2, "low": 1, "high": 2}] * 2, "settings": ["2,4", "2,2"]},
        ],
    },
    "policies": {
        "study": "policies",
        "length": 128,
        "rows": [
            {"name": "adaptive", "kind": "policy", "speedup": 1.25},
            {"name": "fs", "kind": "policy", "speedup": 1.5},
            {"name": "best static (E, D)", "kind": "bound", "speedup": 1.375},
            {"name": "best static (E, D, stop)", "kind": "bound", "speedup": 1.625},
            {"name": "clairvoyant", "kind": "bound", "speedup": 2.0},
        ],
    },
}


def figures(value, shares=None):
    """A group's figures, as far as reports need them."""
    speed = value and {"value": value, "low": value * 0.9, "high": value * 1.1, "num_questions": 2}
    some = {"num_questions": 2, "num_tokens": 2048, "speedup": speed, "stage_shares": shares}
    return {**dict.fromkeys(METRICS), **some}


def a_summary(**keys):
    shares = {"prefill": 0.25, "draft": 0.5, "verify": 0.25}
    groups = {
        "plain": {"code": figures(1.0), "overall": figures(1.0, {**shares, "draft": 0.0, "verify": 0.75})},
        "adaptive": {"code": figures(1.5), "long_texts": figures(0.5), "overall": figures(1.25, shares)},
        HOSTILE: {"code": figures(None), "overall": figures(2.0)},
        "transformers": {},
    }
    methods = [
        {
            "method": name,
            "errors": {"time_out": 1} if name == HOSTILE else {},
            "num_missing": 0,
            "groups": of_method,
        }
        for name, of_method in groups.items()
    ]
    summary = {"num_questions": 2, "baseline": "plain", "is_auto": True, "complete": True, "methods": methods}
    return {**summary, "harness_share": None, "harness_share_inside": None, "check": None, **keys}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "studies").mkdir()
    for name, study in STUDIES.items():
        (tmp_path / "studies" / f"{name}.json").write_text(json.dumps(study))
    return tmp_path


@pytest.fixture
def few(folder):
    """Without the studies' figures, where any figure will do."""
    for name in STUDIES:
        (folder / "studies" / f"{name}.json").unlink()
    return folder


def texts(svg):
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [element.text.strip() for element in found if element.text]


def test_every_figure_is_there_and_the_same_bytes_when_drawn_again(folder):
    text = write(folder, a_summary())
    files = {file.name: file.read_bytes() for file in (folder / "figures").iterdir()}
    assert sorted(files) == sorted(f"{name}.{ending}" for name in drawing.NAMES for ending in ("png", "svg"))
    assert write(folder, a_summary()) == text
    assert {file.name: file.read_bytes() for file in (folder / "figures").iterdir()} == files
    for name, content in files.items():
        assert content.startswith(b"\x89PNG") if name.endswith("png") else b"Date" not in content
        assert len(content) < 120_000
    for name in drawing.NAMES:
        assert text.count(f"](figures/{name}.svg)") == 1
    assert "3 questions, 1,234 tokens" in text and "2 questions and 2,048 new tokens" in text
    assert "1 question, up to 48 new tokens each" in text.replace("Up", "up")


def test_figures_show_what_they_are_given(folder):
    drawn = drawing.draw_all(folder, a_summary())
    assert not drawn.notes and not drawn.remark
    shown = {name: texts(figure.svg) for name, figure in drawn.figures.items()}
    assert {"adaptive", HOSTILE, "plain = 1", "code", "long texts", "overall"} <= set(shown["speedup_by_category"])
    assert {"prefill", "draft", "verify", "plain", "adaptive", "50%"} <= set(shown["stages"])
    assert {"0.75", "0.38", "exit layer"} <= set(shown["acceptance"])
    best, predicted = "best: exit 2, 4 drafted, 11.30x", "predicted: exit 2, 2 drafted, 1.40x, measured 1.50x"
    assert {"90.0", "150", "1130", best, predicted} <= set(shown["grid"])
    assert {"adaptive", "best fixed", "plain = 1"} <= set(shown["batch"])
    assert "best fixed ones (exit layer, drafted): 2,4; 2,2" in drawn.figures["batch"].caption[0]
    assert {"fs", "1.50", "clairvoyant: 2.00", "best static (E, D, stop): 1.62"} <= set(shown["policies"])
    assert set(speeds.BOUNDS) < set(compare.BOUNDS)


def test_only_what_has_data_is_drawn_and_nothing_stays_of_what_no_longer_has(folder):
    for name in ("acceptance", "batch", "policies"):
        (folder / "studies" / f"{name}.json").unlink()
    write(folder, a_summary())
    assert sorted(file.stem for file in (folder / "figures").glob("*.svg")) == ["grid", "speedup_by_category", "stages"]
    (folder / "studies" / "grid.json").unlink()
    nothing = a_summary(baseline=None)
    for method in nothing["methods"]:
        method["groups"] = {}
    text = write(folder, nothing)
    assert not list((folder / "figures").iterdir()) and "figures/" not in text and "## Acceptance" not in text


@pytest.mark.parametrize(
    "broken",
    [
        {
            "grid": (
                '{"study": "grid", "error": "no room\\nfor <8> rows"}',
                "The study grid came to nothing: no room for \\<8>",
            ),
            "batch": ('{"batch_', "studies/batch.json cannot be drawn (JSONDecodeError"),
            "policies": ("[1]", "studies/policies.json cannot be drawn (ValueError: not a JSON object)."),
            "acceptance": (
                '{"exits": [{"exit_layer": 1, "joint": ["much"]}]}',
                "studies/acceptance.json cannot be drawn",
            ),
        },
        {
            "acceptance": (
                '{"study": "acceptance"}',
                "studies/acceptance.json cannot be drawn (KeyError: 'exits')",
            ),
            "grid": (
                json.dumps({**STUDIES["grid"], "best": {"exit_layer": 9, "draft_length": 1}}),
                "studies/grid.json cannot be drawn",
            ),
        },
    ],
    ids=["no studies", "other figures"],
)
def test_failed_and_broken_studies_are_one_sentence_each(folder, broken):
    for name, (content, _) in broken.items():
        (folder / "studies" / f"{name}.json").write_text(content)
    text = write(folder, a_summary())
    for name, (_, words) in broken.items():
        assert sum(words in line for line in text.split("\n")) == 1
        assert not (folder / "figures" / f"{name}.svg").exists()
    assert (folder / "figures" / "stages.svg").exists()


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("grid", {**STUDIES["grid"], "tokens_per_second": [[None, None]] * 2}),
        ("acceptance", {"exits": [{"exit_layer": 1, "joint": [None, None]}, {"exit_layer": 2, "joint": []}]}),
        ("batch", {"batch_sizes": [1], "methods": [{"method": "adaptive", "speedup": [None]}]}),
        ("policies", {"rows": [{"name": "fs", "kind": "policy", "speedup": None}]}),
    ],
)
def test_a_study_without_a_number_is_no_figure(name, study):
    assert drawing.OF_STUDY[name](study) is None


def test_parts_may_be_missing(few):
    grid = {key: STUDIES["grid"][key] for key in ("exit_layers", "draft_lengths", "tokens_per_second")}
    assert paper.draw("grid", maps.grid(grid)).svg
    assert paper.draw("policies", speeds.policies({"rows": STUDIES["policies"]["rows"][:1]})).svg
    partial = a_summary(complete=False)
    partial["methods"][1]["num_missing"] = 1
    assert "Partial" in write(few, partial) and (few / "figures" / "stages.png").exists()


def test_without_matplotlib_the_report_says_so_once_and_studies_errors_too(folder, monkeypatch):
    (folder / "studies" / "grid.json").write_text('{"study": "grid", "error": "too slow"}')
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    text = write(folder, a_summary())
    assert text.count("for want of matplotlib") == 1 and "figures/" not in text and "too slow" in text
    assert not (folder / "figures").exists() and "for want of matplotlib" in (folder / "report.html").read_text("utf-8")


def test_figures_that_exist_outlive_a_report_without_matplotlib(few, monkeypatch):
    write(few, a_summary())
    before = {file.name: file.read_bytes() for file in (few / "figures").iterdir()}
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    write(few, a_summary())
    assert {file.name: file.read_bytes() for file in (few / "figures").iterdir()} == before != {}


def test_a_picture_that_cannot_be_written_leaves_nothing_beside_it(few, monkeypatch):
    whole = Path.replace

    def failing(path, other):
        if other.suffix == ".png":
            raise OSError("full")
        return whole(path, other)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(FullError, match=r"\.png"):
        write(few, a_summary())
    assert [file.suffix for file in (few / "figures").iterdir()] == [".svg"]


def test_ours_are_strong_and_the_default_is_always_the_same_colour():
    looks = paper.looks(["transformers", "fixed:2,3", "adaptive", "external:x", "nonsense"])
    assert looks["adaptive"][0] == paper.STRONG[0] == paper.looks(["adaptive"])["adaptive"][0]
    assert looks["fixed:2,3"][0] in paper.STRONG[1:]
    assert all(looks[name][0] in paper.QUIET for name in ("transformers", "external:x", "nonsense"))
    assert len({mark for _, mark in looks.values()}) == 5
    assert paper.ink("#000000") == "white" and paper.ink("#ffffff") == "black" == paper.ink("#ffff00")


def test_a_figure_that_cannot_be_written_is_said_and_leaves_the_old_one(few):
    write(few, a_summary())
    before = (few / "figures" / "stages.png").read_bytes()
    (few / "figures" / "stages.png.new").mkdir()
    with pytest.raises(FullError, match=r"stages\.png"):
        write(few, a_summary())
    assert (few / "figures" / "stages.png").read_bytes() == before
