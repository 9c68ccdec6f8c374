"""`selfspec cache`: what is listed and removed is what selfspec wrote; engines that nobody loads go by themselves."""

from __future__ import annotations

import json
import os
import time

import pytest

from selfspec import cached
from tests.cli_fixtures import assert_refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "body-1.so").write_bytes(bytes(2_000_000))
    (tmp_path / "profiles" / "costs").mkdir(parents=True)
    (tmp_path / "profiles" / "costs" / "1.json").write_bytes(bytes(500))
    (tmp_path / "notes.txt").write_text("of somebody else", encoding="utf-8")
    return tmp_path


def age(path, days):
    for one in [path, *path.rglob("*")]:
        os.utime(one, (time.time() - days * cached.DAY,) * 2)


def test_kinds_sizes_and_names_are_listed(folder, run):
    done = run("cache")
    assert done.code == 0
    first, *rest = done.out.splitlines()
    assert first == str(folder)
    assert any("2.0 MB" in line and "body-1.so" in line for line in rest)
    assert "costs" in done.out and "notes.txt" not in done.out
    listed = json.loads(run("cache", "list", "profiles", "--json").out)
    assert [(one["kind"], one["bytes"]) for one in listed["entries"]] == [("profiles", 500)]


def test_what_is_cleared_is_of_the_kind_that_was_asked_for(folder, run):
    assert "removed 1 entries, 2.0 MB" in run("cache", "clear", "compiled").out
    assert (folder / "profiles" / "costs").exists() and not (folder / "compiled" / "body-1.so").exists()
    assert run("cache", "clear").code == 0
    assert not (folder / "profiles" / "costs").exists() and (folder / "notes.txt").exists()
    assert_refused(run("cache", "clear", "everything"), 2, "everything")


def test_engines_that_nobody_loads_any_more_are_removed(folder):
    age(folder, 31)
    cached.remove_unused()
    assert (folder / "compiled" / "body-1.so").exists()
    (folder / "compiled" / "body-2.so").write_bytes(b"")
    age(folder / "compiled" / "body-1.so", 29)
    cached.remove_unused()
    assert (folder / "compiled" / "body-1.so").exists() and (folder / "profiles" / "costs").exists()
    age(folder / "compiled" / "body-1.so", 31)
    cached.remove_unused()
    assert [path.name for path in (folder / "compiled").iterdir()] == ["body-2.so"]


def test_without_a_folder_nothing_is_listed_and_nothing_fails(tmp_path, monkeypatch, run):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "none"))
    cached.remove_unused()
    assert run("cache").out.splitlines() == [str(tmp_path / "none")]
    assert "removed 0 entries" in run("cache", "clear").out
