"""lm-evaluation-harness with selfspec: log-likelihoods and texts equal those of its own model."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import AutoTokenizer

from eval.__main__ import main
from eval.models import open_llm
from tests.eval.models import save_model
from tests.slow import slow

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # the harness's own and those of what it imports

ROWS = [{"question": "def f(x):\n    return", "answer": "b"}, {"question": "import", "answer": "a"}]
TASK = """
task: own_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
WRITES = """
output_type: generate_until
generation_kwargs: {until: ["x"], do_sample: false, max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSES = """
output_type: multiple_choice
doc_to_choice: ["a", "b"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = "~"  # the harness asks for one
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with two small tasks."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for kind, more in (("writes", WRITES), ("chooses", CHOOSES)):
        (tmp_path / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, more=more))
    return str(tmp_path)


def request(*arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def both(folder):
    """The harness's model and ours, with the same weights."""
    from lm_eval.models.huggingface import HFLM

    from eval.harness import SelfSpecLM

    llm = open_llm(folder)
    model, tokenizer = llm.target.split.model, llm.tokenizer
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    return theirs, SelfSpecLM(model, tokenizer=tokenizer, batch_size=2, policy="fixed:2,3")


def test_log_likelihoods_are_those_of_the_harness(both):
    pairs = [request(*pair) for pair in (("abc", "de"), ("", "xyz"), ("some text ", "and its end"), ("q", "r"))]
    theirs, ours = (lm.loglikelihood(pairs, disable_tqdm=True) for lm in both)
    for (wanted, is_greedy), (found, ours_is_greedy) in zip(theirs, ours, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4) and ours_is_greedy == is_greedy
    texts = [request("x" * 300), request("two words")]  # the first is longer than the context
    theirs, ours = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in both)
    assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-5)


def test_texts_are_those_of_the_harness(both):
    asked = [
        request(context, {"until": until, "max_gen_toks": 12, "do_sample": False})
        for until in (["z"], ["a", "e"])
        for context in ("abc", "def f(x):", "q")
    ]
    theirs, ours = (lm.generate_until(asked, disable_tqdm=True) for lm in both)
    assert ours == theirs and any(len(text) < 12 for text in ours)


def test_the_command_scores_every_policy_and_finds_them_equal(folder, tasks, capsys):
    options = ["--model", folder, "--include-path", tasks, "--policies", "plain", "adaptive", "fixed:2,3"]
    assert main(["quality", "--tasks", "own_writes", "own_chooses", *options]) == 0
    *_, document = capsys.readouterr().out.strip().splitlines()
    found = json.loads(document)
    assert [row["policy"] for row in found["policies"]] == ["plain", "adaptive", "fixed:2,3"]
    assert all(row["num_different"] == 0 for row in found["policies"]) and found["num_requests"] == 4
    assert set(found["policies"][0]["scores"]["own_chooses"]) == {"acc,none"}


def test_texts_that_differ_are_counted_and_end_with_code_1(folder, tasks, capsys, monkeypatch):
    from eval import harness

    own = harness.SelfSpecLM.generate_until

    def generate_until(self, requests, **options):
        texts = own(self, requests, **options)
        return texts if self.settings["policy"] == "plain" else [text + "!" for text in texts]

    monkeypatch.setattr(harness.SelfSpecLM, "generate_until", generate_until)
    assert main(["quality", "--tasks", "own_writes", "--model", folder, "--include-path", tasks]) == 1
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["policies"][1]["num_different"] == 2


@pytest.mark.slow  # it looks through all of its tasks
def test_the_command_line_of_the_harness_knows_the_model(folder, tasks, capsys):
    arguments = ["--model", "selfspec", "--model_args", f"pretrained={folder},policy=plain", "--tasks", "own_writes"]
    before = sys.argv
    assert main(["quality", *arguments, "--include_path", tasks]) == 0
    assert "exact_match" in capsys.readouterr().out and sys.argv is before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        slow(["--tasks", "no_such_task"], "lm_eval has no task no_such_task"),
        (["--tasks", "own_writes", "--policies", "transformers"], "--policies takes methods of selfspec"),
        (["--tasks", "own_writes", "--run-code"], "HF_ALLOW_CODE_EVAL=1"),
        (["--tasks", "own_writes", "--model", "/no/such"], "there is no folder /no/such"),
        (["--tasks", "own_writes", "--batch-size", "0"], "batch_size must be a whole number of at least 1"),
    ],
)
def test_invalid_options_give_one_sentence(options, words, folder, tasks, capsys, monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    assert main(["quality", "--include-path", tasks, "--model", folder, *options]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_without_the_harness_one_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("eval.quality.find_spec", lambda name: None)
    assert main(["quality", "--tasks", "gsm8k"]) == 2
    assert "pip install 'lm_eval[hf]'" in capsys.readouterr().err
