"""A pytest plugin: where a session's profiles and its compiled C++ lie, and what happens where C++ cannot be compiled.

Profiles and priors go to a folder of the session. The compiled library is kept in `build/compiled` of the checkout,
under the name that selfspec gives it, a hash of the sources, the flags, the compiler and the processor. Later sessions
and other workers find it there.

Where there is no compiler, tests that need one are skipped. Where there is one and the build fails, the session fails.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from selfspec.errors import NoCompilerError
from selfspec.kernels import compiler

COMPILED = Path("build", "compiled")  # in the checkout: git ignores it, and `make clean` removes it
HAS_COMPILER = compiler.find_compiler() is not None  # asked before any test changes $CXX or $PATH


def share_compiled(cache: Path, root: Path) -> None:
    """Let a cache folder find what was compiled for the checkout at `root`."""
    shared = root / COMPILED
    shared.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "compiled").symlink_to(shared, target_is_directory=True)


def pytest_configure(config: pytest.Config) -> None:
    """Profiles go to a folder of this run, never to the user's; what tests import and start inherits it.

    It is set before tests are collected, since modules of tests may open models.
    """
    cache = Path(tempfile.mkdtemp(prefix="selfspec-tests-"))
    patch = pytest.MonkeyPatch()
    patch.setenv("SELFSPEC_CACHE", str(cache))
    patch.setenv("OMP_NUM_THREADS", "1")  # which the command line leaves as it is
    config.add_cleanup(patch.undo)
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))  # which removes links, not what they lead to
    if HAS_COMPILER:
        share_compiled(cache, config.rootpath)


@pytest.fixture(scope="session", autouse=True)
def compiled_library(request: pytest.FixtureRequest) -> None:
    """Compiled now, or found compiled, so that no test hears of it; one process compiles, others wait."""
    session = request.session
    if not HAS_COMPILER or all(item.get_closest_marker("gpu") for item in session.items):  # those compile no C++
        return
    try:
        with FileLock(session.config.rootpath / COMPILED / ".lock"):
            compiler.library()
    except NoCompilerError as problem:
        session.shouldfail = str(problem)  # else every test would repeat it, or quietly run another engine
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from skip_without_compiler())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from skip_without_compiler())


def skip_without_compiler() -> Generator[None, Any, Any]:
    """What only the compiled engine can show is not shown on a machine without a compiler, and the reason is given."""
    try:
        return (yield)
    except NoCompilerError as problem:
        if HAS_COMPILER:
            raise
        pytest.skip(str(problem))
