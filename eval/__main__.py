"""Measure selfspec: `python -m eval COMMAND`, and `python -m eval COMMAND --help` for its options.

run      decode a question file with several methods, one question at a time, and write a folder with a report
quality  scores of lm-evaluation-harness tasks, decoded by selfspec
replay   every policy on recorded outputs, without the model, compared with bounds
tune     what exit heads gain that `selfspec tune` makes for several kinds of prompts
guard    where the default policy is slower than plain decoding
serve    policies under load: requests that arrive at a server
sizes    files of 1 to 8 billion random weights: load time, memory and speed beside llama.cpp
gpu      kernels, launches and tokens per second of a GPU

Tables go to standard output, progress to standard error. Exit codes: 0; 1 (a run failed);
2 (invalid input, explained in one sentence); 130 (Ctrl-C).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from eval.records import FullError
from selfspec.errors import UnsupportedModelError

COMMANDS = {  # the module of each command; its `main` takes the other arguments and returns the exit code
    "run": "eval.run",
    "quality": "eval.quality",
    "replay": "eval.policies",
    "tune": "eval.tune",
    "guard": "eval.guard",
    "serve": "eval.serve",
    "sizes": "eval.sizes",
    "gpu": "eval.gpu",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if given else 2
    if given[0] not in COMMANDS:
        print(f"eval: command {given[0]!r} is unknown; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(import_module(COMMANDS[given[0]]).main(given[1:]))
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError, UnsupportedModelError) as problem:
        print(f"eval: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1 if isinstance(problem, FullError) else 2


if __name__ == "__main__":
    sys.exit(main())
