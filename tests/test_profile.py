"""Profiles: saved and reloaded, never torn, and nothing on the disk can make a run fail."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from selfspec.calibrate import profile
from selfspec.control.costs import Costs, Table
from tests.models import build, tiny
from tests.target import Target

ROWS = (1, 2, 4, 8, 16, 32)


def some_costs(scale=1.0, num_layers=4, rows=ROWS):
    one = Table((1, 2, 3), (scale, 2 * scale, 3 * scale))
    rounds = {r: Table((1, 2), (scale * (3 + r), scale * (4 + 2 * r))) for r in rows}
    return Costs(num_layers, rounds, {1: one, 8: one.scaled(3)}, one, context=one.scaled(1 / 7), shadow_picks=one)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def split():
    return tiny("llama").split


@pytest.fixture
def fake(monkeypatch):
    """Measuring is instant, and every measurement is noted."""
    done = []

    def measure(split, batch_sizes=(1,)):
        done.append(tuple(batch_sizes))
        return some_costs(num_layers=split.num_layers, rows=tuple(sorted({1, *batch_sizes})))

    monkeypatch.setattr(profile, "measure", measure)
    return done


def notices(caplog):
    assert all(record.name == "selfspec" and record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


# ------------------------------------------------------------------------------------------------------------ place


def test_the_environment_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile.folder() == tmp_path / "own" / "profiles"
    monkeypatch.setenv("SELFSPEC_CACHE", "~/here")
    assert profile.folder() == Path("~/here").expanduser() / "profiles"
    monkeypatch.setenv("SELFSPEC_CACHE", "")
    assert profile.folder() == tmp_path / "xdg" / "selfspec" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    if os.name == "posix":
        assert profile.folder() == tmp_path / ".cache" / "selfspec" / "profiles"


# ------------------------------------------------------------------------------------------------- there and back


def test_costs_come_back_equal_in_a_file_that_people_can_read(cache, split, caplog):
    assert profile.read_costs(split) is None
    costs = some_costs(1 / 3)
    path = profile.save_costs(split, costs)
    assert profile.read_costs(split) == costs
    assert [path] == list(cache.iterdir()) and path.name.startswith("costs-")
    content = json.loads(path.read_text("utf-8"))
    key = content["key"]
    assert (key["architecture"], key["num_layers"], key["dtype"]) == ("LlamaForCausalLM", 4, "float32")
    assert (key["schema"], key["torch"], key["threads"]) == (profile.SCHEMA, torch.__version__, torch.get_num_threads())
    assert content["costs"]["rounds"]["1"]["1"] == costs.plain_round(1) and "selfspec" in content["about"]
    assert notices(caplog) == []


def test_a_prior_comes_back_equal_and_belongs_to_the_weights(cache, split, caplog):
    assert profile.read_prior(split) is None
    prior = {"hits": [[1.5, 2], [3]], "name": "é", "none": None}
    path = profile.save_prior(split, prior)
    assert profile.read_prior(split) == prior and path.name.startswith("prior-")
    other = Target(build("llama", seed=1)).split
    assert profile.read_prior(other) is None
    assert profile.costs_key(other) == profile.costs_key(split)
    assert notices(caplog) == []


@pytest.mark.parametrize("bad", [{"a": float("nan")}, {"a": [float("inf")]}, {"a": {1, 2}}])
def test_a_prior_that_json_cannot_hold_is_refused_before_anything_is_written(cache, split, bad):
    with pytest.raises((ValueError, TypeError)):
        profile.save_prior(split, bad)
    assert not cache.exists()


# -------------------------------------------------------------------------------------------------------------- keys


def test_a_key_knows_what_changes_speed(split, monkeypatch):
    key = profile.costs_key(split)
    assert json.loads(json.dumps(key)) == key == profile.costs_key(Target(build("llama")).split)
    others = [
        Target(build("llama", intermediate_size=64)).split,
        Target(build("llama", num_hidden_layers=3)).split,
        Target(build("llama").bfloat16()).split,
        Target(build("llama"), check=False).split,  # by the views
        tiny("mistral").split,
    ]
    keys = [key, *map(profile.costs_key, others)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    keys.append(profile.costs_key(split))
    assert len({json.dumps(k, sort_keys=True) for k in keys}) == len(keys)


def test_a_prior_s_key_follows_weights_and_adapters_not_the_number_format(split):
    key = profile.prior_key(split)
    model = build("llama")
    assert profile.prior_key(Target(model.double()).split) == key
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    assert profile.prior_key(Target(model).split) != key


def test_an_adapter_has_keys_of_its_own(split):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    target = Target(wrapped)
    on = profile.costs_key(target.split), profile.prior_key(target.split)
    assert on[0] != profile.costs_key(split) and on[1] != profile.prior_key(split)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.add_(1.0)
    assert profile.costs_key(target.split) == on[0] and profile.prior_key(target.split) != on[1]


# ----------------------------------------------------------------------------------------------------- broken files


def costs_file(**changes):
    return {**some_costs().as_dict(), **changes}


BROKEN = {
    "empty": b"",
    "no JSON": b"{",
    "half a file": lambda text: text[: len(text) // 2],
    "not UTF-8": b'{"key": "\xff\xfe"}',
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "without costs": lambda text: edited(text, costs=None, drop=True),
    "without a key": lambda text: edited(text, key=None),
    "NaN": lambda text: edited(text, costs=costs_file(context=float("nan"))),
    "no time at all": lambda text: edited(text, costs=costs_file(rounds={"1": {"1": 0.0}})),
    "a table is missing": lambda text: edited(text, costs={k: v for k, v in costs_file().items() if k != "steps"}),
    "another number of layers": lambda text: edited(text, costs=costs_file(num_layers=5)),
    "another model": lambda text: edited(text, key={"schema": profile.SCHEMA, "num_layers": 4}),
    "an older schema": lambda text: edited(text, schema=profile.SCHEMA - 1),
    "an older torch": lambda text: edited(text, torch="1.0"),
}


def edited(text, drop=False, **changes):
    content = json.loads(text)
    for name, value in changes.items():
        (content if name in content else content["key"])[name] = value
        if drop:
            del content[name]
    return json.dumps(content).encode()


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_or_stale_file_is_measured_again_with_one_notice(cache, split, fake, caplog, damage):
    path = profile.save_costs(split, some_costs(2.0))
    path.write_bytes(damage(path.read_bytes()) if callable(damage) else damage)
    costs = profile.costs_of(split)
    [notice] = notices(caplog)
    assert str(path) in notice and "measuring again" in notice and "\n" not in notice
    assert fake == [(1,)] and profile.read_costs(split) == costs == some_costs(rows=(1,))
    assert list(cache.iterdir()) == [path] and len(notices(caplog)) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', lambda text: edited(text, prior=[1])])
def test_a_broken_prior_is_left_aside_with_one_notice(cache, split, caplog, damage):
    path = profile.save_prior(split, {"a": 1})
    path.write_bytes(damage(path.read_bytes()) if callable(damage) else damage)
    assert profile.read_prior(split) is None
    [notice] = notices(caplog)
    assert str(path) in notice and "starting without it" in notice


# ------------------------------------------------------------------------------------------------------ full, closed


def blocked_by_a_file(cache, monkeypatch):
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("not a folder", encoding="utf-8")


def blocked_by_a_folder(cache, monkeypatch):
    """Where the file should be stands a folder."""
    profile.path_of("costs", profile.costs_key(tiny("llama").split)).mkdir(parents=True)


def closed(cache, monkeypatch):
    """A folder that takes no new file, whoever runs the tests."""

    def refuse(path, mode="r", *arguments, plain=Path.open, **options):
        if "x" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return plain(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


@pytest.mark.parametrize("block", [blocked_by_a_file, blocked_by_a_folder, closed])
def test_where_nothing_can_be_written_costs_are_kept_in_memory_with_one_notice(cache, fake, caplog, monkeypatch, block):
    block(cache, monkeypatch)
    target = Target(build("llama"))
    assert target.costs() is target.costs() and fake == [(1,)]
    [notice] = notices(caplog)
    assert "SELFSPEC_CACHE" in notice and "\n" not in notice
    assert not cache.is_dir() or not [p for p in cache.iterdir() if p.name.startswith(".")]


def test_without_a_home_folder_nothing_is_kept(split, fake, monkeypatch, caplog):
    for name in ("SELFSPEC_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert profile.costs_of(split) == some_costs(rows=(1,))
    assert len(notices(caplog)) == 1 and "no home folder" in notices(caplog)[0]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(cache, split, monkeypatch, caplog, fails):
    path = profile.save_costs(split, some_costs(1.0))

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        assert profile.save_costs(split, some_costs(2.0)) is None
    assert "No space left" in notices(caplog)[0] and len(notices(caplog)) == 1
    assert list(cache.iterdir()) == [path] and profile.read_costs(split) == some_costs(1.0)


def test_ctrl_c_while_writing_leaves_no_file_behind(cache, split, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile.save_costs(split, some_costs())
    assert list(cache.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- writers


def write_often(seed, times=30):
    split = tiny("llama").split
    for i in range(times):
        assert profile.save_costs(split, some_costs(1.0 + seed + i)) is not None


def test_of_concurrent_writers_the_last_one_wins_and_no_reader_sees_half_a_file(cache, split, caplog):
    profile.save_costs(split, some_costs(0.5))
    writers = [threading.Thread(target=write_often, args=(100 * i,)) for i in range(4)]
    for writer in writers:
        writer.start()
    read = 0
    while any(writer.is_alive() for writer in writers) or not read:
        assert profile.read_costs(split) is not None
        read += 1
    assert profile.read_costs(split).plain_round(1) / 4 % 100 == 30  # each writer's last one
    assert len(list(cache.iterdir())) == 1 and notices(caplog) == []


# ------------------------------------------------------------------------------------------------------------ target


def test_a_target_measures_once_for_itself_and_all_after_it(cache, fake):
    target = Target(build("llama"))
    assert fake == []
    costs = target.costs()
    assert target.costs(1) is costs and fake == [(1,)]
    assert Target(build("llama", seed=3)).costs() == costs and fake == [(1,)]
    assert Target(build("llama"), check=False).costs() is not None and fake == [(1,), (1,)]  # another body


def test_larger_batches_are_measured_beside_what_is_known(cache, fake):
    target = Target(build("llama"))
    for batch_size, measured in [(1, (1,)), (3, (2, 4)), (4, None), (8, (8,)), (100, (16, 32)), (1000, None)]:
        known = len(fake)
        costs = target.costs(batch_size)
        assert fake[known:] == ([measured] if measured else [])
        assert max(costs.rounds) >= min(batch_size, 32)
    assert tuple(sorted(costs.rounds)) == ROWS
    assert profile.read_costs(target.split) == costs


@pytest.mark.parametrize("bad", [0, -1, 1.5, "8"])
def test_a_batch_size_is_a_whole_number(bad):
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        tiny("llama").costs(bad)


def test_costs_are_dropped_when_the_model_changes(cache, fake):
    target = Target(build("llama"))
    before = target.costs()
    target.model.double()
    target.generate([[5, 6]], max_tokens=2, policy="plain")
    assert target.costs() is not before and len(fake) == 2


def test_a_real_measurement_is_kept(cache):
    target = Target(build("llama"))
    costs = target.costs(2)
    assert sorted(costs.rounds) == [1, 2] and costs.num_layers == 4
    assert profile.read_costs(target.split) == costs
