"""How long a fresh process takes from a model's name to its first new token; imports come before the clock starts.

`python -m eval.startup '{"model": "demo", ...}'` is what a benchmark runs to find out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from eval.config import BenchConfig
from eval.summary import spread

ROOT = Path(__file__).parents[1]


def measure(model: str, device: str, dtype: str, threads: int, prompt: str) -> dict[str, float]:
    """StageSeconds to load (self-check included), and from there to the first token of plain decoding."""
    import torch
    import transformers  # noqa: F401  # its import is not what is measured

    from selfspec.legacy import opened as load

    if threads:
        torch.set_num_threads(threads)
    start = perf_counter()
    target = load(model, device=device or None, dtype=dtype)
    loaded = perf_counter()
    rounds = target.stream([prompt], policy="plain", max_new_tokens=1, temperature=0.0, generation_config=False)
    next(round_ for round_ in rounds if round_.rows)
    first = perf_counter()
    return {"load_seconds": loaded - start, "first_token_seconds": first - loaded, "seconds": first - start}


def in_fresh_processes(config: BenchConfig, prompt: str) -> dict[str, Any] | None:
    """Spreads over `config.load_repeats` processes; None when there are to be none.

    Raises:
        ChildProcessError: a process failed, with the last line of what it said.
    """
    if not config.load_repeats:
        return None
    asked = {"model": config.model, "device": config.device, "dtype": config.dtype, "threads": config.threads}
    model = Path(config.model).expanduser()
    if model.exists():  # the process runs in the repository's root, to find this package
        asked["model"] = str(model.resolve())
    taken = [_run({**asked, "prompt": prompt}) for _ in range(config.load_repeats)]
    return {key: spread(each[key] for each in taken)._asdict() for key in taken[0]}


def _run(asked: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "eval.startup", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise ChildProcessError(f"loading in a fresh process failed: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
