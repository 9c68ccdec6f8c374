"""`python -m eval kernels`: compile every kernel for a device that need not be there; registers, stack, memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval kernels", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, help="compute capability times ten; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        from eval.gpu.compiled import compile_all  # needs Triton

        made = compile_all(lambda text: print(text, file=sys.stderr, flush=True), options.capability)
    except (ImportError, RuntimeError) as problem:
        print(f"kernels cannot be compiled: {problem}", file=sys.stderr)
        return 2
    print(f"{'call':54}{'kernel':16}{'registers':>10}{'stack':>7}{'shared':>8}{'warps':>7}")
    for one in made:
        numbers = f"{one.registers:10}{one.stack_bytes:7}{one.shared_bytes:8}{one.warps:7}"
        print(f"{one.call:54}{one.kernel:16}{numbers}")
    print()
    print(json.dumps({"capability": options.capability, "kernels": [one._asdict() for one in made]}))
    return 0
