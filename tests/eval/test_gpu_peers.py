"""Peers of `python -m eval gpu` in folders: what their file may say, and that one that fails costs one figure."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from time import sleep

import pytest

from eval import gpu
from eval.__main__ import main
from eval.config import FOLDER
from eval.gpu_peers import FILE, folder_rate, read_peer
from train.configuration import read_config

WRITES = """
import json, sys
config, output, *given = sys.argv[1:]
hidden = json.load(open(config))["hidden_size"]
print("a message", file=sys.stderr)
json.dump({"tokens_per_second": hidden, "version": "-".join(given)}, open(output, "w"))
"""
GIVEN = ["{config}", "{output}", "{shape}", "{dtype}", "{batch}", "{context}", "{new_tokens}", "{device}"]


@pytest.fixture
def folder(tmp_path):
    """Makes a peer's folder with a Python program, run without site packages, and keys of its file."""

    def made(program, *arguments, name="peer", **keys):
        place = tmp_path / name
        place.mkdir()
        (place / "run.py").write_text(program)
        given = {"command": ["{python}", "-S", "run.py", *arguments], **keys}
        (place / FILE).write_text(json.dumps(given))
        return place

    return made


def run(place, shape="tiny", batch=2, left=60.0):
    about = {"context": 48, "new_tokens": 96, "dtype": "float32", "device": "cpu"}
    return folder_rate(read_peer(place), left, shape=shape, batch=batch, **about)


def test_a_peer_is_told_the_shape_and_reports_one_json_line(folder):
    found = run(folder(WRITES, *GIVEN))
    assert found["tokens_per_second"] == 64 and found["version"] == "tiny-float32-2-48-96-cpu"
    assert found["messages"] == "a message\n" and found["wall_seconds"] > 0


@pytest.mark.parametrize(("per_row", "rate"), [(False, 12.5), (True, 25.0)])
def test_a_rate_is_read_from_the_output_by_a_pattern(per_row, rate, folder):
    program = 'print("Tokens/sec: 9\\nAverage tokens/sec: 12.50")'
    place = folder(program, tokens_per_second=r"[Tt]okens/sec: ([\d.]+)", rate_is_per_row=per_row, version="abc")
    assert run(place).items() >= {"tokens_per_second": rate, "version": "abc"}.items()


@pytest.mark.parametrize(
    ("program", "keys", "words"),
    [
        ("import sys; sys.exit('no such checkpoint')", {}, "exit code 1; its last words: no such checkpoint"),
        ("pass", {}, "it wrote no JSON line with tokens_per_second"),
        ("pass", {"tokens_per_second": "rate (.*)"}, "nothing in its output matches 'rate (.*)'"),
        ("print('rate many')", {"tokens_per_second": "rate (.*)"}, "its tokens per second are no number: 'many'"),
        ("pass", {"shapes": ["llama-3-8b"]}, "it runs llama-3-8b only"),
    ],
)
def test_a_peer_that_fails_says_why(program, keys, words, folder):
    with pytest.raises(ValueError) as caught:
        run(folder(program, "{config}", "{output}", **keys))
    assert words in str(caught.value)


def test_a_peer_that_is_too_slow_is_ended_with_the_processes_it_started(folder, tmp_path, monkeypatch):
    """Its time is over as soon as it has started its own process, however long that takes."""
    pid = tmp_path / "pid"

    class Slow(subprocess.Popen):
        def communicate(self, timeout=None):
            while timeout is not None:
                if pid.exists() and pid.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                sleep(0.01)
            return super().communicate()

    monkeypatch.setattr(subprocess, "Popen", Slow)
    program = "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
    with pytest.raises(ValueError, match="it exceeded 60 s and was ended"):
        run(folder(f"{program}open({str(pid)!r}, 'w').write(str(child.pid)); child.wait()"))
    stat = Path("/proc", pid.read_text(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "--peer needs a folder with selfspec_peer.json"),
        ('{"command": ["a"], "speed": 1}', "configuration key 'speed' is unknown; known: command"),
        ('{"command": "a"}', "command must be a list, got 'a'"),
        ('{"command": []}', "command must be a list of texts, got []"),
        ('{"command": ["a"], "tokens_per_second": "(a"}', "unterminated subpattern"),
        ('{"command": ["a"], "tokens_per_second": "a"}', "a regular expression with one group, got 'a'"),
        ('{"command": ["a"], "seconds": "soon"}', "seconds must be a number, got 'soon'"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_measured(content, words, tmp_path, capsys):
    (tmp_path / FILE).write_text(content)
    assert main(["gpu", str(FOLDER / "gpu_small.yaml"), "--peer", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_peers_are_measured_as_cells_and_one_that_fails_costs_one_cell(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "cells_of", lambda config: [gpu.Cell(48, 2, f"peer:{name}") for name in ("bad", "good")])
    good, bad = folder(WRITES, *GIVEN, name="good"), folder("1 / 0", name="bad")
    config = read_config(gpu.GpuConfig, FOLDER / "gpu_small.yaml", {"peer": [str(good), str(bad)]})
    found = gpu.run(config, tmp_path / "gpu.json", lambda *given: gpu.Shape(*given).measure())["shapes"]["tiny"]
    assert [(c["method"], c["tokens_per_second"]) for c in found["cells"]] == [("peer:good", 64)]
    assert "ZeroDivisionError" in found["missing"]["peer:bad, batch 2, context 48"]


def test_the_documented_file_of_gpt_fast_is_valid(tmp_path):
    text = (FOLDER.parents[1] / "docs" / "measurements.md").read_text()
    (tmp_path / FILE).write_text(text.split("```json\n")[1].split("```")[0])
    peer = read_peer(tmp_path)
    assert re.findall(
        peer.tokens_per_second, "Time for inference 1: 2.00 sec total, 99.00 tokens/sec\nAverage tokens/sec: 98.50\n"
    ) == ["98.50"]
    assert peer.shapes == ("llama-3-8b",) and "generate.py" in peer.command


def test_the_same_name_twice_is_refused(folder, capsys):
    place = str(folder("pass"))
    assert main(["gpu", str(FOLDER / "gpu_small.yaml"), "--peer", place, place]) == 2
    assert "peer must be folders of different names" in capsys.readouterr().err
