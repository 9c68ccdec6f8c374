"""The C++ library is compiled once for all workers and sessions; a build that fails is a failure, never a skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.kernels import compiler

pytestmark = pytest.mark.slow  # sessions of pytest of their own
SUITE = """
import os
import pytest
from selfspec.kernels.compiler import library

AT_IMPORT = os.environ["SELFSPEC_CACHE"]

@pytest.fixture
def loaded():
    return library()

@pytest.mark.parametrize("number", range(2))
def test_needs_no_library(number):
    assert AT_IMPORT == os.environ["SELFSPEC_CACHE"] != os.environ["USERS"]

@pytest.mark.parametrize("number", range(2))
def test_loads_the_library(number):
    library()

@pytest.mark.parametrize("number", range(2))
def test_is_given_the_library(loaded, number):
    pass
"""
SERIAL, WORKERS = ["-p", "no:xdist"], ["-n", "2"]


def run_pytest(folder, *arguments, **variables):
    """Exit code and output of pytest on `SUITE`, whose root, and so whose build folder, is `folder`."""
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.compiling"]\n')
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\naddopts = -ra\n")
    (folder / "test_library.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    environment |= {"SELFSPEC_CACHE": str(folder / "users"), "USERS": str(folder / "users")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def program(path, lines):
    """A program that stands in for a compiler."""
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(SERIAL, id="one process"), pytest.param(WORKERS, id="two workers")],
)
def test_a_build_that_fails_fails_the_session_with_the_compilers_message(tmp_path, arguments):
    broken = program(tmp_path / "broken++", "echo 'body.cpp:7: error: no such type' >&2\nexit 1\n")
    code, printed = run_pytest(tmp_path, *arguments, CXX=broken)
    assert code != 0 and "body.cpp:7: error: no such type" in printed
    assert " passed" not in printed and " skipped" not in printed


def test_without_a_compiler_what_needs_one_is_skipped_and_the_rest_runs(tmp_path):
    (tmp_path / "ziglang.py").touch()  # hides the package
    paths = f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"
    code, printed = run_pytest(tmp_path, *SERIAL, CXX="", PATH="/nowhere", PYTHONPATH=paths)
    assert code == 0 and "2 passed, 4 skipped" in printed
    assert "needs a C++ compiler, and neither $CXX nor g++ nor clang++ was found" in printed


def test_the_package_ziglang_compiles_where_nothing_else_is_found(tmp_path, monkeypatch):
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    zig = program(package / "zig", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CXX", own := program(tmp_path / "own++", ""))
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiler.find_compiler() == (own,)
    monkeypatch.delenv("CXX")
    assert compiler.find_compiler() == (zig, "c++")


def test_workers_and_later_sessions_share_one_build(tmp_path):
    made = compiler.library()._name  # the path it was loaded from
    counting = program(
        tmp_path / "counting++",
        f'echo once >> {tmp_path}/builds\nsleep 1\nfor last; do :; done\ncp {made} "$last"\n',
    )
    for arguments in (WORKERS, SERIAL):
        code, printed = run_pytest(tmp_path, *arguments, CXX=counting)
        assert code == 0 and "6 passed" in printed and not (tmp_path / "users").exists()
    assert (tmp_path / "builds").read_text().split() == ["once"]


def test_this_session_loads_its_library_from_the_checkout_and_keeps_profiles_elsewhere():
    shared, cache = Path(__file__).resolve().parents[1] / "build" / "compiled", Path(os.environ["SELFSPEC_CACHE"])
    assert Path(compiler.library()._name).resolve().parent == shared
    assert cache.resolve() != shared.parent
