"""What is done before a server listens leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from selfspec import SamplingParams
from selfspec.decoding.engine import LLMEngine
from selfspec.serving.warm_up import warm_up
from tests.helpers import Always
from tests.serving.server import serving, speaker


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_engine_is_as_it_was(prefix_cache):
    policy = Always(2, 3)
    llm = speaker(policy, prefix_cache=prefix_cache)
    engine = llm.engine(max_num_seqs=3)
    warm_up(engine)
    assert engine.num_running == engine.num_waiting == engine.num_pages_in_use == engine.prefix_cache_hits == 0
    assert engine.cache.num_free_pages == engine.cache.num_pages and not policy.seen
    assert all(not torch.any(one) for layer in engine.cache.storages for one in layer)
    engine.add_request("a", "Hello", SamplingParams(max_tokens=9))
    text = ""
    while engine.has_unfinished_requests():
        text += "".join(output.outputs[0].text for output in engine.step())
    [wanted] = llm.generate("Hello", SamplingParams(max_tokens=9))
    assert text == wanted.outputs[0].text


@pytest.mark.parametrize("warm", [True, False])
def test_a_server_warms_up_where_it_is_not_told_otherwise(monkeypatch, warm):
    sizes, own = [], LLMEngine.step

    def step(engine, *given):
        sizes.append(engine.num_running + engine.num_waiting)
        return own(engine, *given)

    monkeypatch.setattr(LLMEngine, "step", step)
    with serving(speaker(), max_num_seqs=5, warm_up=warm) as served:
        assert (max(sizes, default=0) == 5) == warm
        assert served.metric("vllm:generation_tokens_total") == 0
