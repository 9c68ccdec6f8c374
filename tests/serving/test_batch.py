"""`selfspec batch`: answers are the library's, bad lines are error lines, and what was stopped is gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.serving.batch_files import _row
from tests.cli_fixtures import TEMPLATE, assert_refused, save_model
from tests.serving import replica
from tests.serving.server import speaker

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds after which a test that hangs fails
MANY = 200  # lines: it has not answered all of them when it is stopped after the third
PLAIN = ("--policy", "plain", "--backend", "views", "--served-model-name", "m")
DRAFTS = ("--exit-layer", 2, "--num-speculative-tokens", 3, *PLAIN[2:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("batched"), template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", backend="views", speculative=SpeculativeConfig(policy="plain"))


def written(file, lines):
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def read(file):
    """Answers by id; each is there once."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers)
    return by_id


def text_of(answer):
    assert answer["error"] is None and answer["response"]["status_code"] == 200, answer
    body = answer["response"]["body"]
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    [choice] = body["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def sampled(name, **body):
    return {"custom_id": name, "body": {"prompt": f"prompt {name}", "temperature": 0.9, "max_tokens": 12, **body}}


def test_lines_of_every_shape_get_the_librarys_texts(run, folder, llm, tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "prompt": "Hello", "max_tokens": 20, "temperature": 0.8, "seed": 5}
    lines = [
        {"custom_id": "whole", "method": "POST", "url": "/v1/completions", "body": body},
        {"id": 7, "prompt": "x", "max_tokens": 9, "temperature": 0},
        {"prompt": [72, 105], "max_tokens": 4, "temperature": 0},
        {
            "custom_id": "chat",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, "max_tokens": 6, "temperature": 0},
        },
        {"custom_id": "response", "input": "Hi", "max_output_tokens": 6, "temperature": 0},
    ]
    done = run("batch", folder, "--input", written(tmp_path / "in", lines), "--output", tmp_path / "out", *DRAFTS)
    assert done.code == 0 and "5 lines answered, 0 of them with an error; 0 were before" in done.err
    texts = {name: text_of(answer) for name, answer in read(tmp_path / "out").items()}
    whole = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    asked = [("Hello", whole), ("x", SamplingParams(max_tokens=9)), ([72, 105], SamplingParams(max_tokens=4))]
    wanted = [llm.generate(prompt, params)[0].outputs[0].text for prompt, params in asked]
    wanted.append(llm.chat(messages, SamplingParams(max_tokens=6))[0].outputs[0].text)
    wanted.append(wanted[-1])
    assert texts == dict(zip(("whole", "7", "line-3", "chat", "response"), wanted, strict=True))
    assert [_row(answer)["text"] for answer in read(tmp_path / "out").values()] == [*texts.values()]


def test_a_bad_line_is_an_error_line_and_the_others_are_answered(run, folder, tmp_path):
    good = {"custom_id": "good", "prompt": "x", "max_tokens": 2}
    lines = [
        "no json", "[]", "", {"custom_id": {}, "prompt": "x"}, {"body": 3}, {"url": "/v1/embeddings", "body": {}}, good,
        good, {"custom_id": "streams", "prompt": "x", "stream": True},
        {"custom_id": "field", "prompt": "x", "functions": [{}]}, {"model": "other"},
    ]  # fmt: skip
    done = run("batch", folder, "--input", written(tmp_path / "in", lines), "--output", tmp_path / "out", *PLAIN)
    answers = read(tmp_path / "out")
    assert done.code == 1 and "10 lines answered, 9 of them with an error" in done.err
    text_of(answers.pop("good"))
    words = {
        "line-1": "not valid JSON", "line-2": "must be an object, got list", "line-4": "custom_id must be",
        "line-5": "body must be an object", "line-6": "url must be", "line-8": "custom_id 'good' is that of line 7",
        "streams": "stream must be false",
    }  # fmt: skip
    for name, word in words.items():
        answer = answers.pop(name)
        assert word in answer["error"]["message"] and answer["response"] is None
    assert {name: answer["response"]["status_code"] for name, answer in answers.items()} == {
        "field": 400,
        "line-11": 400,
    }


def test_a_batch_goes_on_where_it_was_stopped(run, folder, tmp_path):
    lines = [sampled(str(number)) for number in range(6)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("batch", folder, "--input", written(tmp_path / "in", lines), "--output", whole, *PLAIN)
    first, second, third, *_ = whole.read_bytes().splitlines(keepends=True)
    parts.write_bytes(first + second + third[:20])  # as a full disk leaves it
    done = run("batch", folder, "--input", tmp_path / "in", "--output", parts, *PLAIN)
    assert "4 lines answered" in done.err and "2 were before" in done.err
    texts = [{name: text_of(answer) for name, answer in read(file).items()} for file in (whole, parts)]
    assert texts[0] == texts[1] and len(set(texts[0].values())) == 6  # samples of their own, without a seed
    before = parts.read_bytes()
    assert "0 lines answered" in run("batch", "no-model", "--input", tmp_path / "in", "--output", parts).err
    assert parts.read_bytes() == before


def test_failed_lines_are_asked_again(run, folder, tmp_path):
    file, answers = tmp_path / "in", tmp_path / "out"
    call = ("batch", folder, "--input", file, "--output", answers, *PLAIN)
    written(file, [{"custom_id": "a", "prompt": "x", "max_tokens": -5}, sampled("b"), "{"])
    done = run(*call)
    assert done.code == 1 and "3 lines answered, 2 of them with an error" in done.err
    [kept] = [line for line in answers.read_bytes().splitlines() if b'"custom_id":"b"' in line]
    written(file, [{"custom_id": "a", "prompt": "x", "max_tokens": 5}, sampled("b"), {"prompt": "y"}])
    done = run(*call)
    assert done.code == 0 and "2 lines answered, 0 of them with an error; 1 were before" in done.err
    lines = answers.read_bytes().splitlines()
    assert len(lines) == 3 and lines[0] == kept and read(answers).keys() == {"a", "b", "line-3"}
    assert not (tmp_path / "out.new").exists()


def test_an_output_of_something_else_is_left_alone(run, folder, tmp_path):
    file, notes = written(tmp_path / "in", [sampled("a")]), written(tmp_path / "notes", ["my notes"])
    assert_refused(run("batch", folder, "--input", file, "--output", notes, *PLAIN), 2, "line 1 is no answer")
    assert notes.read_text() == "my notes\n"
    assert_refused(
        run("batch", folder, "--input", tmp_path / "none", "--output", notes), 2, "--input", "does not exist"
    )


def test_parquet_in_and_out(run, folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    lines = [sampled(str(number)) for number in range(3)]
    rows = [{"prompt": "x", "max_tokens": 3, "body": None}, {"prompt": None, "max_tokens": None, "body": "{"}]
    rows += [{"custom_id": line["custom_id"], "body": json.dumps(line["body"])} for line in lines]
    columns = ("custom_id", "prompt", "max_tokens", "body")
    table = pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
    parquet.write_table(table, tmp_path / "in.parquet")
    run("batch", folder, "--input", written(tmp_path / "in.jsonl", lines), "--output", tmp_path / "out.jsonl", *PLAIN)
    wanted = {name: text_of(answer) for name, answer in read(tmp_path / "out.jsonl").items()}
    for _ in range(2):  # the second time nothing is left to do
        run("batch", folder, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out.parquet", *PLAIN)
        made = {row["custom_id"]: row for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()}
        assert {name: row["text"] for name, row in made.items() if name in wanted} == wanted
        assert len(made) == 5 and made["line-1"]["status_code"] == 200
        assert "not valid JSON" in json.loads(made["line-2"]["error"])["message"]


def process(folder, lines, output, *options):
    command = [sys.executable, "-m", "selfspec", "batch", folder, "--input", lines, "--output", output, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopped_in_the_middle_a_batch_gives_each_id_once(folder, llm, tmp_path, which, code):
    lines = [sampled(str(number), max_tokens=60, ignore_eos=True, seed=number) for number in range(MANY)]
    file, output, few = written(tmp_path / "in", lines), tmp_path / "out", (*PLAIN, "--max-num-seqs", 2)
    first = process(folder, file, output, *few)
    end = time.monotonic() + PATIENCE
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    first.send_signal(which)
    _, told = first.communicate(timeout=PATIENCE)
    num_before = output.read_bytes().count(b"\n")
    assert first.returncode == code and b"Traceback" not in told and 3 <= num_before < MANY
    second = process(folder, file, output, *few)
    _, told = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0 and f"{num_before} were before".encode() in told
    texts = {name: text_of(answer) for name, answer in read(output).items()}
    for number in (0, 1, 20, MANY - 1):
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=number)
        assert texts[str(number)] == llm.generate(f"prompt {number}", params)[0].outputs[0].text
    assert set(texts) == {str(number) for number in range(MANY)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_batch_on_two_actors_is_that_of_one_process(run, local_ray, folder, tmp_path):
    lines = written(tmp_path / "in", [*(sampled(str(number)) for number in range(12)), "no object"])
    found = []
    for name, options in (("one", ()), ("two", ("--replicas", 2))):
        done = run("batch", folder, "--input", lines, "--output", tmp_path / name, *PLAIN, *options)
        assert done.code == 1 and "13 lines answered, 1 of them with an error" in done.err, done.err
        answers = read(tmp_path / name)
        assert answers.pop("line-13")["error"] is not None
        found.append({own: text_of(answer) for own, answer in answers.items()})
    assert found[0] == found[1] and len(found[0]) == 12
    done = run("batch", tmp_path / "none", "--input", lines, "--output", tmp_path / "three", "--replicas", 1, "-q")
    assert done.code == 1 and "a replica failed" in done.err and "Traceback" not in done.err, done.err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_a_killed_actor_did_is_done_again(local_ray, tmp_path):
    from selfspec.serving.batch import UNLIMITED, answer_on_ray
    from selfspec.serving.batch_files import Line
    from selfspec.serving.config import ServerConfig

    body = {"max_tokens": 30, "temperature": 1.1, "ignore_eos": True}
    lines = [Line(at, str(at), "/v1/completions", {"prompt": f"x{at}", "seed": at, **body}) for at in range(12)]
    answers = []

    def write(answer):
        answers.append(answer)
        if len(answers) == 3:
            os.kill(int(min(file.name for file in tmp_path.iterdir())), signal.SIGKILL)

    made = partial(replica.make_worker, tmp_path), ServerConfig(max_num_seqs=2, **UNLIMITED)
    answer_on_ray(made, lines, write, 2, 2, "cpu")
    params = [SamplingParams(seed=at, **body) for at in range(12)]
    wanted = speaker().generate([f"x{at}" for at in range(12)], params)
    found = {int(answer["custom_id"]): text_of(answer) for answer in answers}
    assert len(answers) == 12 and [found[at] for at in range(12)] == [output.outputs[0].text for output in wanted]
    assert len(list(tmp_path.iterdir())) == 3  # processes were started
