"""The load generator: arrivals, the client on a socket, and figures with vLLM's names."""

from __future__ import annotations

import sys
from math import inf

import numpy as np
import pytest

from eval.serve_client import Endpoint, model_of, send, server
from eval.serve_load import (
    Asked,
    Goal,
    Served,
    arrival_times,
    as_rows,
    figures_of,
    goodput,
    limits_of,
    output_lengths,
    parse_goals,
    random_prompts,
)
from tests.eval.openai_server import answer, chunk, serving

TWO = [Asked((1, 2, 3), 5), Asked("text", 4)]


def test_a_seed_gives_the_same_load_and_a_rate_only_scales_its_arrivals():
    slow, fast = arrival_times(50, 2.0, 0.5, seed=3), arrival_times(50, 10.0, 0.5, seed=3)
    assert slow == arrival_times(50, 2.0, 0.5, seed=3) != arrival_times(50, 2.0, 0.5, seed=4)
    assert np.allclose(np.array(slow) / 5, fast) and slow == sorted(slow)
    assert slow[0] == 0 and slow[-1] == pytest.approx(49 / 2)
    assert arrival_times(3, inf) == [0, 0, 0] and arrival_times(1, 2.0) == [0]
    assert output_lengths(9, (3, 5), 1) == output_lengths(9, (3, 5), 1)
    assert set(output_lengths(99, (3, 5), 1)) == {3, 4, 5}
    prompts = random_prompts(20, (2, 6), 10, seed=1)
    assert prompts == random_prompts(20, (2, 6), 10, seed=1) and {len(p) for p in prompts} == {2, 3, 4, 5, 6}
    assert max(max(p) for p in prompts) < 10


@pytest.mark.parametrize("shape", [1.0, 0.25, 4.0])
def test_gaps_have_the_coefficient_of_variation_of_their_shape(shape):
    gaps = np.diff(arrival_times(20_000, 1.0, shape))
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_client_streams_requests_and_counts_tokens_by_usage(is_chat):
    with serving() as (url, asked):
        assert model_of(url, {}) == "tiny"
        endpoint = Endpoint(url, "tiny", is_chat, fields={"seed": 5})
        asks = [Asked("hello", 5), Asked("text", 4)] if is_chat else TWO
        served = send(endpoint, asks, [0.0, 0.05])
    assert [(one.num_prompt, one.num_output, one.error) for one in served] == [(7, 5, ""), (7, 4, "")]
    assert [len(one.deliveries) for one in served] == [3, 2]  # chunks with tokens: no comment, role, or usage
    assert served[1].sent >= 0.05 and all(one.sent < one.deliveries[0] <= one.deliveries[-1] for one in served)
    (path, body), (_, other) = sorted(asked, key=lambda pair: -len(str(pair[1])) if not is_chat else str(pair[1]))
    assert path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    for one in (body, other):
        assert one["stream"] and one["stream_options"] == {"include_usage": True} and one["ignore_eos"]
        assert (one["model"], one["temperature"], one["seed"]) == ("tiny", 0, 5)
    if is_chat:
        assert body["messages"] == [{"role": "user", "content": "hello"}]
    else:
        assert [1, 2, 3] in (body["prompt"], other["prompt"]) and "text" in (body["prompt"], other["prompt"])


def refused(body):
    yield chunk(error={"message": "out of memory"})


def cut_off(body):
    yield from list(answer(body))[:2]


def empty(body):
    yield "data: [DONE]\n\n"


def broken(body):
    yield "data: {\n\n"


@pytest.mark.parametrize(
    ("events", "error"),
    [(refused, "out of memory"), (cut_off, "without usage"), (empty, "no token"), (broken, "JSONDecodeError")],
)
def test_a_bad_stream_is_an_error_of_its_request(events, error):
    with serving(events) as (url, _):
        (one,) = send(Endpoint(url, "tiny"), TWO[:1], [0.0])
    assert error in one.error


def test_a_refusal_and_a_server_that_is_gone_are_errors():
    with serving(status=429) as (url, _):
        (one,) = send(Endpoint(url, "tiny"), TWO[:1], [0.0])
        assert one.error.startswith("429: ") and "no" in one.error
    (one,) = send(Endpoint(url, "tiny"), TWO[:1], [0.0])
    assert one.error.startswith("ConnectError")
    with pytest.raises(ValueError, match="names no model"):
        model_of(url, {})


def test_a_request_without_an_end_fails_after_its_time():
    def endless(body):
        yield ": nothing\n\n" * 3
        release.wait(20)

    import threading

    release = threading.Event()
    with serving(endless) as (url, _):
        (one,) = send(Endpoint(url, "tiny", seconds=0.2), TWO[:1], [0.0])
        release.set()
    assert one.error == "no complete answer in 0.2 seconds"


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_and_stopped(tmp_path):
    import httpx

    with server([sys.executable, "-c", SERVER, "{port}"], tmp_path / "log", 30) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health", trust_env=False)


def test_a_server_that_ends_is_refused_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)", "{port}"]
    with (
        pytest.raises(ValueError, match=r"ended with code 3: .*no such model"),
        server(command, tmp_path / "log", 30),
    ):
        pass


def test_figures_are_those_of_the_times():
    served = [
        Served(0.0, (0.5, 0.7, 1.5), 10, 11),
        Served(1.0, (1.1,), 20, 1),
        Served(1.5, (), 0, 0, "gone"),
        Served(2.0, (2.2, 4.0), 30, 10),
    ]
    found = figures_of(served)
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 4.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 22)
    assert (found["request_throughput"], found["output_throughput"]) == (0.75, 5.5)
    assert found["total_token_throughput"] == 20.5
    assert found["p50_ttft_ms"] == pytest.approx(200) and found["mean_ttft_ms"] == pytest.approx(800 / 3)
    assert found["mean_tpot_ms"] == pytest.approx((100 + 200) / 2)  # a single token has none
    assert found["mean_itl_ms"] == pytest.approx((200 + 800 + 1800) / 3)
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([1500, 100, 2000], 99))
    rows = as_rows(served)
    assert goodput(rows, 4.0, {}) == 0.75
    assert goodput(rows, 4.0, {"ttft": 250.0, "tpot": 150.0}) == 0.25  # only the single token


def test_objectives_are_milliseconds_or_multiples_of_a_reference():
    goals = parse_goals(["ttft:500", "tpot:2.5x"])
    assert goals == [Goal("ttft", 500, False), Goal("tpot", 2.5, True)]
    assert limits_of(goals, {"p50_tpot_ms": 8.0}) == {"ttft": 500, "tpot": 20}
    for wrong in ("ttft", "ttft:0", "ttft:x", "tpot:-1x", "tpot:nan"):
        with pytest.raises(ValueError, match="goodput: t"):
            parse_goals([wrong])
    with pytest.raises(ValueError, match="'itl' is unknown"):
        parse_goals(["itl:5"])
