"""A model class for lm-evaluation-harness (EleutherAI, 0.4.x) that decodes with self-speculation.

Only `generate_until` tasks gain: tasks scored by log-likelihood decode nothing. The harness finds no models by entry
point, so hand it an instance:

    import lm_eval
    from eval.quality.harness import model_class

    lm = model_class()(pretrained="org/name", dtype="float32", policy="adaptive")
    lm_eval.simple_evaluate(model=lm, tasks=["gsm8k"])
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from selfspec.control.plan import Policy
from selfspec.hf import SelfSpeculative


class _PerRow:
    """The harness's stop-string criterion, as a pure function of one row.

    Its own remembers which rows of the batch have ended and wants all of them at once; ours are asked row by row, about
    every kept token. So each question goes to a copy that remembers nothing. It looks back over a few tokens only,
    which is enough when no token is skipped.
    """

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def __call__(self, input_ids: Any, scores: Any, **given: Any) -> Any:
        fresh = copy.copy(self.criterion)
        fresh.done_tracker = [False] * len(input_ids)
        return fresh(input_ids, scores, **given)


class _Speculate(SelfSpeculative):
    """`SelfSpeculative` that takes the harness's stop-string criteria row by row."""

    def __call__(self, model: Any, ids: Any, *settings: Any, **given: Any) -> Any:
        criteria = given["stopping_criteria"]
        given["stopping_criteria"] = [_PerRow(each) if hasattr(each, "done_tracker") else each for each in criteria]
        return super().__call__(model, ids, *settings, **given)


def model_class() -> Any:
    """A subclass of the harness's `HFLM`: the same arguments, and `policy`, `exit_layer`, `num_draft_tokens`.

    `speculate` on an instance is the `SelfSpeculative` it decodes with; its `stats` are those of the last batch.

    Raises:
        ImportError: lm_eval is not installed.
    """
    try:
        base: Any = import_module("lm_eval.models.huggingface").HFLM
    except ImportError as problem:
        told = f"the harness cannot be imported ({problem}); install it with pip install 'lm_eval[hf]'"
        raise ImportError(told) from problem

    class SelfSpeculativeLM(base):  # type: ignore[misc]
        """A causal LM of the harness; its outputs are those of `HFLM` token by token, up to each row's stop string."""

        def __init__(
            self,
            *args: Any,
            policy: str | Policy | None = None,
            exit_layer: int | None = None,
            num_draft_tokens: int | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, **kwargs)
            self.speculate = _Speculate(exit_layer, num_draft_tokens, policy)

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
            return super()._model_generate(
                context, max_length, stop, custom_generate=self.speculate, **generation_kwargs
            )

    return SelfSpeculativeLM
