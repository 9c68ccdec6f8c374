"""lm-eval's own client of completions gets the log-likelihoods that transformers' model gives it in its process."""

from __future__ import annotations

import json

import pytest
import torch

from selfspec import LLM, SamplingParams
from selfspec.hub import DEMO
from tests.serving.server import MODEL, serving

PAIRS = [
    ("def mean(values):", "\n    return sum(values) / len(values)"),
    ("import os", "\n\nimport sys"),
    ("class Stack:", "\n    def __init__(self):"),
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


QUESTIONS = ["for i in", "import os\n", "def f(x):\n    return"]
TASK = """
task: own_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
WRITES = """
doc_to_target: "{{answer}}"
output_type: generate_until
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSES = """
doc_to_target: "{{label}}"
output_type: multiple_choice
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_scores_of_local_completions_are_those_in_the_process(tmp_path, monkeypatch):
    pytest.importorskip("tenacity", reason="lm-eval's clients need it")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    llm = LLM("demo", device="cpu")
    rows = []
    for label, answer in enumerate(llm.generate(QUESTIONS, SamplingParams(max_tokens=12, stop="\n"))):
        text = answer.outputs[0].text
        rows.append({"question": QUESTIONS[label], "answer": text if label else "else", "label": int(label == 0)})
        rows[-1]["choices"] = [text or "x", "}}]"]  # the first one is likelier, and is not always the right one
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, more in (("writes", WRITES), ("chooses", CHOOSES)):
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, more=more))

    def evaluated(model, **options):
        tasks = {"tasks": ["own_writes", "own_chooses"], "task_manager": TaskManager(include_path=str(tmp_path))}
        found = simple_evaluate(model, **tasks, **options, bootstrap_iters=0)
        scores = [found["results"]["own_writes"]["exact_match,none"], found["results"]["own_chooses"]["acc,none"]]
        return scores, [sample["filtered_resps"] for sample in found["samples"]["own_writes"]]

    with serving(llm, max_num_seqs=4) as served:
        told = {"base_url": f"{served.url}/v1/completions", "model": MODEL, "tokenizer": str(DEMO)}
        told |= {"tokenizer_backend": "huggingface", "max_length": 512}
        scores, texts = evaluated("local-completions", model_args=told)
    assert (scores, texts) == evaluated(HFLM(pretrained=llm.target.model, tokenizer=llm.tokenizer))
    assert all(0 < score < 1 for score in scores)
