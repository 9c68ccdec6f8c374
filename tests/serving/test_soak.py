"""Thousands of random requests: right ones, wrong ones, and clients that leave; every text is plain decoding's.

`SELFSPEC_SOAK_REQUESTS` says how many; the default takes about half a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from collections import Counter

import httpx
import pytest

from selfspec import SamplingParams, SpeculativeConfig
from tests.helpers import Schedule
from tests.serving.server import eventually, serving, speaker
from tests.serving.test_protocol import CHATS, WRONG

REQUESTS = int(os.environ.get("SELFSPEC_SOAK_REQUESTS", "500"))
CLIENTS = 24
WORDS = ["def ", "mean", "(values)", ":\n", "  return ", "abc", "Hä?", "\N{GRINNING FACE}", "0, 1, 2", " "]
ENDS = ["a", "\n", "e", " ", "\ufffd", "no such text", "q" * 10_000]
RAW = [  # what is no request; every one is answered, or its connection is closed
    b"GET /health HTTP/1.0\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\nConnection: close\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
]


class Dice(Schedule):
    """Any draft in any round, which it does not keep."""

    def observe(self, plan, rounds):
        pass


class Soak:
    """Clients of one server, and what they were told.

    Args:
        plain: the same model without drafts.
    """

    def __init__(self, served, plain):
        self.served, self.plain, self.kinds = served, plain, Counter()
        self.outputs = self.tokens = 0  # of requests that were answered to their end
        self.told = []  # (prompts, parameters, choices) that are still to be compared

    async def run(self, seeds):
        waiting = iter(seeds)

        async def client():
            async with httpx.AsyncClient(base_url=self.served.url, timeout=120) as http:
                for seed in waiting:
                    await self.ask(http, random.Random(seed))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def ask(self, http, dice):
        kind = dice.choices(["whole", "stream", "leaves", "wrong", "raw"], [40, 30, 15, 10, 5])[0]
        self.kinds[kind] += 1
        if kind == "raw":
            return await self.raw(dice.choice(RAW))
        if kind == "wrong":
            path, fields = dice.choice([("completions", one[0]) for one in WRONG] + [("chat/completions", CHATS[2][0])])
            body = json.dumps({"prompt": "Hello"} | fields if path == "completions" else fields)
            answer = await http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (answer.status_code, body)
            return None
        prompts, fields = self.request(dice)
        body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "return_token_ids": True, **fields}
        if kind == "whole":
            answer = await http.post("/v1/completions", json=body)
            while answer.status_code == 429:
                self.kinds["told to wait"] += 1
                await asyncio.sleep(0.05)
                answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, (answer.text, body)
            self.take(prompts, fields, answer.json()["choices"], answer.json()["usage"])
            return None
        return await self.stream(http, prompts, fields, body, dice.randint(0, 6) if kind == "leaves" else None)

    def request(self, dice):
        def prompt():
            text = "".join(dice.choices(WORDS, k=dice.randint(1, 12)))
            return self.plain.tokenizer(text)["input_ids"] if dice.random() < 0.3 else text

        first = prompt()
        prompts = [first]
        for _ in range(dice.choice([0, 0, 0, 1, 3])):
            other = prompt()
            prompts += [other] if isinstance(other, type(first)) else []
        fields = {"temperature": 0, "max_tokens": dice.choice([1, 2, 5, 16, 40, 100]), "seed": dice.randrange(1 << 40)}
        if dice.random() < 0.6:
            fields |= {"temperature": dice.choice([0.3, 1.0, 1.7]), "n": dice.choice([1, 1, 2, 4])}
            fields |= dice.choice([{}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}])
        more = [{"stop": dice.sample(ENDS, 2)}, {"stop_token_ids": [65, 66]}, {"presence_penalty": 1.5}]
        more += [{"logprobs": dice.randint(0, 3)}, {"speculative": False}, {"ignore_eos": True}]
        return prompts, fields | {name: value for one in more if dice.random() < 0.2 for name, value in one.items()}

    async def stream(self, http, prompts, fields, body, most):
        """`most`: chunks after which the client leaves; 0: it does not wait for the first; None: it stays."""
        count, parts = len(prompts) * fields.get("n", 1), {}
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            timeout = 0.005 if most == 0 else 120
            async with http.stream("POST", "/v1/completions", json=body, timeout=timeout) as answer:
                if answer.status_code == 429:
                    self.kinds["told to wait"] += 1
                    return
                assert answer.status_code == 200
                usage, taken = None, 0
                async for line in answer.aiter_lines():
                    if most is not None and taken >= most:
                        break
                    if not line or line == "data: [DONE]":
                        continue
                    chunk, taken = json.loads(line.removeprefix("data: ")), taken + 1
                    usage = chunk["usage"]
                    for piece in chunk["choices"]:
                        whole = parts.setdefault(piece["index"], {"index": piece["index"], "text": "", "token_ids": []})
                        whole["text"] += piece["text"]
                        whole["token_ids"] += piece["token_ids"]
                        whole["finish_reason"] = piece["finish_reason"]
        except httpx.TimeoutException:
            assert most == 0
            return
        if usage is not None and len(parts) == count:
            self.take(prompts, fields, list(parts.values()), usage)
        assert usage is not None or most is not None, parts

    async def raw(self, sent):
        url = httpx.URL(self.served.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(sent)
        if sent.endswith(b"{"):  # a body that never ends
            await asyncio.sleep(0.2)
        else:
            answer = await asyncio.wait_for(reader.read(), 60)
            assert not answer or (answer.startswith(b"HTTP/1.") and b" 50" not in answer.split(b"\r\n")[0]), answer
        writer.close()

    def take(self, prompts, fields, choices, usage):
        assert len(choices) == len(prompts) * fields.get("n", 1)
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
        self.outputs += len(choices)
        self.tokens += usage["completion_tokens"]
        self.told.append((prompts, fields, sorted(choices, key=lambda choice: choice["index"])))

    def compare(self):
        """With plain decoding, and forget."""
        names = {"speculative"}
        flat = [(prompt, fields) for prompts, fields, _ in self.told for prompt in prompts]
        params = [SamplingParams(**{k: v for k, v in fields.items() if k not in names}) for _, fields in flat]
        wanted = iter(self.plain.generate([prompt for prompt, _ in flat], params) if flat else ())
        for prompts, fields, choices in self.told:
            outputs = [output for _ in prompts for output in next(wanted).outputs]
            for output, choice in zip(outputs, choices, strict=True):
                assert choice["token_ids"] == output.token_ids, (prompts, fields)
                assert choice["text"] == output.text, (prompts, fields)
                assert choice["finish_reason"] == output.finish_reason, (prompts, fields)
        self.told.clear()


@pytest.mark.slow
def test_random_requests_get_plain_decodings_text_and_leave_nothing_behind():
    llm = speaker(Dice(0, 4), prefix_cache=True)
    plain = llm.with_speculative(SpeculativeConfig(policy="plain", reuse_responses=False))
    plain.max_num_seqs = 16
    with serving(llm, max_num_seqs=8, max_num_cached_tokens=2048, max_waiting_requests=60) as served:
        soak, memory = Soak(served, plain), []
        for first in range(0, REQUESTS, 250):
            asyncio.run(soak.run(range(first, min(first + 250, REQUESTS))))
            soak.compare()
            memory.append(_resident())
        eventually(lambda: served.metric("vllm:num_requests_running") == 0, "an empty batch")
        eventually(lambda: served.metric("vllm:kv_cache_usage_perc") == 0, "an empty cache")
        assert served.metric("vllm:num_requests_waiting") == 0
        reasons = {one: served.metric("vllm:request_success_total", finished_reason=one) for one in ("stop", "length")}
        assert sum(reasons.values()) >= soak.outputs
        assert served.metric("vllm:generation_tokens_total") >= soak.tokens
        statuses = range(500, 505)
        assert not any(served.metric("selfspec_request_errors_total", status=status) for status in statuses)
        assert served.http.get("/health").status_code == 200
    print(dict(soak.kinds), f"{soak.outputs} outputs, {soak.tokens} tokens; MiB resident {memory}")


def _resident():
    """MiB of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20
