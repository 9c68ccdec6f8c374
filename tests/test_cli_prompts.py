"""JSON-lines files as other systems write them."""

from __future__ import annotations

import pytest

from selfspec.cli.failure import Failure
from selfspec.cli.prompts import parse_lines


def test_a_byte_order_mark_and_windows_line_ends_are_read_over():
    made = parse_lines("prompts.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [prompt.text for prompt in made] == ["a", "b"]


def test_json_nested_without_end_is_refused_with_its_line():
    deep = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(Failure, match=r"^prompts\.jsonl, line 2: not valid JSON"):
        parse_lines("prompts.jsonl", b'{"prompt": "a"}\n' + deep)
