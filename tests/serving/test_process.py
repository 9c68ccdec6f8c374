"""`selfspec serve` as a process: what it says, signals, kill -9 and a start on the same port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cli_fixtures import TEMPLATE, assert_refused, save_model
from tests.serving.server import eventually

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds after which a test that hangs fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served"), template=TEMPLATE)


def test_without_the_extra_a_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("selfspec.cli.serve.PARTS", ("fastapi", "no_such_package"))
    assert_refused(run("serve", "demo"), 1, "no_such_package", "pip install 'selfspec[serve]'")


@pytest.mark.slow
def test_selfspec_imports_without_the_servers_packages():
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'prometheus_client', 'pydantic'): sys.modules[name] = None\n"
        "import selfspec.cli, selfspec.llm"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


WRONG = [("--port", 70000), ("--max-num-seqs", 0), ("--request-timeout", 0), ("--api-key", "")]
WRONG += [("--max-waiting-requests", -1), ("--max-body-bytes", 0), ("--served-model-name", "")]


@pytest.mark.parametrize(("option", "value"), WRONG)
def test_wrong_limits_are_refused_before_anything_is_loaded(run, option, value):
    assert_refused(run("serve", "demo", option, value), 2, option)


@pytest.mark.parametrize("least", [1, 64])
def test_a_cache_that_holds_no_request_is_refused_before_the_model_is_loaded(run, least):
    wanted = ("--max-num-cached-tokens must be a whole number of at least 64", f"got {least - 1}")
    assert_refused(run("serve", "/no/such/model", "--max-num-cached-tokens", least - 1), 2, *wanted)


def test_an_address_in_use_is_refused_before_the_model_is_loaded(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(run("serve", "/no/such/model", "--port", port), 2, "host and port", str(port), "choose others")


class Process:
    """A served model."""

    def __init__(self, folder, *options, port=0, **variables):
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, "-m", "selfspec", "serve", folder, "--port", port, "--backend", "views", *options]
        command += ["--policy", "fixed", "--served-model-name", "m"]
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True
        )
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("serving m "):
                break
        else:
            pytest.fail("".join(self.said))
        self.url = line.split(" at ")[1].strip()

    def end(self, which):
        self.process.send_signal(which)
        _, rest = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, rest


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_hides_prompts_and_ends_by_sigterm_when_its_requests_have(folder, request, replicas):
    """Replicas leave no process."""
    if replicas:
        request.getfixturevalue("local_ray")
    options = ("--replicas", replicas) if replicas else ()
    served = Process(folder, *options, SELFSPEC_API_KEY="key", SELFSPEC_MARK=str(folder))
    body = {"prompt": "a secret", "max_tokens": 200, "ignore_eos": True, "stream": True}
    assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 401
    headers = {"Authorization": "Bearer key"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        served.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    _, rest = served.process.communicate(timeout=PATIENCE)
    assert first.startswith("data: ") and '"finish_reason":"length"' in text and "[DONE]" in text
    assert served.process.returncode == 0
    assert "secret" not in rest and "Traceback" not in rest
    eventually(lambda: not processes_with(f"SELFSPEC_MARK={folder}"), "that Ray's processes had ended")


def processes_with(variable):
    """Processes that have inherited a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:  # it has ended, or is another user's
            pass
    return found


@pytest.mark.slow
def test_ctrl_c_ends_it_with_its_own_exit_code(folder):
    code, rest = Process(folder).end(signal.SIGINT)
    assert code == 130 and "Traceback" not in rest


@pytest.mark.slow
def test_killed_it_starts_again_on_the_same_port_and_gives_the_same_text(folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"prompt": "abc", "max_tokens": 30, "temperature": 0.8, "seed": 3}
    texts = []
    for _ in range(2):
        served = Process(folder, port=port)
        texts.append(
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]
        )
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE):
            served.end(signal.SIGKILL)
    assert texts[0] == texts[1]
