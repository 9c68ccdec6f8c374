"""lm-eval's own client of completions gets the log-likelihoods that transformers' model gives it in its process."""

from __future__ import annotations

import pytest
import torch

from selfspec import LLM
from selfspec.loading.names import DEMO
from tests.serving.server import MODEL, serving

PAIRS = [
    ("def mean(values):", "\n    return sum(values) / len(values)"),
    ("import os", "\n\nimport sys"),
    ("class SplitModel:", "\n    def __init__(self):"),
    ("for i in", " range(10):"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of lm-eval and what it brings
def test_log_likelihoods_through_lm_eval_are_those_of_the_model():
    pytest.importorskip("tenacity", reason="lm-eval's clients need it")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    llm = LLM("demo", device="cpu")
    with serving(llm, max_num_seqs=4) as served:
        client = LocalCompletionsAPI(
            base_url=f"{served.url}/v1/completions",
            model=MODEL,
            tokenizer=str(DEMO),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            batch_size=3,
            max_length=512,
        )
        asked = [Instance("loglikelihood", {}, pair, i, ("t", i, 1)) for i, pair in enumerate(PAIRS)]
        told = client.loglikelihood(asked)
        until = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
        [text] = client.generate_until([Instance("generate_until", {}, ("import", until), 0, ("t", 0, 1))])
    for (context, rest), (score, is_greedy) in zip(PAIRS, told, strict=True):
        before, whole = (llm.tokenizer(text)["input_ids"] for text in (context, context + rest))
        with torch.inference_mode():
            lines = llm.target.model(torch.tensor([whole])).logits[0, :-1].float().log_softmax(-1)[len(before) - 1 :]
        tail = torch.tensor(whole[len(before) :])
        assert score == pytest.approx(float(lines.gather(1, tail[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((lines.argmax(-1) == tail).all())
    assert text and "\n" not in text
