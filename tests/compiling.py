"""A pytest plugin: where a session's profiles and its compiled C++ lie, and what happens where C++ cannot be compiled.

Profiles and priors go to a folder of the session. The compiled library is kept in `build/compiled` of the checkout,
under the name that selfspec gives it, a hash of the sources, the flags, the compiler and the processor. Later sessions
and other workers find it there.

Where there is no compiler, tests that need one are skipped. Where there is one and the build fails, the session fails.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from selfspec.errors import NoCompilerError
from selfspec.kernels import compiler

HAS_COMPILER = compiler.find_compiler() is not None  # asked before any test changes $CXX or $PATH


def share_compiled(cache: Path, root: Path) -> Path:
    """Let a cache folder find what was compiled for the checkout at `root`; returns the folder that is shared."""
    shared = root / "build" / "compiled"
    shared.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "compiled").symlink_to(shared, target_is_directory=True)
    return shared


@pytest.fixture(scope="session", autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles go to a folder of this run, never to the user's; processes that tests start inherit it."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")  # which the command line leaves as it is
        is_needed = not all(item.get_closest_marker("gpu") for item in request.session.items)  # those compile no C++
        if is_needed and HAS_COMPILER:
            load_library(request.session, cache)
        yield


def load_library(session: pytest.Session, cache: Path) -> None:
    """Compile the library, or find it compiled, so that no test hears of it; one process compiles, others wait."""
    shared = share_compiled(cache, session.config.rootpath)
    try:
        with FileLock(shared / ".lock"):
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
