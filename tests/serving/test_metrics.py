"""/metrics counts what happened, and the dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import Always
from tests.serving.server import serving, speaker

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
OTHERS = {  # which dashboards and rules for vLLM read
    "vllm:cache_config_info", "vllm:iteration_tokens_total", "vllm:num_preemptions_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds", "vllm:request_params_max_tokens", "vllm:request_params_n",
    "vllm:request_prefill_time_seconds",
}  # fmt: skip
NAME = re.compile(r"\b(?:vllm:|selfspec_)\w+")


@pytest.fixture(scope="module")
def asked():
    """A server that drafted with the second layer, some requests, and what they say of themselves."""
    with serving(speaker(Always(2, 3)), max_num_seqs=4) as served:
        told = []
        for prompt in ("abc", "abcabcabc", "Hello"):
            answer = served.complete(prompt, max_tokens=30, return_acceptance=True).json()
            told += [answer["usage"] | answer["selfspec"]["acceptance"][0]]
        served.complete(max_tokens=6, speculative=False)
        served.complete(top_p=7)
        yield served, told


def test_tokens_drafts_and_accepted_are_those_of_the_requests(asked):
    served, told = asked
    sums = {name: sum(one[name] for one in told) for name in told[0] if isinstance(told[0][name], int)}
    assert served.metric("vllm:generation_tokens_total") == sums["completion_tokens"] + 6
    assert served.metric("vllm:prompt_tokens_total") == sums["prompt_tokens"] + 5
    assert served.metric("vllm:spec_decode_num_drafts_total") == sums["num_spec_steps"] > 0
    assert served.metric("vllm:spec_decode_num_draft_tokens_total") == sums["num_draft_tokens"]
    assert served.metric("vllm:spec_decode_num_accepted_tokens_total") == sums["num_accepted_draft_tokens"] > 0
    histogram = sum((Counter(one["acceptance_histogram"]) for one in told), Counter())
    for position in range(3):
        reached = sum(n for accepted, n in histogram.items() if int(accepted) > position)
        assert served.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=position) == reached
    drafted = served.metric("selfspec_rounds_total", drafter="exit")
    assert drafted == served.metric("selfspec_exit_rounds_total", exit_layer=2) == sums["num_spec_steps"]
    assert served.metric("selfspec_rounds_total", drafter="plain") == sums["num_plain_steps"] + 6
    assert served.metric("selfspec_draft_length_sum") == sums["num_draft_tokens"]


def test_requests_are_counted_once_and_times_are_in_order(asked):
    served, _ = asked
    reasons = [served.metric("vllm:request_success_total", finished_reason=reason) for reason in ("length", "stop")]
    assert sum(reasons) == 4
    names = ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds")
    assert [served.metric(f"vllm:{name}_count") for name in names] == [4, 4, 4]
    queue, first, whole = (served.metric(f"vllm:{name}_sum") for name in names)
    assert 0 <= queue <= first <= whole
    assert served.metric("vllm:num_requests_running") == served.metric("vllm:num_requests_waiting") == 0
    assert served.metric("vllm:prefix_cache_queries_total") == served.metric("vllm:prompt_tokens_total")


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them(asked):
    served, _ = asked
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", served.http.get("/metrics").text, re.MULTILINE))
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    there = {name + end for name, kind in kinds.items() for end in ends.get(kind, ("",))}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    named = {name for panel in panels for one in panel["targets"] for name in NAME.findall(one["expr"])}
    assert named <= there, named - there
    others = {name for name in kinds if name.startswith("http_")} | OTHERS
    of_whom = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert {name for name in kinds if not name.endswith("_created")} - others <= of_whom | named
    assert len({panel["id"] for panel in panels}) == len(panels)
