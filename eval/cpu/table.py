"""The figures as tables for people."""

from __future__ import annotations

from typing import Any

RATIOS = {
    "plain_over_bytes_by_bandwidth": "a plain token, over its bytes by the memory's bandwidth",
    "verify_5_over_1": "verifying 5 tokens over 1",
    "verify_8_over_1": "verifying 8 tokens over 1",
    "draft_over_its_share_of_layers": "a draft's layers, over their share of a plain token's",
    "throughput_16_over_1": "tokens/s of 16 rows over 1, forwards alone",
}


def render(record: dict[str, Any]) -> str:
    parts = [_pieces(one) for one in record["pieces"]] + [_decoding(one) for one in record["decoding"]]
    return "\n\n".join(part for part in parts if part)


def _pieces(one: dict[str, Any]) -> str:
    lines = [f"{one['target']}, engine {one['engine']}, {one['threads']} threads, {one['clock']}"]
    lines += [f"  {name:<24}{values['median']:9.3f} ms" for name, values in one["milliseconds"].items()]
    lines += [f"  {text:<58}{one[key]:6.2f}" for key, text in RATIOS.items()]
    return "\n".join(lines)


def _decoding(one: dict[str, Any]) -> str:
    lines = [f"{one['target']}, {one['threads']} threads, greedy, {one['num_tokens']} tokens, {one['category']}"]
    for row in one["rows"]:
        if "error" in row:
            lines.append(f"  {row['method']:<44}failed: {row['error']}")
            continue
        figures = f"{row['milliseconds_per_token']:8.2f} ms/token {row['over_plain']['median']:6.2f}x"
        different = f"  ({row['differing_prompts']} differ)" if row["differing_prompts"] else ""
        lines.append(f"  {row['method']:<44}{figures}{different}")
    if "batch" in one:
        lines.append(f"  16 rows together over one, plain: {one['batch']['ratio']:.2f}x tokens/s")
    return "\n".join(lines)
