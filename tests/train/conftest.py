"""A tiny corpus on disk and a configuration small enough to train in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short files, two of which no corpus should take: one too long, one not UTF-8."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        folder = root / ("test" if number % 4 == 0 else "library")
        folder.mkdir(exist_ok=True)
        body = "".join(f"def f{number}_{line}(x):\n    return x * {line}  # ünï\n\n" for line in range(12))
        (folder / f"module_{number}.py").write_text(body, "utf-8")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "long.py").write_text("x = 1\n" * 5000)
    return root


@pytest.fixture
def small_settings(small_corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """What a YAML file for a run of a few steps would hold."""
    return {
        "corpus": {"root": str(small_corpus), "max_chars": 20_000, "held_out_percent": 20.0},
        "model": {
            "vocab_size": 320,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
        "exits": {"period": 2, "distill": 0.5, "dropout_max": 0.2},
        "optim": {"warmup_steps": 2},
        "run": {
            "output": str(tmp_path / "run"),
            "max_steps": 4,
            "windows": [16, 32],
            "tokens_per_batch": 64,
            "gradient_accumulation_steps": 2,
            "save_steps": 2,
            "log_steps": 1,
            "compile": False,
            "bf16": False,
        },
        "eval": {
            "every_steps": 2,
            "window": 32,
            "num_windows": 4,
            "prompt_tokens": 16,
            "num_prompts": 4,
            "new_tokens": 8,
        },
    }
