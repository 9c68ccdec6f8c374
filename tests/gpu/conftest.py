"""What tests of a device have in common."""

import pytest

from selfspec.kernels import compiler


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """No C++ is compiled here: a device does not need it, and its machine may have four minutes for all tests."""
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
