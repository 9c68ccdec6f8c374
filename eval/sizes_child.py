"""What `python -m eval sizes` measures in a process of its own: `python -m eval.sizes_child TASK ARGUMENTS`.

The arguments are a JSON object; the result is one, as the last line of output. The module imports nothing heavy, so
that the start and the memory of a process are those of what is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

Result = dict[str, Any]
TEXT = "Write a short story about a lighthouse."  # the prompt whose first token ends loading
PROMPT = 16  # tokens of the prompts after which decoding is timed
ROUND_CONTEXT = 64  # cached tokens of timed verifications
PROBED = 1 << 30  # bytes that a measurement of the bandwidth reads at once


def memory() -> Result:
    """Bytes of this process: resident, of them anonymous and of mapped files, and the most that were resident."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    names = {"resident": "VmRSS", "anonymous": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}
    return {name: int(lines[key].split()[0]) << 10 for name, key in names.items()}


def imports() -> Result:
    """The memory of a process that only imports torch."""
    import torch

    return {"torch": torch.__version__, **memory()}


def bandwidth(threads: int) -> Result:
    """Bytes per second that a dot product of two long vectors reads, the best of some; a plain loop is no faster."""
    import ctypes

    import torch

    torch.set_num_threads(threads)
    both = torch.empty(PROBED // 4)
    with_pages = 14  # MADV_HUGEPAGE: small pages take 5 % longer
    start = -(-both.data_ptr() // 4096) * 4096
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(PROBED - 4096), with_pages)
    first, second = both.fill_(1.0).chunk(2)
    return {"bytes_per_second": PROBED / min(_seconds(lambda: first @ second) for _ in range(8))}


def load(engine: str, model: str, threads: int, begun: float, context: int, limit: float) -> Result:
    """Open a model as a user does, and continue a prompt by one token.

    Args:
        threads: of llama.cpp; others have those of OMP_NUM_THREADS.
        begun: when the process was started, by the monotonic clock that all processes share.
        context: tokens that the cache must have room for.
    """
    if engine == "llama.cpp":
        from eval.llama_server import LlamaServer

        held: Any = LlamaServer(Path(model), context, threads)
        next(one for one in held.complete(TEXT, 1, True, limit) if one.get("tokens"))
    elif engine == "transformers":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        held = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        held.generate(**AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt"), max_new_tokens=1)
    else:
        from selfspec import LLM, SamplingParams

        held = LLM(model, dtype=_dtype(model), device="cpu")
        room = context - len(held.tokenizer(TEXT)["input_ids"])
        next(iter(held.stream([TEXT], SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True))))
    seconds = perf_counter() - begun
    return {"seconds": seconds, **memory()}


def speed(engine: str, model: str, threads: int, prompt: int, tokens: int, repeats: int, limit: float) -> Result:
    """Tokens per second of reading a prompt and of decoding, `repeats` values each.

    Args:
        prompt: tokens of the prompt that is read.
        tokens: that are decoded after a short prompt.
    """
    import torch

    from eval.answers import Method, Prompt
    from eval.decoders import LlamaCpp, Ours, Transformers
    from eval.methods import parse_method
    from eval.models import open_llm

    torch.set_num_threads(threads)
    name = parse_method("plain" if engine == "selfspec" else engine)
    if engine == "llama.cpp":
        method: Method = LlamaCpp(model, name, prompt + tokens, frozenset(), 0.0, limit)
    else:
        llm = open_llm(model, dtype=_dtype(model), device="cpu")
        kind: type[Ours] | type[Transformers] = Ours if engine == "selfspec" else Transformers
        method = kind(llm, name, frozenset(), 0.0, limit)
    found: dict[str, list[float]] = {"prompt": [], "decode": []}
    for repeat in range(repeats + 1):  # the first is not counted
        ids = torch.randint(1000, 40000, (prompt,), generator=torch.Generator().manual_seed(repeat)).tolist()
        _, *steps = method(Prompt(0, 0, "", ids[:PROMPT], tokens, 0)).step_seconds or ()
        if repeat:
            found["decode"].append(len(steps) / sum(steps))
            [first] = method(Prompt(0, 0, "", ids, 1, 0)).step_seconds or ()
            found["prompt"].append(prompt / first)
    return {**found, **memory()}


def verify(model: str, threads: int, widths: list[int], repeats: int) -> Result:
    """Seconds of a round of one token, and of those that verify `widths` tokens: all layers, the head and the picks."""
    import torch

    from eval.models import open_llm
    from selfspec.calibrate.timed_rounds import TimedRounds
    from selfspec.core import LOOKUP, Plan

    torch.set_num_threads(threads)
    split = open_llm(model, dtype=_dtype(model), device="cpu").target.split
    found: dict[str, list[float]] = {str(width): [] for width in (1, *widths)}
    with torch.inference_mode():
        rounds = TimedRounds(split, 1, ROUND_CONTEXT + max(widths), ROUND_CONTEXT + max(widths))
        for repeat in range(repeats + 1):
            for width in (1, *widths):
                [laps] = rounds.laps(1, ROUND_CONTEXT, Plan(LOOKUP, (width - 1,)) if width > 1 else Plan(None, (0,)), 0)
                if repeat:
                    found[str(width)].append(sum(sum(laps[stage]) for stage in ("verify", "head", "pick")))
    return {"seconds": {width: median(each) for width, each in found.items()}}


def contexts(model: str, threads: int, contexts: list[int], tokens: int) -> Result:
    """Tokens per second of decoding after random prompts of these lengths, and the bytes that a cached token takes.

    The model is a GGUF file's. Its cache keeps two bytes per number, and two for the scale of a block.

    Args:
        tokens: that are decoded after a prompt; the rate is that of their median.
    """
    import torch

    from eval.answers import Prompt
    from eval.decoders import Ours
    from eval.methods import parse_method
    from eval.models import open_llm
    from selfspec.kernels.rounding import BLOCK

    torch.set_num_threads(threads)
    llm = open_llm(model, dtype=_dtype(model), device="cpu")
    method = Ours(llm, parse_method("plain"), frozenset(), 0.0, float("inf"))
    rates = {}
    for context in contexts:
        ids = torch.randint(1000, 40000, (context,), generator=torch.Generator().manual_seed(context)).tolist()
        _, *steps = method(Prompt(0, 0, "", ids, tokens, 0)).step_seconds or ()
        rates[str(context)] = 1 / median(steps)
    config: Any = llm.target.split.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = 2 * dim + 2 * -(-dim // BLOCK)
    return {"rates": rates, "kept_bytes": 2 * config.num_hidden_layers * config.num_key_value_heads * head}


def _dtype(model: str) -> str:
    """The number format to open a model in: a folder's own, and that of GGUF files."""
    return "bfloat16" if Path(model).is_dir() else "float32"


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


TASKS: dict[str, Callable[..., Result]] = {
    one.__name__: one for one in (imports, bandwidth, load, speed, verify, contexts)
}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
