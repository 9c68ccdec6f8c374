"""The harness's model class writes what `generate` writes, with stop strings, alone and in batches."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from transformers import StoppingCriteria

from eval.quality.harness import model_class
from selfspec.hub import open_model
from tests.slow import slow

TEXTS = ["def f(x):\n    return", "import os\n", "class A:\n    def __init__(self):\n", "x = [1, 2,"]


class StopText(StoppingCriteria):
    """As the harness's `MultiTokenEOSCriteria`: it remembers rows, and looks back over a few tokens only."""

    def __init__(self, text, tokenizer, prompt_length, batch_size):
        self.text, self.tokenizer, self.prompt_length = text, tokenizer, prompt_length
        self.done_tracker = [False] * batch_size
        self.length = len(tokenizer.encode(text, add_special_tokens=False)) + 2

    def __call__(self, input_ids, scores, **kwargs):
        tails = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :][:, -self.length :])
        for row, done in enumerate(self.done_tracker):
            if not done:
                self.done_tracker[row] = self.text in tails[row]
        return False not in self.done_tracker


class StubHFLM:
    """What of lm_eval 0.4's `HFLM` the subclass relies on."""

    def __init__(self, pretrained, tokenizer, batch_size=1):
        self.model, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        criteria = [StopText(text, self.tokenizer, context.shape[1], context.shape[0]) for text in stop]
        return self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=criteria,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            do_sample=False,
            **generation_kwargs,
        )


@pytest.fixture(scope="module")
def opened():
    model, tokenizer = open_model("demo")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    return model, tokenizer


@pytest.fixture
def base(monkeypatch):
    """The harness's class where it is installed, else the stub."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lm_eval.models.huggingface"].HFLM = StubHFLM
        return StubHFLM
    return HFLM


@pytest.mark.filterwarnings("default")  # the harness's own
@pytest.mark.parametrize(("batch", "settings"), [(1, {"exit_layer": 4, "num_draft_tokens": 6}), (4, {})])
@pytest.mark.parametrize("stop", [slow(["\n\n"]), ["self.", "):"]])
def test_outputs_are_those_of_the_harness_and_are_speculated(opened, base, batch, settings, stop):
    model, tokenizer = opened
    theirs = base(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    ours = model_class()(pretrained=model, tokenizer=tokenizer, batch_size=batch, **settings)
    assert isinstance(ours, base)
    ended = 0
    for start in range(0, len(TEXTS), batch):
        inputs = tokenizer(TEXTS[start : start + batch], return_tensors="pt", padding=True)
        prompts, given = inputs["input_ids"], {"attention_mask": inputs["attention_mask"]}
        length = prompts.shape[1] + 24
        wanted = theirs._model_generate(prompts, length, stop, **given)
        made = ours._model_generate(prompts, length, stop, **given)
        if batch == 1:  # of several, theirs run on until all have met the same stop string, and are cut later
            assert made.tolist() == wanted.tolist()
        texts = [tokenizer.batch_decode(out[:, prompts.shape[1] :]) for out in (made, wanted)]
        assert [cut(text, stop) for text in texts[0]] == [cut(text, stop) for text in texts[1]]
        ended += sum(cut(text, stop) != text for text in texts[1])
        if settings:  # the default policy decides by measured time, and may well stay plain
            assert ours.speculate.stats.num_draft_tokens > 0
    assert ended


def cut(text, stops):
    """As the harness cuts an output: at the first of its stop strings."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def test_without_the_harness_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.models.huggingface", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'lm_eval\[hf\]'"):
        model_class()
