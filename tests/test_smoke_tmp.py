import pytest
from tests.helpers import *
from tests.models import tiny
from selfspec.core import SamplingParams
@pytest.mark.parametrize("backend", ["views", "compiled"])
@pytest.mark.parametrize("policy", ["plain", "adaptive", Schedule(0, 4), Adversary(1, 4), Always(2, 3, num_rounds=5)])
def test_it(backend, policy):
    target, prompts = tiny("llama", backend=backend), make_prompts((12, 1, 20), 1)
    done = decode(target, prompts, policy, SamplingParams(max_tokens=16, logprobs=2), audit=audit_cache)
    assert tokens_of(done) == [generate(target.model, p, 16) for p in prompts]
