"""A small server on a socket that answers as OpenAI's API does, and does as its handler says where it should fail."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chunk(**content):
    return f"data: {json.dumps(content)}\n\n"


def answer(body, tokens_per_chunk=2):
    """The events of a good stream of `max_tokens` tokens, several in a chunk."""
    chat = "messages" in body
    count = body["max_completion_tokens"] if chat else body["max_tokens"]
    yield ": a comment\n\n"
    if chat:
        yield chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    for start in range(0, count, tokens_per_chunk):
        text = "ab " * min(tokens_per_chunk, count - start)
        end = "length" if start + tokens_per_chunk >= count else None
        part = {"delta": {"content": text}} if chat else {"text": text}
        yield chunk(choices=[{"index": 0, **part, "finish_reason": end}])
    yield chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": count})
    yield "data: [DONE]\n\n"


@contextmanager
def serving(events=answer, status=200):
    """Run it; yields its URL and the list of the requests' (path, body), which grows.

    Args:
        events: makes the events of a stream from a request's body.
        status: of every answer to a completion.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, json.dumps({"data": [{"id": "tiny"}]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if status != 200:
                self._send(status, '{"error": {"message": "no"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in events(body):
                self.wfile.write(event.encode())
                self.wfile.flush()

        def _send(self, code, text):
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
