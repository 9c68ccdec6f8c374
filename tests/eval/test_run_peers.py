"""Other decoders as methods: the model is restored, and llama.cpp decodes the same weights."""

from __future__ import annotations

import json

import pytest

from eval import figures
from eval.__main__ import main
from eval.answers import Failure, Prompt, Skipped
from eval.decoders import LlamaCpp, Transformers
from eval.methods import FORMS, parse_method
from eval.models import gguf_file, open_llm
from selfspec.model.gguf_blocks import BlockWeight
from tests.eval.models import tiny_llm
from tests.gguf_files import source_model, write_gguf


def prompt(ids, num_tokens=8):
    return Prompt(1, 0, "", list(ids), num_tokens, 0)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, source_model())
    return path


def test_method_names_are_parsed():
    assert parse_method("fixed:4,6").settings == {"policy": "fixed", "exit_layer": 4, "num_speculative_tokens": 6}
    assert parse_method("adaptive:exit+copies").settings == {"policy": "adaptive", "drafters": ("exit", "copies")}
    assert parse_method("transformers:assistant:a:b").option == "a:b" and not parse_method("transformers").is_ours
    assert parse_method("llama.cpp:a.gguf") == ("llama.cpp:a.gguf", "llama.cpp", "a.gguf")
    for form in FORMS:
        if not form[-1].isupper():
            assert parse_method(form).name == form


@pytest.mark.parametrize("name", ["transformers", "transformers:early_exit:2", "transformers:prompt_lookup:3"])
def test_transformers_methods_restore_the_model_even_after_a_timeout(name):
    llm = tiny_llm()
    model = llm.target.split.model
    before, layers = model.generation_config, model.config.num_hidden_layers
    method = Transformers(llm, parse_method(name), frozenset(), 0.0, 60.0)
    turn = method(prompt([5, 6, 7]))
    assert len(turn.tokens) == sum(turn.accept_lengths) == 8 and len(turn.step_seconds) == len(turn.accept_lengths)
    method.limit = 1e-9
    with pytest.raises(Failure, match="stopped after"):
        method(prompt([5, 6, 7]))
    assert model.generation_config is before and model.config.num_hidden_layers == layers


def test_transformers_computes_with_float32_weights_of_a_file_of_blocks(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "blocks.gguf", source_model(), "Q8_0")
    llm = open_llm(str(tmp_path / "blocks.gguf"))
    model = llm.target.split.model
    blocks = [weight for weight in model.parameters() if isinstance(weight, BlockWeight)]
    honest, held = type(model).generate, []

    def generate(*given, **options):
        held.append([weight.held is not None for weight in blocks])
        return honest(*given, **options)

    monkeypatch.setattr(type(model), "generate", generate)
    method = Transformers(llm, parse_method("transformers"), frozenset(), 0.0, 60.0)
    turn = method(prompt([5, 6, 7]))
    assert len(turn.tokens) == 8 and len(held) == 1 and blocks and all(held[0]), "none is dequantised at every token"
    assert not any(weight.held is not None for weight in blocks)


def test_llama_cpp_on_float32_weights_gives_the_tokens_of_plain_decoding(gguf, tmp_path, monkeypatch, capsys):
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(figures, "speedup_by_category", lambda summary: None)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.jsonl").write_text('{"turns": ["abc def"]}\n{"turns": ["the other one"]}\n')
    (tmp_path / "own.yaml").write_text("questions: own.jsonl\nmax_new_tokens: 12\nresamples: 5\nwarmups: 0\n")
    options = ["--model", str(gguf), "--methods", "plain", "llama.cpp", "--output", str(tmp_path / "out")]
    assert main(["run", str(tmp_path / "own.yaml"), *options, "--ignore-eos"]) == 0
    (check,) = json.loads((tmp_path / "out" / "summary.json").read_text())["check"]
    assert (check["method"], check["num_compared"], check["num_different"]) == ("llama.cpp", 2, 0)
    assert check["is_other_arithmetic"] and "computes with other arithmetic" in capsys.readouterr().out
    for line in (tmp_path / "out" / "answers" / "llama.cpp.jsonl").read_text().splitlines():
        choice = json.loads(line)["choices"][0]
        assert choice["new_tokens"] == [12] and choice["accept_lengths"] == [1] * 12
        assert 0 < sum(choice["step_seconds"][0]) <= choice["wall_time"][0]


def test_llama_cpp_stops_at_its_time_limit(gguf):
    pytest.importorskip("xllamacpp")
    method = LlamaCpp(str(gguf), parse_method("llama.cpp"), 256, frozenset(), 0.0, 1e-6)
    with pytest.raises(Failure, match=r"stopped after|no token within"):
        method(prompt(range(5)))
    method.limit = 60.0
    assert len(method(prompt(range(5))).tokens) == 8
    method.close()


def test_llama_cpp_is_skipped_where_it_cannot_run(tmp_path, monkeypatch):
    def skipped(model, name="llama.cpp", temperature=0.0):
        with pytest.raises(Skipped) as caught:
            LlamaCpp(model, parse_method(name), 64, frozenset(), temperature, 1.0)
        return str(caught.value)

    assert "'demo' is none" in skipped("demo") and "'no.gguf' is none" in skipped("demo", "llama.cpp:no.gguf")
    assert "only decode greedily" in skipped("demo", temperature=0.5)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert "cannot open" in skipped(str(broken))
    monkeypatch.setattr("eval.decoders.find_spec", lambda name: None)
    assert "pip install xllamacpp" in skipped("smollm2")
    assert gguf_file("demo") is None and gguf_file(str(broken)) == broken
