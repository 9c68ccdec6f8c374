"""A wheel with the compiled engine decodes by it where there is no compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import selfspec
from selfspec.errors import NoCompilerError
from selfspec.kernels import compiler, prebuilt

ROOT = Path(__file__).parents[1]
PROMPT = "def add(a, b):\n"
DECODE = f"""
import json, selfspec
from selfspec.kernels import compiler
llm = selfspec.LLM("demo", backend="compiled")
[done] = llm.generate({PROMPT!r}, selfspec.SamplingParams(max_tokens=16, temperature=0))
print(json.dumps([compiler.library()._name, selfspec.__file__, done.outputs[0].token_ids]))
"""


def best_of(features, machine="x86_64"):
    return next(one.name for one in prebuilt.LIBRARIES if one.machine == machine and one.features <= features)


def test_the_fastest_library_that_the_processor_runs_is_taken(tmp_path, monkeypatch):
    by_name = {one.name: one for one in prebuilt.LIBRARIES}
    assert len(by_name) == len(prebuilt.LIBRARIES)
    for one in prebuilt.LIBRARIES:
        assert best_of(one.features, one.machine) == one.name
    assert best_of(by_name["avx2"].features | {"avx512f"}) == "avx2"
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "features", lambda: by_name["amx"].features)
    assert prebuilt.find() is None
    by_name["avx2"].file.touch()
    assert prebuilt.find() == by_name["avx2"].file
    by_name["avx512_vnni"].file.touch()
    assert prebuilt.find() == by_name["avx512_vnni"].file
    monkeypatch.setattr(prebuilt, "features", lambda: frozenset({"sse2"}))
    assert prebuilt.find() is None


def test_a_library_that_cannot_be_loaded_is_compiled_instead(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "avx2.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(prebuilt, "find", lambda: broken)
    made = compiler.library.__wrapped__()
    assert Path(made._name).parent.name == "compiled" and f"{broken} cannot be loaded" in caplog.text
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    with pytest.raises(NoCompilerError):
        compiler.library.__wrapped__()


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """The Python of an environment that has ziglang and hatchling: this one, or one that is made for the tests."""
    if all(map(importlib.util.find_spec, ("ziglang", "hatchling"))):
        return Path(sys.executable)
    venv.create(folder := tmp_path_factory.mktemp("builder"), with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--retries", "1", "--constraint", ROOT / "constraints.txt"]
    done = subprocess.run([*install, "ziglang", "hatchling"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ziglang and hatchling cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_a_wheel_decodes_by_its_engine_where_no_compiler_is_on_the_path(tmp_path, builder):
    machine, own = platform.machine(), prebuilt.features()
    name = next((one.name for one in prebuilt.LIBRARIES if one.machine == machine and one.features <= own), None)
    if name is None:
        pytest.skip("wheels hold no library for this processor")
    build = [builder, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(build, check=True, env={**os.environ, "SELFSPEC_WHEEL": name}, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    venv.create(fresh := tmp_path / "fresh", with_pip=True)
    python = fresh / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel], check=True, capture_output=True)
    [packages] = fresh.glob("lib/python*/site-packages")
    rest = Path(torch.__file__).parents[1]  # torch and the rest; the wheel's own come first
    (packages / "rest.pth").write_text(str(rest))
    (hidden := tmp_path / "hidden").mkdir()
    (hidden / "ziglang.py").touch()  # hides the package
    bare = {
        "PATH": "/nowhere",
        "PYTHONPATH": str(hidden),
        "SELFSPEC_CACHE": str(tmp_path / "cache"),
        "HOME": "/nowhere",
    }
    done = subprocess.run([python, "-c", DECODE], cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library, package, tokens = json.loads(done.stdout.splitlines()[-1])
    assert Path(library) == packages / "selfspec" / "kernels" / "prebuilt" / f"{name}.so"
    assert Path(package).is_relative_to(packages) and "compiling" not in done.stderr
    [wanted] = selfspec.LLM("demo", backend="compiled").generate(
        PROMPT, selfspec.SamplingParams(max_tokens=16, temperature=0)
    )
    assert tokens == list(wanted.outputs[0].token_ids)


ARM = [one for one in prebuilt.LIBRARIES if one.machine == "aarch64"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="the emulator qemu-aarch64 is not installed")
@pytest.mark.parametrize("library", ARM, ids=[one.name for one in ARM])
def test_products_are_right_on_aarch64_in_an_emulator(tmp_path, builder, library):
    kernels, flags = compiler.SOURCES, [flag for flag in prebuilt.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    sources = [ROOT / "tests" / "kernels" / "products.cpp", kernels / "body.cpp", kernels / "rows.cpp"]
    zig = [builder, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static", "-O2"]
    made = tmp_path / "products"
    command = [*zig, f"-mcpu={library.cpu}", *flags, f"-I{kernels}", *sources, "-o", made]
    subprocess.run(command, check=True)
    done = subprocess.run(["qemu-aarch64", made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
