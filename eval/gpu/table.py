"""A short table for people: tokens per second by way to decode and batch, then the figures."""

from __future__ import annotations

from typing import Any

from eval.gpu.speed import OURS, PEERS


def render(content: dict[str, Any]) -> str:
    lines = _head(content)
    for name, shape in content.get("shapes", {}).items():
        lines += _shape(name, shape)
    lines += ["", f"{'figure':86}{'value':>9}{'goal':>9}"]
    for figure in content.get("figures", []):
        if figure["value"] is None:
            lines.append(f"{figure['name']:86}  not measured: {figure['why']}")
            continue
        goal = "" if figure["goal"] is None else f"{'>=' if figure['at_least'] else '<='}{figure['goal']:.2f}"
        missed = "  missed" if figure["holds"] is False else ""
        lines.append(f"{figure['name']:86}{figure['value']:>9.2f}{goal:>9}{missed}")
    skipped = content.get("not_measured", [])
    if skipped:
        lines += ["", f"not measured ({len(skipped)}): " + "; ".join(f"{s['what']} ({s['why']})" for s in skipped[:6])]
        lines[-1] += "; and others, see the record" if len(skipped) > 6 else ""
    return "\n".join(lines)


def _head(content: dict[str, Any]) -> list[str]:
    about = content.get("environment", {})
    where = about.get("gpu") or about.get("cpu")
    lines = [f"{where}, torch {about.get('torch')}, transformers {about.get('transformers')}"]
    speed = content.get("bandwidth")
    if speed:
        lines[0] += f"; copies {speed['copy_bytes_per_second'] / 1e12:.2f} TB/s"
        if speed.get("matmul_flops_per_second"):
            lines[0] += f", multiplies {speed['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
    kernels = content.get("kernels")
    if kernels is not None:
        wrong = [one for one in kernels if not one.get("agrees", True)]
        lines.append(f"kernels: {len(kernels)} cases beside their twins, {len(wrong)} differ")
        lines += [f"  {one.get('kernel')}, {one.get('case')}: {one.get('error')}" for one in wrong]
    return lines


def _shape(name: str, shape: dict[str, Any]) -> list[str]:
    if "target" not in shape:
        return ["", f"synthetic {name}: nothing measured"]
    target = shape["target"]
    lines = [
        "",
        f"synthetic {name}, {target['dtype']}, random weights, acceptance {target['acceptance']:.2f} at layer "
        f"{target['exit_layer']} of {target['num_layers']}; tokens/s of all rows",
    ]
    for context in shape["contexts"]:
        cells = [cell for cell in shape["cells"] if cell["context"] == context]
        batches = sorted({cell["batch"] for cell in cells})
        if not cells:
            continue
        lines.append(f"context {context:<10}" + "".join(f"{f'batch {b}':>12}" for b in batches))
        for method in (*OURS, *PEERS):
            of_method = {cell["batch"]: cell["tokens_per_second"] for cell in cells if cell["method"] == method}
            if of_method:
                told = "".join(f"{of_method[b]:>12.1f}" if b in of_method else f"{'-':>12}" for b in batches)
                lines.append(f"  {method:16}{told}")
    return lines
