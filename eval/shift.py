"""Acceptance on a workload that heads have never seen: without heads, with heads learned on it before, and learning.

Every prompt is a request of its own, in order, decoded by the policy `fixed`; the last line on standard output is one
JSON document.

    python -m eval.shift --model demo --prompts questions.jsonl --output shift

First come the requests of `--before`, if it is given: the learner gets used to them, and then the workload shifts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from eval.environment import environment
from eval.methods import Endless
from eval.plots import LOUD, PLAIN, QUIET, check_plots, figure
from selfspec.decoding.stats import SpecStats
from selfspec.learn import Learner
from selfspec.legacy import opened as load

Ids = list[list[int]]
SEEDS = 1 << 20  # what the offline heads learn from was written with other seeds than what is measured
COLOURS = {"no heads": PLAIN, "learned offline": QUIET, "learning online": LOUD}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.shift", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder, or a hub id")
    add("--prompts", metavar="FILE", help="JSON lines of turns, question or prompt; default: texts from nothing")
    add("--before", metavar="FILE", help="what the workload was before it shifted, likewise")
    add("--num-before", type=int, default=40, help="requests of it; default: %(default)s")
    add("--num-requests", type=int, default=200, help="requests after the shift; default: %(default)s")
    add("--prompt-tokens", type=int, default=64, help="most tokens of a prompt, its first; default: %(default)s")
    add("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    add("--exit-layer", type=int, required=True)
    add("--num-draft-tokens", type=int, default=4, help="default: %(default)s")
    add("--temperature", type=float, default=0.0, help="default: greedy")
    add("--share", type=float, default=0.05, help="most time spent learning; default: %(default)s")
    add("--lr", type=float, default=3e-3, help="default: %(default)s")
    add("--passes", type=int, default=3, help="of the offline learner over the new workload; default: %(default)s")
    add("--window", type=int, default=16, help="requests of the plot's moving mean; default: %(default)s")
    add("--output", metavar="FOLDER", help="where to write shift.json and shift.svg")
    return parser.parse_args(arguments)


def _text_of(line: Any) -> str:
    """The first turn of a question, or its text under another usual name; empty where there is none."""
    turns = line.get("turns")
    given = turns[:1] if isinstance(turns, list) else []
    given += [line.get(key) for key in ("question", "prompt")]
    return next((text for text in given if isinstance(text, str)), "")


def read_prompts(path: str | None, count: int, longest: int, tokenizer: Any) -> Ids:
    """The first prompts of a file, over again where it has fewer; without a file, `count` times the first token.

    Raises:
        ValueError: a line has no text, or there is none.
    """
    if path is None:
        first = tokenizer.bos_token_id
        return [[0 if first is None else first]] * count
    found = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    texts = [_text_of(one) for one in found]
    if not texts or not all(texts):
        raise ValueError(f"{path}: every line needs turns, a question or a prompt, the first of them a text")
    return [tokenizer(texts[i % len(texts)])["input_ids"][:longest] for i in range(count)]


class Workload:
    """Requests one after another, with the drafting and sampling that all three are measured with."""

    def __init__(self, target: Endless, given: argparse.Namespace) -> None:
        self.target = target
        self._options: dict[str, Any] = {
            name: getattr(given, name) for name in ("exit_layer", "num_draft_tokens", "max_new_tokens", "temperature")
        }

    def __call__(self, prompts: Ids, seed: int = 0, learn: Learner | None = None) -> tuple[list[float], Ids]:
        """Acceptance of every request, and its tokens."""
        rates, tokens = [], []
        for i, prompt in enumerate(prompts):
            options = {**self._options, "seed": seed + i, "policy": "fixed", "learn": learn or False}
            [done] = self.target.generate([prompt], **options)
            rates.append(acceptance(done.stats))
            tokens.append(done.tokens)
        return rates, tokens


def acceptance(stats: SpecStats) -> float:
    """Accepted among judged drafted tokens: those accepted, and the first one refused of every round."""
    judged = sum(
        min(accepted + 1, drafted) * count
        for drafted, counts in stats.acceptance_histogram_by_draft_length.items()
        for accepted, count in counts.items()
    )
    return stats.num_accepted_draft_tokens / max(1, judged)


def measure(given: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Acceptance by request in all three ways; every one writes the same tokens, which is checked."""
    opened = load(given.model, exit_heads="none")
    target, tokenizer = Endless(opened), opened.tokenizer
    before = read_prompts(given.before, given.num_before, given.prompt_tokens, tokenizer) if given.before else []
    prompts = before + read_prompts(given.prompts, given.num_requests, given.prompt_tokens, tokenizer)
    run = Workload(target, given)
    say("without heads ...")
    rates, expected = run(prompts)
    found = {"no heads": rates}
    say("learning online ...")
    online = Learner(target, layers=[given.exit_layer], share=given.share, lr=given.lr)
    found["learning online"], tokens = run(prompts, learn=online)
    same = tokens == expected
    say("learning offline ...")
    target.exit_heads = None
    offline = Learner(target, layers=[given.exit_layer], share=1.0, lr=given.lr)
    for turn in range(given.passes):
        run(prompts[len(before) :], SEEDS * (turn + 1), offline)
    found["learned offline"], tokens = run(prompts)
    return {
        "settings": vars(given),
        "environment": environment(target, given.model),
        "num_before": len(before),
        "acceptance": found,
        "tokens_identical": same and tokens == expected,
        "online": told(online),
        "offline": told(offline),
        **recovery(found, len(before)),
    }


def told(learner: Learner) -> dict[str, float]:
    return {
        "num_lessons": learner.num_lessons,
        "num_updates": learner.num_updates,
        "num_steps": learner.num_steps,
        "seconds": learner.seconds,
        "share": learner.seconds / learner.decoding_seconds,
    }


def recovery(found: dict[str, list[float]], start: int) -> dict[str, Any]:
    """How much of the gap between no heads and offline heads is closed, by quarter of the shifted requests."""
    count = len(found["no heads"]) - start
    cuts = [(start + count * q // 4, start + count * (q + 1) // 4) for q in range(4)]
    quarters = []
    for low, high in cuts:
        none, full, now = (mean(found[name][low:high]) for name in ("no heads", "learned offline", "learning online"))
        quarters.append({"no heads": none, "learned offline": full, "learning online": now})
    gains = [(q["learning online"] - q["no heads"], q["learned offline"] - q["no heads"]) for q in quarters]
    gaps = [gained / gap if gap else 0.0 for gained, gap in gains]
    return {"quarters": quarters, "gap_closed": gaps}


def moving(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot(result: dict[str, Any], path: Path) -> None:
    """Acceptance over requests, a line per way."""
    settings, start = result["settings"], result["num_before"]
    with figure(path, 1, (6.4, 3.6)) as (axes,):
        for name, colour in COLOURS.items():
            rates = result["acceptance"][name]
            for low, high in [(0, start), (start, len(rates))]:  # no mean over the shift
                label = name if high == len(rates) else None
                axes.plot(range(low, high), moving(rates[low:high], settings["window"]), color=colour, label=label)
        if start:
            axes.axvline(start, color=PLAIN, linestyle=":", linewidth=1.2)
            axes.text(start, axes.get_ylim()[1], " the workload shifts", fontsize=8, color=PLAIN, va="top")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        axes.set_ylabel(f"acceptance (mean of {settings['window']} requests)")
        axes.legend(frameon=False, loc="lower center", ncols=3)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse_arguments(arguments)
    try:
        if given.output:
            check_plots()
        result = measure(given, lambda line: print(line, file=sys.stderr, flush=True))
    except (ValueError, OSError) as problem:
        print(f"shift: {problem}", file=sys.stderr)
        return 2
    if given.output:
        folder = Path(given.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shift.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        plot(result, folder / "shift.svg")
    share = result["online"]["share"]
    print(
        f"gap closed by quarter: {', '.join(f'{gap:.0%}' for gap in result['gap_closed'])}; learning took {share:.1%}"
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
