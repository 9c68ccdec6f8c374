"""Prompts from the command line, a pipe or a JSON-lines file, as text and as tokens; all are read before any is run."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli.failure import RUN, Failure

if TYPE_CHECKING:
    from selfspec.llm import LLM


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and what its line in the file says differently from the command line."""

    text: str
    id: str | int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    where: str = "prompt"  # how error messages call it


def read_prompts(text: str | None, file: str | None) -> list[Prompt]:
    """What to continue: one prompt, or a file of them."""
    if file is not None:
        prompts = parse_lines(file, _read_file(file))
        if not prompts:
            raise Failure(f'{file} holds no prompt; write one {{"prompt": "..."}} per line')
        return prompts
    if text is None and (sys.stdin is None or sys.stdin.isatty()):
        raise Failure("a prompt is missing; give one, for example: selfspec generate 'def main():'")
    if text is None or text == "-":
        text = _decode(_stdin(), "stdin").removesuffix("\n")
    return [Prompt(_checked(text, "prompt"), id=0)]


def parse_lines(name: str, data: bytes) -> list[Prompt]:
    """Every line of a JSON-lines file; blank lines are skipped, any other must be right."""
    made: list[Prompt] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        where = f"{name}, line {number}"
        text = _decode(line, where)
        if text.strip():
            made.append(_parse(text, where, len(made)))
    return made


def _parse(line: str, where: str, index: int) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise Failure(f"{where}: not valid JSON ({problem}); every line must be one object with a prompt") from None
    if not isinstance(found, dict):
        raise Failure(f'{where}: must be an object such as {{"prompt": "..."}}, got {type(found).__name__}')
    unknown = sorted(set(found) - {"prompt", "id", "max_tokens", "seed"})
    if unknown:
        raise Failure(f"{where}: unknown key {unknown[0]!r}; allowed are prompt, id, max_tokens and seed")
    if not isinstance(found.get("prompt"), str):
        raise Failure(f"{where}: prompt must be a text, got {json.dumps(found.get('prompt'))}")
    if not isinstance(found.get("id", ""), str | int) or isinstance(found.get("id"), bool):
        raise Failure(f"{where}: id must be a text or an integer, got {json.dumps(found['id'])}")
    limit = _integer(found, "max_tokens", where, 1, 1 << 63)
    seed = _integer(found, "seed", where, -(1 << 63), 1 << 63)
    return Prompt(_checked(found["prompt"], f"{where}: prompt"), found.get("id", index), limit, seed, where)


def _integer(found: dict[str, Any], key: str, where: str, least: int, beyond: int) -> int | None:
    if key not in found:
        return None
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < beyond:
        wanted = "at least 1" if least == 1 else "of 64 bits"
        raise Failure(f"{where}: {key} must be an integer {wanted}, got {json.dumps(value)}")
    return value


def _checked(text: str, where: str) -> str:
    if not text:
        raise Failure(f"{where} is empty; give at least one character to continue")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Failure(f"{where} is not valid UTF-8; give it in that encoding") from None
    return text


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise Failure(f"{where}: not valid UTF-8 (byte {problem.start + 1}); convert it to UTF-8 first") from None


def _read_file(name: str) -> bytes:
    try:
        return _stdin() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as problem:
        raise Failure(
            f"--prompts {name} cannot be read ({problem.strerror}); give a JSON-lines file, or '-' for stdin"
        ) from None


def _stdin() -> bytes:
    return sys.stdin.buffer.read()


def read_lines() -> Iterator[str]:
    """Lines of a pipe or file on stdin, as they come, stripped."""
    if sys.stdin is not None:
        for line in sys.stdin.buffer:
            yield _decode(line, "stdin").strip()


def has_template(llm: LLM, model: str) -> bool:
    """Whether there is a chat template; refuses a model without a tokenizer."""
    if llm.tokenizer is None:
        raise Failure(
            f"{model} has no tokenizer, so it cannot read text; save one in its folder, or choose another", RUN
        )
    return bool(llm.tokenizer.chat_template)


def tokenize(prompts: Sequence[Prompt], llm: LLM, system: str | None, is_chat: bool) -> list[list[int]]:
    """Token ids of every prompt; each is known to fit into the context. A template writes its special tokens itself."""
    from selfspec.loading import hub

    made, context_limit = list[list[int]](), llm.target.split.context_limit
    for prompt in prompts:
        if is_chat:
            ids = chat_ids(llm, [*system_message(system), {"role": "user", "content": prompt.text}])
        else:
            with hub.quiet():
                ids = list(llm.tokenizer(prompt.text)["input_ids"])
        if len(ids) >= context_limit:
            raise Failure(
                f"{prompt.where} has {len(ids)} tokens and the model's context holds {context_limit}; "
                f"shorten it by at least {len(ids) - context_limit + 1}"
            )
        made.append(ids)
    return made


def system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def chat_ids(llm: LLM, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the next answer begins."""
    from selfspec.loading import hub

    try:
        with hub.quiet():
            return llm.chat_prompt(messages)
    except ValueError as problem:
        raise Failure(f"{problem}; try it without --system, or generate --no-chat") from problem
