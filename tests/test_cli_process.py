"""The command as a process: what it imports, closed pipes, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from selfspec.cli.generate import OutputOptions
from selfspec.cli.options import NO_OPTION, ModelOptions
from selfspec.params import SamplingParams, SpeculativeConfig
from tests.cli_fixtures import save_model

ROOT = Path(__file__).parents[1]
ANSI = re.compile(r"\x1b\[[0-9;]*m")
COMMAND = [sys.executable, "-m", "selfspec"]


def start(*arguments, pipe=subprocess.PIPE, **options):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # a shell that runs the tests in the background has Ctrl-C ignored, and children inherit that
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)} if os.name == "posix" else {}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=ROOT,
        env=variables,
        **heard,
        **options,
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["calibrate", "--help"], ["generate", "--top-p", "2", "x"]]
)
def test_help_and_wrong_usage_import_neither_torch_nor_transformers(arguments):
    code = (
        "import sys; from selfspec.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_option_and_begins_with_examples():
    wide = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([*COMMAND, "generate", "--help"], cwd=ROOT, capture_output=True, check=False, env=wide)
    text = ANSI.sub("", done.stdout.decode())
    assert done.returncode == 0
    assert text.index("selfspec generate 'def") < text.index("--model")
    kinds = (ModelOptions, SamplingParams, SpeculativeConfig, OutputOptions)
    names = {one.name for kind in kinds for one in fields(kind)} - NO_OPTION
    assert all("--" + name.replace("_", "-") in text for name in names)


IN_A_LIBRARY = """
import logging
import selfspec.hf
from selfspec import LLM, SamplingParams
levels = [logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree", "transformers", "selfspec")]
assert levels == [0, 0, logging.WARNING, 0] and not logging.getLogger("selfspec").handlers, levels
[output] = LLM(FOLDER, backend="views").generate("abc", SamplingParams(max_tokens=4))
assert len(output.outputs[0].token_ids) == 4
"""


@pytest.mark.slow
def test_no_other_package_speaks_where_the_library_is_used(model_folder):
    code = IN_A_LIBRARY.replace("FOLDER", repr(str(model_folder)))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_quiet_command_says_nothing_however_long_it_takes(model_folder):
    call = ("generate", "abc", "--model", model_folder, "--backend", "views", "--max-tokens", "4", "--stats", "--quiet")
    with start(*call) as process:
        out, said = process.communicate()
    assert (process.returncode, said) == (0, b"") and out


@pytest.mark.slow
def test_a_reader_who_leaves_is_no_error(model_folder):
    plain = ("--policy", "plain")  # nothing is measured before
    with start("generate", "abc", "--model", model_folder, "--max-tokens", 250, "--quiet", *plain) as process:
        process.stdin.close()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_written(tmp_path):
    """The text is longer than what a pipe holds, so that the process cannot end before it is interrupted."""
    save_model(tmp_path, max_position_embeddings=100_000)
    call = ("generate", "abc", "--model", tmp_path, "--max-tokens", 90_000, "--policy", "plain", "--quiet")
    with start(*call) as process:
        process.stdin.close()
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
        assert first and rest.endswith(b"\n")
        assert process.stderr.read() == b""
