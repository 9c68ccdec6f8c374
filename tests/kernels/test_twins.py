"""The comparison of kernels with their twins: here in the interpreter, on small shapes, and with broken kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from selfspec.kernels import (
    draft_tree,
    fused_accept,
    fused_advance,
    fused_pick,
    kv_scatter,
    paged_attention,
    reference,
    reference_trees,
)
from tests.kernels import twins


def small_cases():
    return list(twins.check_kernels("cpu", ((4, 2, 16),), most=64))


def test_every_kernel_agrees_with_its_twin():
    cases = small_cases()
    names = {"scatter", "attend", "pick", "accept", "advance", "rotate", "add_norm", "gate"}
    assert {case.kernel for case in cases} == names | {"pick_two", "grow", "follow", "move"}
    assert [case for case in cases if not case.agrees] == []


def test_a_broken_kernel_is_found(monkeypatch):
    def careless(queries, keys, values, layout, *given, **options):  # reads what no row has written
        beyond = layout._replace(
            lengths=layout.lengths + 1, positions=layout.positions + 1, pages=layout.pages.clamp(max=len(keys) - 1)
        )
        return paged_attention_of(queries, keys, values, beyond, *given, **options)

    paged_attention_of = reference.attend
    monkeypatch.setattr(paged_attention, "attend", careless)
    monkeypatch.setattr(fused_pick, "pick", lambda logits, sampling: (logits.argmin(-1), None))
    monkeypatch.setattr(
        fused_accept, "accept", lambda *given: reference.accept(*given[:4], torch.ones_like(given[4]), *given[5:])
    )
    monkeypatch.setattr(
        fused_advance, "advance", lambda rows, kept, ended, last: reference.advance(rows, kept, 0 * ended, last)
    )
    for owner, name, honest in (
        (draft_tree, "grow", reference_trees.grow),
        (draft_tree, "follow", reference_trees.follow),
    ):
        monkeypatch.setattr(owner, name, lambda *given, honest=honest: honest(*given)._replace(counts=given[-1]))
    monkeypatch.setattr(kv_scatter, "move", lambda *given: None)
    monkeypatch.setattr(fused_pick, "pick_two", lambda *given, names: reference.pick_two(*given, None, names + 3))
    found = {case.kernel for case in small_cases() if not case.agrees}
    assert found == {"attend", "pick", "accept", "advance", "pick_two", "grow", "follow", "move"}
