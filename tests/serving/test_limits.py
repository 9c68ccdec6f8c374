"""Limits and faults: full queues, deadlines, clients that go or read slowly, draining, and errors of the engine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from selfspec import SamplingParams, SpeculativeConfig
from selfspec.decoding.outputs import CompletionOutput, RequestOutput
from selfspec.serving.app import create_app
from selfspec.serving.calls import Call
from selfspec.serving.config import ServerConfig
from selfspec.serving.loop import EngineLoop
from selfspec.serving.metrics import Metrics
from selfspec.serving.run import DrainingServer, bound
from tests.helpers import Always
from tests.serving.server import PATIENCE, Clock, Gate, asked, eventually, serving, speaker
from tests.serving.test_protocol import events, refused


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


def is_idle(served):
    return served.metric("vllm:num_requests_running") == served.metric("vllm:num_requests_waiting") == 0


def test_a_full_queue_says_when_to_come_back_and_recovers(pool):
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1, max_waiting_requests=2) as served:
        texts = [pool.submit(served.text, "x", max_tokens=4)]
        assert gate.reached.wait(PATIENCE)
        texts += [pool.submit(served.text, "x", max_tokens=4) for _ in range(2)]
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 3)  # the first one's program has not ended
        answer = served.complete("x", max_tokens=4)
        refused(answer, 429, "let", "wait")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        gate.open()
        assert len({text.result() for text in texts}) == 1
        assert served.metric("vllm:admission_rejections_total", reason="queue_full") == 1
        assert served.text("x", max_tokens=4) == texts[0].result()


def test_prompt_tokens_that_wait_are_bounded_too(pool):
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1, max_waiting_tokens=30) as served:
        first = pool.submit(served.text, "x" * 20, max_tokens=2)
        assert gate.reached.wait(PATIENCE)
        second = pool.submit(served.text, "x" * 200, max_tokens=2)  # alone it may be longer than what may wait
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 2)
        refused(served.complete("x" * 20, max_tokens=2), 429, "220 prompt tokens wait")
        gate.open()
        assert first.result() is not None and second.result() is not None


def test_what_can_never_fit_is_refused_and_what_is_promised_is_served():
    with serving(speaker(), max_num_seqs=2, max_num_cached_tokens=128, max_waiting_requests=2) as served:
        assert served.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128
        refused(
            served.complete("x" * 128), 400, "maximum context length", param="prompt", code="context_length_exceeded"
        )
        refused(served.complete(["x"] * 5), 400, "at most 4 outputs", param="prompt")
        told = served.complete("x" * 100, max_tokens=100, ignore_eos=True).json()
        assert (told["usage"]["total_tokens"], told["choices"][0]["finish_reason"]) == (128, "length")
        several = served.complete(["x" * 100, "x"], max_tokens=60, ignore_eos=True, return_token_ids=True).json()
        assert [len(one["token_ids"]) for one in several["choices"]] == [28, 60]


def test_places_that_are_given_up_for_want_of_memory_are_counted(pool, monkeypatch):
    monkeypatch.setattr("selfspec.serving.server.CHAT_TOKENS", 16)
    with serving(speaker(), max_num_seqs=2, max_num_cached_tokens=512) as served:
        answers = list(pool.map(lambda text: served.chat(text, ignore_eos=True).json(), ("one", "other")))
        assert [answer["usage"]["total_tokens"] for answer in answers] == [512, 512]
        assert served.metric("vllm:num_preemptions_total") >= 1


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 1}, {"max_num_seqs": 3}, {"max_model_len": 77}])
def test_max_model_len_is_served_whatever_the_batch(sizes):
    with serving(speaker(), **sizes) as served:
        most = served.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert most == sizes.get("max_model_len", 512)
        answer = served.complete([5] * (most - 3), max_tokens=3, ignore_eos=True)
        assert answer.json()["usage"] | {"total_tokens": most} == answer.json()["usage"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_model_len": 513}, "max_model_len must be at most 512, the model's context"),
        ({"max_model_len": 200, "max_num_cached_tokens": 128}, "max_model_len must be at most max_num_cached_tokens"),
        ({"max_model_len": 250, "max_num_cached_tokens": 254}, "max_num_cached_tokens must hold"),
    ],
)
def test_a_length_that_cannot_be_promised_is_refused_at_the_start(sizes, words):
    with pytest.raises(ValueError, match=words), bound("127.0.0.1", 0) as at:
        DrainingServer(speaker(), ServerConfig(**sizes), at).run()


def test_the_smallest_cache_holds_a_default_completion():
    with serving(speaker(), max_num_seqs=16, max_num_cached_tokens=64) as served:
        assert served.complete("x" * 40).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_meets_its_deadline_and_its_place_is_free(pool, monkeypatch, stream):
    clock, gate = Clock(monkeypatch), Gate()
    with serving(speaker(gate), max_num_seqs=1, request_timeout=60) as served:
        late = pool.submit(served.complete, max_tokens=500, ignore_eos=True, stream=stream)
        gate.let(9)
        eventually(lambda: served.metric("vllm:generation_tokens_total") == 9)
        clock.now += 61
        gate.open()
        if stream:
            *chunks, last = events(late.result())
            assert chunks and last["error"]["code"] == "timeout"
        else:
            refused(late.result(), 504, "longer than the server allows")
        assert served.complete("x", max_tokens=3).status_code == 200
        assert served.metric("selfspec_request_errors_total", status="504") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place_at_the_next_program(stream):
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1) as served:
        with asked(served, prompt="x", max_tokens=500, ignore_eos=True, stream=stream) as client:
            gate.let(9)
            eventually(lambda: served.metric("vllm:generation_tokens_total") == 9)
            assert not stream or client.recv(1)
        eventually(lambda: served.metric("vllm:request_success_total", finished_reason="abort") == 1)
        gate.open()
        eventually(lambda: is_idle(served))
        assert served.metric("vllm:generation_tokens_total") <= 10
        assert served.complete("x", max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_waits_and_goes_away_leaves_the_queue(pool, stream):
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1) as served:
        first = pool.submit(served.text, "x", max_tokens=4)
        assert gate.reached.wait(PATIENCE)
        with asked(served, prompt="x", stream=stream):
            eventually(lambda: served.metric("vllm:num_requests_waiting") == 2)
        eventually(lambda: served.metric("vllm:request_success_total", finished_reason="abort") == 1)
        gate.open()
        assert first.result() is not None
        eventually(lambda: is_idle(served))
        assert served.metric("vllm:generation_tokens_total") == 4


def test_a_stream_that_waits_ends_with_its_client_on_servers_that_leave_noticing_to_the_application():
    """Since version 2.4 of the ASGI HTTP specification, starlette alone notices at the next piece."""
    body, gate = b'{"prompt": "x", "stream": true}', Gate()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": headers}
    app = create_app(speaker(gate), ServerConfig(max_num_seqs=1))

    async def scene():
        received, gone = iter([{"type": "http.request", "body": body}]), asyncio.Event()

        async def receive():
            for message in received:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            gone.set()  # after the answer's head

        dispatcher = app.state.server.dispatcher
        await dispatcher.start()
        try:
            dispatcher.submit(Call("long", [[1]], SamplingParams(max_tokens=500, ignore_eos=True), 512, 9e9))
            asking = asyncio.create_task(app(scope, receive, send))
            while not asking.done():
                gate.let(1)
                await asyncio.sleep(0.001)
            assert dispatcher.num_open == 1  # the long one, which holds the only place
        finally:
            gate.open()
            await dispatcher.stop()

    asyncio.run(scene())


def test_a_client_that_goes_away_before_the_last_program_ends_is_counted_once():
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1) as served:
        with asked(served, prompt="x", max_tokens=1):
            assert gate.reached.wait(PATIENCE)
        eventually(lambda: served.metric("vllm:request_success_total", finished_reason="abort") == 1)
        gate.open()
        eventually(lambda: is_idle(served))
        assert served.text("x", max_tokens=1) is not None
        assert served.metric("vllm:request_success_total", finished_reason="length") == 1
        assert served.metric("vllm:e2e_request_latency_seconds_count") == 1


def test_a_slow_reader_holds_up_nobody_and_gets_all_of_its_text():
    llm = speaker()
    with serving(llm, max_num_seqs=2) as served:
        with asked(served, prompt="x", max_tokens=450, ignore_eos=True, stream=True, logprobs=20) as slow:
            assert slow.recv(1)
            [wanted] = llm.generate("neighbour", SamplingParams(max_tokens=30))
            assert served.text("neighbour", max_tokens=30) == wanted.outputs[0].text
            eventually(lambda: is_idle(served))  # the engine is done with the slow one, too
            received = b""
            while part := slow.recv(1 << 16):
                received += part
        assert b'"finish_reason":"length"' in received and received.rstrip().endswith(b"0") and b"[DONE]" in received


def test_what_a_reader_has_not_taken_is_put_together():
    """A stream holds at most one piece per output, however many programs have passed."""

    async def scene():
        call = Call("a", [[1]], SamplingParams(), 512, 9.0)
        for i in range(1000):
            call.add(0, RequestOutput("a", None, [1], [CompletionOutput(0, "x", [i])], False), float(i))
        [piece] = await anext(call.changes())
        assert (piece.text, piece.token_ids) == ("x" * 1000, list(range(1000)))

    asyncio.run(scene())


def test_told_to_stop_it_ends_what_runs_and_refuses_what_comes():
    gate, body = Gate(), {"prompt": "x", "max_tokens": 20, "stream": True, "temperature": 0}
    gate.let(5)
    with serving(speaker(gate), max_num_seqs=2) as served:
        with served.http.stream("POST", "/v1/completions", json=body) as one:
            lines = one.iter_lines()
            next(lines)
            served.stop()
            refused(served.complete(max_tokens=2), 503, "shuts down")
            assert served.http.get("/health").status_code == 503
            gate.open()
            rest = "\n".join(lines)
            assert '"finish_reason":"length"' in rest and "[DONE]" in rest
        with pytest.raises(httpx.TransportError):
            eventually(lambda: served.http.get("/health").status_code != 503, "the end")


def test_an_error_of_the_engine_fails_every_request_and_health(pool):
    gate = Gate()
    with serving(speaker(gate), max_num_seqs=1) as served:
        gate.let(4)
        assert served.complete(max_tokens=4).status_code == 200
        assert served.http.get("/health").status_code == 200
        several = [pool.submit(served.complete, max_tokens=9, stream=stream) for stream in (False, False, True)]
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 3)  # the first one's program has not ended
        gate.fail()
        *whole, stream = (answer.result() for answer in several)
        assert {answer.status_code for answer in whole} == {500}
        assert stream.status_code == 500 or "engine has stopped" in stream.text
        assert served.http.get("/health").status_code == 503
        refused(served.complete(), 503, "lost its engine")
        assert is_idle(served)


def test_an_error_in_one_request_is_its_own():
    """Its logits processor raises; the requests beside it go on to the same text."""

    def raises(ids, logits):
        raise ValueError("a processor fails")

    llm = speaker(Always(2, 3))
    [wanted] = llm.generate("abc", SamplingParams(max_tokens=20))
    delivered, ended = [], threading.Event()

    def take(news):
        delivered.append(news)
        if sum(output.finished for news in delivered for _, _, output, _ in news.outputs) == 2:
            ended.set()

    async def calls():  # they belong to an event loop
        bad = SamplingParams(max_tokens=20, logits_processors=raises)
        good = SamplingParams(max_tokens=20)
        return [
            Call(name, [[*wanted.prompt_token_ids]], params, 512, 9e9)
            for name, params in (("good", good), ("bad", bad), ("other bad", bad), ("fine", good))
        ]

    loop = EngineLoop(llm, Metrics("m"), take)
    loop.start(4, 4096)
    for call in asyncio.run(calls()):
        loop.submit(call)
    assert ended.wait(PATIENCE)
    loop.stop()
    texts = {"good": "", "fine": ""}
    for news in delivered:
        for call, _, output, _ in news.outputs:
            texts[call.name] += output.outputs[0].text
    assert set(texts.values()) == {wanted.outputs[0].text}
    failed = {call.name: refusal.status for news in delivered for call, refusal in news.failed}
    assert failed == {"bad": 500, "other bad": 500}


@pytest.mark.parametrize("end", ["late", "gone", "broken"])
def test_the_pieces_of_an_answer_that_is_read_whole_are_counted_where_it_never_ends(monkeypatch, end):
    clock, gate = Clock(monkeypatch), Gate()
    with serving(speaker(gate), max_num_seqs=1, request_timeout=60) as served:
        with asked(served, prompt="x", max_tokens=450, ignore_eos=True) as client:
            gate.let(9)
            eventually(lambda: served.metric("vllm:generation_tokens_total") == 9)
            if end == "late":
                clock.now += 61
                gate.open()
            if end == "broken":
                gate.fail()
            if end != "gone":
                assert client.recv(12) in (b"HTTP/1.1 500", b"HTTP/1.1 504")
        gate.open()
        eventually(lambda: served.metric("vllm:inter_token_latency_seconds_count") > 5)
        assert served.metric("vllm:time_to_first_token_seconds_count") == 1
        assert served.metric("vllm:e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize("streams", [False, True])
def test_programs_that_nobody_waits_for_are_told_together(streams):
    """A stream is told every program; of an answer read whole, beginning and end, and never too much at once."""
    gate = Gate()
    gate.open()
    llm = speaker(gate)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    [wanted] = llm.generate("abc", params)
    delivered, ended = [], threading.Event()

    def take(news):
        delivered.append(news)
        if any(output.finished for _, _, output, _ in news.outputs):
            ended.set()

    async def made():  # it belongs to an event loop
        return Call("a", [[*wanted.prompt_token_ids]], params, 512, 9e9, streams=streams)

    loop = EngineLoop(llm, Metrics("m"), take)
    loop.start(1, 2048)
    loop.submit(asyncio.run(made()))
    assert ended.wait(PATIENCE)
    loop.stop()
    told = [(output.outputs[0].token_ids, at) for news in delivered for _, _, output, at in news.outputs]
    assert [token for tokens, _ in told for token in tokens] == wanted.outputs[0].token_ids
    times = [at for _, at in told]
    assert times == sorted(times) and times[0] < times[-1]
    assert len(delivered) >= 400 if streams else len(delivered) < 9
    assert max(len(news.outputs) for news in delivered) <= 256


def test_logits_that_are_no_numbers_end_every_request():
    llm = speaker()
    with serving(llm, max_num_seqs=4) as served:
        wanted = served.text("x", max_tokens=8)
        weight = llm.target.model.lm_head.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        ways = [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}, {"logprobs": 3}, {"stream": True, "temperature": 1}]
        for way in ways:
            assert served.complete("x", max_tokens=8, **way).status_code == 200
        assert served.complete("x", max_tokens=1, echo=True, logprobs=1).status_code == 200
        with torch.no_grad():
            weight.copy_(kept)
        assert served.text("x", max_tokens=8) == wanted


def test_an_engine_that_cannot_be_made_is_an_error_of_the_start():
    llm = speaker().with_speculative(SpeculativeConfig(policy="fixed", exit_layer=99))
    with bound("127.0.0.1", 0) as at, pytest.raises(ValueError, match="exit_layer"):
        DrainingServer(llm, ServerConfig(), at).run()
