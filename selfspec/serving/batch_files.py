"""Files of requests, and `Answers`, the file that `selfspec batch` writes and goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from zlib import crc32

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}  # by a field
Answer = dict[str, Any]


class Line(NamedTuple):
    """A request, or what is wrong with its line."""

    number: int
    custom_id: str
    url: str = ""
    body: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    problem: str | None = None

    def refused(self) -> Answer:
        """The answer to a line that asks for nothing."""
        error = {"code": "invalid_line", "message": self.problem}
        return {"id": f"batch_req_{self.number}", "custom_id": self.custom_id, "response": None, "error": error}


def read_lines(file: Path) -> Iterator[Line]:
    """The requests of a file of JSON lines, or of a Parquet file, as they are read.

    Those of OpenAI's batches have custom_id, url and body; others are bodies themselves, with an id if they like. What
    has none is called line-N. A line without a seed gets one that follows from its id, so that it has the same text
    every time.
    """
    seen = dict[str, int]()
    for number, found in enumerate(_rows(file), 1):
        if found is None:
            continue
        name = f"line-{number}"
        try:
            given = _object(found) if isinstance(found, bytes) else found
            if not isinstance(given, dict):
                raise ValueError(f"must be an object, got {type(given).__name__}")
            own = _id_of(given)
            if own in seen:
                raise ValueError(f"custom_id {own!r} is that of line {seen[own]}, too")
            name = own or name
            line = _parse(number, name, given)
        except (ValueError, RecursionError) as problem:
            line = Line(number, name, problem=str(problem))
        seen[name] = number
        yield line


def _rows(file: Path) -> Iterator[Any]:
    """Every line or row: an object, a line that is to be parsed, or None for a blank one."""
    if file.suffix != ".parquet":
        with file.open("rb") as stream:
            for raw in stream:
                yield raw if raw.strip() else None
        return
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        for rows in table.iter_batches(256):
            for row in rows.to_pylist():
                yield _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Columns that a row leaves out are nulls there."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _id_of(given: dict[str, Any]) -> str | None:
    """A line's own name, which is taken out of it."""
    name = given.pop("custom_id", given.pop("id", None))
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise ValueError(f"custom_id must be a text or an integer, got {json.dumps(name)}")
    return None if name is None else str(name)


def _parse(number: int, custom_id: str, given: dict[str, Any]) -> Line:
    body = given.get("body", given)
    if isinstance(body, str):  # as Parquet files have it, whose columns have one type each
        body = _object(body)
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, got {type(body).__name__}")
    url = given.get("url") if "body" in given else None
    url = url or next((route for name, route in ROUTES.items() if name in body), ROUTES["prompt"])
    if url not in ROUTES.values():
        raise ValueError(f"url must be one of {', '.join(ROUTES.values())}, got {json.dumps(url)}")
    if body.get("stream"):
        raise ValueError("stream must be false in a batch")
    if body.get("seed") is None:
        body["seed"] = crc32(custom_id.encode("utf-8", "surrogatepass"))
    return Line(number, custom_id, url, body)


def _object(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise ValueError(f"not valid JSON ({problem})") from None


class Answers:
    """A file of answers, a JSON line each, in the order in which they came. It can be resumed.

    The errors in it are taken out when it is opened again, so that those lines are asked again.

    A line is written at once, so that a process that is killed leaves whole lines; half a line at the end, as a full
    disk leaves it, is taken away when the file is opened again.

    Raises:
        OSError: it cannot be written, or another process writes it.
        ValueError: it has other lines than answers.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.done, self.num_failed = file, set[str](), 0
        self._stream = file.open("ab+", buffering=0)
        try:
            if fcntl is not None:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> None:
        kept, is_whole = list[bytes](), True
        with self.file.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                if not raw.endswith(b"\n"):
                    is_whole = False
                    break
                try:
                    answer = json.loads(raw)
                    name, has_failed = answer["custom_id"], _has_failed(answer)
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"line {number} is no answer of a batch") from None
                is_whole &= not has_failed
                if not has_failed:
                    self.done.add(name)
                    kept.append(raw)
        if not is_whole:
            self._rewrite(kept)

    def _rewrite(self, lines: list[bytes]) -> None:
        """Let the file have these lines alone, all at once."""
        other = self.file.with_name(self.file.name + ".new")
        stream = other.open("wb+", buffering=0)
        if fcntl is not None:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for line in lines:
            if stream.write(line) != len(line):
                raise OSError("the disk is full")
        other.replace(self.file)
        self._stream.close()
        self._stream = stream

    def write(self, answer: Answer) -> None:
        """Add an answer."""
        line = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
        if self._stream.write(line) != len(line):
            raise OSError("the disk is full")
        self.done.add(answer["custom_id"])
        self.num_failed += _has_failed(answer)

    def to_parquet(self, file: Path) -> None:
        """The same as a Parquet file: custom_id, text of the first output, status_code; response and error as JSON."""
        import pyarrow as pa
        from pyarrow import parquet

        from selfspec.files import write_whole

        names = {"custom_id": pa.string(), "text": pa.string(), "status_code": pa.int64()}
        schema = pa.schema(names | {"response": pa.string(), "error": pa.string()})

        def write(stream: Any) -> None:
            with self.file.open("rb") as lines, parquet.ParquetWriter(stream, schema) as table:
                for raw in lines:
                    table.write_table(pa.Table.from_pylist([_row(json.loads(raw))], schema))

        write_whole(file, write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


def _has_failed(answer: Answer) -> bool:
    return answer["error"] is not None or answer["response"]["status_code"] != 200


def _row(answer: Answer) -> dict[str, Any]:
    response = answer["response"] or {}
    body = response.get("body") or {}
    [first] = body.get("choices", body.get("output", [{}]))[:1]
    [part] = (first.get("content") or [{}])[:1]
    text = first.get("text", part.get("text") if "output" in body else first.get("message", {}).get("content"))
    row = {name: None if answer[name] is None else json.dumps(answer[name]) for name in ("response", "error")}
    return {"custom_id": answer["custom_id"], "text": text, "status_code": response.get("status_code"), **row}
