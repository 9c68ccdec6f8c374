"""Two replicas on a local Ray give the same text, while one is killed or its engine fails."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier

import httpx
import openai
import pytest

from selfspec import SamplingParams
from selfspec.serving.config import ServerConfig
from selfspec.serving.replicas import options_of
from tests.cli_fixtures import assert_refused
from tests.serving.replica import make
from tests.serving.server import MODEL, speaker

PATIENCE = 600.0  # seconds after which a test that hangs fails; a replica imports torch when it starts
SESSIONS = [f"session {number}" for number in range(12)]
PROMPT, WAY = "Hä?", {"max_tokens": 150, "temperature": 1.1, "ignore_eos": True}


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """A folder with a file for each replica that was started, its process id in it."""
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def url(local_ray, marks):
    from selfspec.serving.replicas import replicated

    config = ServerConfig(model=MODEL, max_num_seqs=16, request_timeout=60.0)
    with replicated(partial(make, marks), config, 2, "127.0.0.1", 0, device="cpu") as made:
        yield made
    left = [int(file.read_text()) for file in marks.iterdir() if not file.name.startswith("break")]
    assert eventually(lambda: not any(map(is_alive, left)))


@pytest.fixture(scope="module")
def texts():
    """What the library generates for each session's seed."""
    llm = speaker()
    params = [SamplingParams(**WAY, seed=seed) for seed in range(len(SESSIONS))]
    return [output.outputs[0].text for output in llm.generate([PROMPT] * len(SESSIONS), params)]


def is_alive(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(holds):
    """What it came to, once it holds; a server that does not answer yet is asked again."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if found := holds():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail("it never came to hold")


def ask(url, at, num_tokens=150):
    """The replica that answered a session, and its text; None where it gave none."""
    body = {"prompt": PROMPT, **WAY, "seed": at, "max_tokens": num_tokens}
    headers = {"x-session-id": SESSIONS[at]}
    told = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    text = told.json()["choices"][0]["text"] if told.status_code == 200 else None
    return told.headers.get("x-replica-id"), text


def replicas_of_sessions(url):
    """Which replica answers each session, once there are two, all sessions are answered, and none moves any more."""

    def found():
        (names, told), (again, _) = (zip(*(ask(url, at, 1) for at in range(len(SESSIONS))), strict=True) for _ in "12")
        return names if None not in told and names == again and len(set(names)) == 2 else None

    return eventually(found)


def all_at_once(ask_one):
    with ThreadPoolExecutor(len(SESSIONS)) as threads:
        return list(threads.map(ask_one, range(len(SESSIONS))))


def test_options_that_several_processes_cannot_share_are_refused(run, tmp_path):
    for options in (("--learn", tmp_path), ("--device", "cuda:1"), ("--log-prompts",)):
        assert_refused(run("serve", "demo", "--replicas", 2, *options), 2, options[0])
    assert_refused(run("serve", "demo", "--replicas", 0), 2, "--replicas")
    for number in ((), ("--replicas", 3)):
        assert_refused(run("serve", "demo", *number, "--max-replicas", 2), 2, "--max-replicas must be at least")


@pytest.mark.filterwarnings("ignore")
def test_ray_serve_scales_by_the_requests_that_are_open_where_asked():
    config = ServerConfig(max_num_seqs=16, max_waiting_requests=100)
    fixed, scaled = options_of(config, 2), options_of(config, 2, 5)
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed and "num_replicas" not in scaled
    asked = scaled["autoscaling_config"]
    assert (asked["min_replicas"], asked["max_replicas"], asked["target_ongoing_requests"]) == (2, 5, 16)
    assert scaled["max_ongoing_requests"] > config.max_waiting_requests + 16
    if find_spec("ray") is not None:
        from ray import serve

        for options in (fixed, scaled):
            serve.deployment(type("Any", (), {}), **options)  # it refuses options that it does not know


def test_without_ray_a_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("selfspec.cli.serve.RAY_PARTS", ("no_such_package",))
    assert_refused(run("serve", "demo", "--replicas", 2), 1, "no_such_package", "pip install 'selfspec[ray]'")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestReplicas:
    def test_both_serve_the_librarys_text_and_a_session_stays_where_it_is(self, url, texts):
        before = replicas_of_sessions(url)
        assert all_at_once(lambda at: ask(url, at)) == list(zip(before, texts, strict=True))
        by_replica = {name: before.index(name) for name in set(before)}
        for name, at in by_replica.items():
            session = {"x-session-id": SESSIONS[at]}
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=session) as client:
                asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 150, "temperature": 1.1, "seed": at}
                asked["extra_body"] = {"ignore_eos": True}
                whole = client.completions.with_raw_response.create(**asked)
                assert whole.headers["x-replica-id"] == name and whole.parse().choices[0].text == texts[at]
                chunks = client.completions.create(**asked, stream=True)
                assert "".join(chunk.choices[0].text for chunk in chunks) == texts[at]
                with pytest.raises(openai.BadRequestError, match="functions"):
                    client.completions.create(**asked | {"extra_body": {"functions": [{}]}})

    def test_metrics_are_those_of_all_replicas(self, url):
        replicas_of_sessions(url)
        before = httpx.get(f"{url}/metrics").text
        assert before.count("# TYPE vllm:generation_tokens_total counter") == 1

        def sums():
            text = httpx.get(f"{url}/metrics").text
            lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
            return {re.search('replica="([^"]*)"', line)[1]: float(line.split()[-1]) for line in lines}

        old = sums()
        assert len(old) == 2
        all_at_once(lambda at: ask(url, at))
        eventually(lambda: sum(sums().values()) >= sum(old.values()) + 150 * len(SESSIONS))
        assert sums().keys() == old.keys()
        assert 'http_requests_total{handler="/v1/completions",method="POST",replica="' in before

    def test_one_is_killed_under_load(self, url, marks, texts):
        before = replicas_of_sessions(url)
        dead = before[0]
        all_run = Barrier(len(SESSIONS) + 1)

        def stream(at):
            """The text of a session, or None where the stream broke."""
            body = {"prompt": PROMPT, **WAY, "seed": at, "stream": True}
            chunks, headers = [], {"x-session-id": SESSIONS[at]}
            try:
                with httpx.stream(
                    "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE
                ) as answer:
                    lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
                    chunks.append(next(lines))
                    all_run.wait(PATIENCE)
                    chunks += lines
            except httpx.HTTPError:
                return None
            if chunks[-1] != "[DONE]" or any('"code":"replica_lost"' in chunk for chunk in chunks):
                return None
            return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])

        with ThreadPoolExecutor(len(SESSIONS)) as threads:
            running = [threads.submit(stream, at) for at in range(len(SESSIONS))]
            all_run.wait(PATIENCE)
            os.kill(int((marks / dead).read_text()), signal.SIGKILL)
            told = [one.result() for one in running]
        assert None in told
        for name, text, wanted in zip(before, told, texts, strict=True):
            assert text == wanted or (text is None and name == dead)
        for at, text in enumerate(told):
            if text is None:
                assert eventually(partial(answered, url, at)) == texts[at]
        self.nothing_goes_to(dead, url, texts)

    def test_one_whose_engine_fails_is_replaced(self, url, marks, texts):
        broken = replicas_of_sessions(url)[0]
        (marks / f"break-{(marks / broken).read_text()}").touch()
        assert ask(url, 0)[1] is None
        assert eventually(partial(answered, url, 0)) == texts[0]
        self.nothing_goes_to(broken, url, texts)

    @staticmethod
    def nothing_goes_to(dead, url, texts):
        after = replicas_of_sessions(url)
        assert dead not in after
        assert all_at_once(lambda at: ask(url, at)) == list(zip(after, texts, strict=True))


def answered(url, at):
    return ask(url, at)[1]
