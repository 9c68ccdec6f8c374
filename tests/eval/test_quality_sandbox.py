"""Whatever a program does, the sandbox ends it, says that it failed, and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from eval.quality import sandbox
from eval.quality.sandbox import Limits

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process limits")
USUAL = Limits(seconds=60, memory=256 << 20, output=1 << 16)  # seconds enough for a busy machine
SHORT = USUAL._replace(seconds=1)
SPAWN = """
import _posixsubprocess, os
told = os.pipe()
_posixsubprocess.fork_exec([b"/bin/sleep", b"SECONDS"], [b"/bin/sleep"], True, (), None, None, -1, -1, -1, -1, -1, -1,
                           *told, False, True, -1, None, None, None, -1, None, False)
os.close(told[1])
assert os.read(told[0], 100) == b""  # closed by exec, which would write an error there
"""


def running(word):
    """Command lines of processes that hold `word` as an argument."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:  # it has ended since
            continue
        if word.encode() in arguments:
            found.append(arguments)
    return found


def gone(word, seconds=30):
    """Whether no such process is left after at most this long: the kernel ends a namespace's processes in its time."""
    end = time.monotonic() + seconds
    while running(word) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(word)


@pytest.fixture
def no_process_left(tmp_path, monkeypatch):
    """The sandbox's processes are told by the script they run: a copy that only this test has."""
    own = Path(shutil.copy(sandbox._INSIDE, tmp_path))
    monkeypatch.setattr(sandbox, "_INSIDE", own)
    yield
    if sys.platform == "linux":
        assert gone(str(own)), running(str(own))


def test_a_program_that_reaches_its_end_passes(no_process_left):
    source = (
        "import dataclasses, math, random, re\n\n@dataclasses.dataclass\nclass P:\n    x: int = 1\n\nassert P().x == 1"
    )
    assert sandbox.run(source, USUAL)[:2] == (True, "")
    assert sandbox.run("print('ä' * 100)", USUAL).passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "ran for more than 1 seconds"),
        ("import os\ntry: os.setsid()\nexcept OSError: pass\nwhile True: pass", "ran for more than 1 seconds"),
        ("import time\ntime.sleep(60)", "ran for more than 1 seconds"),
        ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
         "    except (OSError, ValueError): pass\nwhile True: pass", "ran for more than 1 seconds"),
        ("x = [0] * 10 ** 10", "out of memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "out of memory"),
        ("import os\nos.fork()", "used os.fork"),
        ("import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass", "used os.fork"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended before its tests did"),
        ("print('x' * (1 << 20))", "bytes of output"),
        ("import os\ntry:\n    while True: os.write(1, b'x' * 4096)\nexcept OSError: pass", "bytes of output"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("input()", "EOFError"),
        ("import subprocess\nsubprocess.run(['/bin/true'])", "used subprocess.Popen"),
        ("import os\nos.system('true')", "used os.system"),
        ("import socket\nsocket.socket()", "used socket"),
        ("import os\nos.kill(os.getppid(), 9)", "used os.kill"),
        ("import ctypes\nctypes.CDLL(None)", "used ctypes"),
        ("open('/tmp/x', 'w')", "used open for writing"),
        ("import os\nos.remove('/nowhere')", "used os.remove"),
        ("import os\nos.symlink('/etc', 'x')", "used os.symlink"),
        ("import torch", "ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_every_other_end_is_a_failure(source, reason, no_process_left):
    start = time.monotonic()
    limits = SHORT if "seconds" in reason else USUAL
    verdict = sandbox.run(source + "\nassert True", limits)
    assert not verdict.passed
    assert reason in verdict.reason
    assert time.monotonic() - start < limits.seconds + 30


def test_a_faked_verdict_without_the_mark_is_a_failure(no_process_left):
    source = "import os\nfor pipe in range(3, 32):\n    try: os.write(pipe, b'passed\\n')\n    except OSError: pass\n"
    assert not sandbox.run(source + "os._exit(0)", USUAL).passed


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("then", ["os._exit(0)", "while True: pass", ""])
def test_a_process_that_native_code_started_in_a_session_of_its_own_ends_with_the_program(then, no_process_left):
    if not sandbox.run("", USUAL).isolated:
        pytest.skip("the system allows no namespaces")
    word = f"31536000.{os.getpid()}"
    verdict = sandbox.run(SPAWN.replace("SECONDS", word) + then, SHORT if "while" in then else USUAL)
    if not then:  # it was started, unless the limit on processes forbids it: root has none
        assert verdict.passed or "BlockingIOError" in verdict.reason
    assert gone(word), running(word)


def test_the_program_sees_neither_environment_nor_the_callers_folder(monkeypatch, no_process_left):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    source = "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert os.listdir() == []\nassert os.getcwd() != {!r}"
    assert sandbox.run(source.format(os.getcwd()), USUAL).passed


def test_the_network_is_closed_where_namespaces_are_allowed(no_process_left):
    verdict = sandbox.run("assert len(open('/proc/net/route').readlines()) <= 1, 'a route'", USUAL)
    if verdict.isolated:
        assert verdict.passed, verdict


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="limits must be above 0"):
        sandbox.run("", Limits(seconds=0))
