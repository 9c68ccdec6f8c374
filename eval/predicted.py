"""`python -m eval.predicted`: edits of code with and without a prediction of the output; tokens/s, and if all agree.

Twenty functions of this repository; the model is asked to rename an argument and to answer with the whole function. The
prediction is the function as it was. Finished responses are not looked up, so that no run helps the next one.
"""

from __future__ import annotations

import ast
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from selfspec import LLM, SamplingParams, SpeculativeConfig

ROOT = Path(__file__).parents[1] / "selfspec"
NUM_EDITS, MOST_TOKENS = 20, 300
OPENING = "```python\n"


def functions() -> Iterator[tuple[str, str]]:
    """Functions of 12 to 24 lines, and the name of the first argument."""
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not 12 <= (node.end_lineno or 0) - node.lineno <= 24:
                continue
            names = [one.arg for one in node.args.args if one.arg != "self" and len(one.arg) > 3]
            if names:
                yield textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])), names[0]


def main(model: str = "smollm2") -> None:
    """Write the figures of every way to decode."""
    llm = LLM(model, speculative=SpeculativeConfig(reuse_responses=False))
    edits = random.Random(0).sample(list(functions()), NUM_EDITS)
    ways = {"plain": {"speculative": False}, "adaptive": {}, "adaptive, prediction": {"prediction": None}}
    tokens, seconds, same = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0), 0
    for code, name in edits:
        asked = f"Rename the argument `{name}` of this function to `renamed`. Answer with the whole function alone.\n\n"
        prompt = llm.chat_prompt([{"role": "user", "content": f"{asked}{OPENING}{code}\n```"}])
        prompt += llm.tokenizer(OPENING, add_special_tokens=False)["input_ids"]
        outputs = []
        for way, options in ways.items():
            given = {"prediction": f"{code}\n```"} if "prediction" in options else options
            start = perf_counter()
            [done] = llm.generate(prompt, SamplingParams(max_tokens=MOST_TOKENS, temperature=0, **given))
            seconds[way] += perf_counter() - start
            tokens[way] += len(done.outputs[0].token_ids)
            outputs.append(done.outputs[0].token_ids)
        same += all(one == outputs[0] for one in outputs)
    print(f"{model}: {same} of {NUM_EDITS} edits have the same output in every way")
    for way in ways:
        print(f"{way:22} {tokens[way]} tokens, {tokens[way] / seconds[way]:.1f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
