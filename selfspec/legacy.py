"""The calls of 0.1, until 0.3: `selfspec.load`, `generate` and `stream` with transformers' keywords, `selfspec.Engine`.

`selfspec.LLM` does the same; CHANGELOG has the new name of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Completion, Options, Prompts
from selfspec.decoding.results import Round
from selfspec.errors import refuse_unknown
from selfspec.hub import open_target
from selfspec.target import WHOLE_BURST, Target

__all__ = ["Engine", "LoadedTarget", "load"]
DRAFTING = (
    "policy",
    "exit_layer",
    "num_draft_tokens",
    "drafts",
    "datastore",
    "max_batch_size",
    "learn",
    "exact",
    "burst",
)


class LoadedTarget(Target):
    """A target with the calls of 0.1."""

    def generate(self, prompts: Prompts, **options: Any) -> list[Completion]:
        """Continue every prompt; options are those of `Target.requests` and of `Target.rounds`.

        Raises:
            ValueError: an unknown option, or what those two refuse.
        """
        if options.get("burst") is None:
            options["burst"] = WHOLE_BURST
        rounds = self.stream(prompts, **options)
        done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
        return sorted(done, key=lambda completion: completion.request_id)

    def stream(self, prompts: Prompts, **options: Any) -> Iterator[Round]:
        """Like `generate`, but yields every round as it ends; a row's `request_id` is its prompt's index."""
        refuse_unknown(options, {*Options.__optional_keys__, *DRAFTING})
        drafting = {name: options.pop(name) for name in DRAFTING if name in options}
        return self.rounds(self.requests(prompts, options), **drafting)


def load(model: Any, tokenizer: Any = None, **options: Any) -> LoadedTarget:
    """Open a model that has the calls of 0.1; arguments are those of `selfspec.hub.open_target`."""
    warnings.warn("selfspec.load goes in 0.3; use selfspec.LLM (CHANGELOG, 0.2.0)", DeprecationWarning, stacklevel=2)
    target = open_target(model, tokenizer, **options, kind=LoadedTarget)
    assert isinstance(target, LoadedTarget)
    return target
