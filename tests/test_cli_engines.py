"""`--backend` at the command line: the same text by every engine, and its name beside the figures."""

from __future__ import annotations

import json

import pytest

from tests import cli_fixtures

run, model_folder = cli_fixtures.run, cli_fixtures.model_folder


def test_every_engine_writes_the_same_text_and_is_named(run, model_folder):
    start = ("generate", "--model", model_folder, "--json", "--max-tokens", 24, "--exit-layer", 1)
    documents = [json.loads(run(*start, "--backend", name, "hello there").out) for name in ("views", "compiled")]
    assert [document["engine"] for document in documents] == ["views", "compiled"]
    assert len({tuple(document["tokens"]) for document in documents}) == 1


@pytest.mark.parametrize("command", [("generate", "hello"), ("calibrate",)])
def test_engines_that_do_not_serve_the_model_are_one_sentence(run, model_folder, command):
    name, *rest = command
    model = [model_folder] if name == "calibrate" else ["--model", model_folder]
    done = run(name, *model, "--dtype", "float16", "--backend", "compiled", *rest)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(
        "selfspec: --backend 'compiled' serves Llama-shaped models in float32 or bfloat16 on CPU"
    )
    for unknown in ("turbo", "fused"):
        done = run(name, *model, "--backend", unknown, *rest)
        assert done.code == 2 and unknown in done.err and "views" in done.err
