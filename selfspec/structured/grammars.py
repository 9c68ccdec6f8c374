"""`Grammars`: what `StructuredOutputs` ask for, compiled by llguidance for a tokenizer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from selfspec.structured.outputs import StructuredOutputs
from selfspec.structured.row_grammar import RowGrammar, reason_of

MOST_KEPT = 64  # compiled grammars
STACK = 1 << 28  # bytes, of which only those are used that are needed
_starting = threading.Lock()
Key = tuple[frozenset[int], int]  # end-of-text tokens, vocabulary


def in_deep_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises, in a thread whose stack holds the deepest schema that is allowed.

    llguidance reads schemas and expressions by recursion, and a stack that overflows ends the process.
    """
    answers: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            answers.append((function(), None))
        except BaseException as problem:
            answers.append((None, problem))

    thread = threading.Thread(target=run, name="selfspec-grammar")
    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    [(made, problem)] = answers
    if problem is not None:
        raise problem
    return made


class Grammars:
    """Compiles grammars for a tokenizer, and keeps the last ones. Several threads may use it.

    Args:
        tokenizer: a fast one of transformers; None: there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tries: dict[Key, Any] = {}  # llguidance's tokenizers
        self._compiled: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()

    def row(self, asked: StructuredOutputs, eos: frozenset[int], vocab_size: int) -> RowGrammar:
        """The grammar of a new row, at its beginning.

        A grammar takes a millisecond to compile, the largest that is allowed half a second; the same one again takes
        microseconds.

        Args:
            eos: tokens that end the text; the grammar allows them where it may end.
            vocab_size: of the model's logits, at least the tokenizer's.

        Raises:
            ValueError: a grammar that llguidance refuses, with its reason, or one that no text follows; there is no
                tokenizer, or one that llguidance cannot read.
            ImportError: llguidance is not installed.
        """
        kind, source = asked.source
        known = (kind, source, str(asked.disable_any_whitespace), f"{sorted(eos)} {vocab_size}")
        with self._lock:
            made = self._compiled.get(known)
        if made is None:  # others go on meanwhile
            with self._making:
                trie = self._trie((eos, vocab_size))
            made = in_deep_thread(partial(self._compile, asked, trie))
        with self._lock:
            self._compiled[known] = made
            self._compiled.move_to_end(known)
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
            return RowGrammar(made.deep_copy(), vocab_size)

    def _trie(self, key: Key) -> Any:
        """llguidance's tokenizer, which takes about a second to make."""
        eos, vocab_size = key
        if key not in self._tries:
            if self._tokenizer is None:
                raise ValueError("structured_outputs needs a tokenizer; load with tokenizer=...")
            _require()
            from llguidance import hf

            ends = sorted(token for token in eos if token < vocab_size) or None
            try:
                self._tries[key] = hf.from_tokenizer(self._tokenizer, n_vocab=vocab_size, eos_token=ends)
            except (ValueError, AttributeError) as problem:
                raise ValueError(
                    f"structured_outputs cannot be decoded with this tokenizer, which llguidance does not read "
                    f"({reason_of(str(problem))})"
                ) from problem
        return self._tries[key]

    def _compile(self, asked: StructuredOutputs, trie: Any) -> Any:
        """A matcher at the beginning of the grammar."""
        import llguidance

        kind, source = asked.source
        try:
            if kind == "json":
                options = {"whitespace_flexible": not asked.disable_any_whitespace}
                text = llguidance.LLMatcher.grammar_from_json_schema(source, defaults=options)
            else:
                text = llguidance.grammar_from({"choice": "lark", "tools": "lark"}.get(kind, kind), source)
            made = llguidance.LLMatcher(trie, text, log_level=0)
            if not made.is_error() and not made.is_stopped():
                made.compute_bitmask()
            problem = made.get_error()
        except ValueError as refused:
            problem = str(refused)
        if problem:
            reason = "no text follows it" if problem.startswith("NoExtension") else reason_of(problem)
            raise ValueError(asked.refusal(reason))
        return made


def _require() -> None:
    """ImportError unless llguidance is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError as problem:
        raise ImportError(
            "structured_outputs needs llguidance; install it with: pip install 'selfspec[structured]'"
        ) from problem
