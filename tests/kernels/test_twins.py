"""The comparison of kernels with their twins: here in the interpreter, on small shapes, and with broken kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from selfspec.kernels import fused_accept, fused_advance, fused_pick, paged_attention, reference
from tests.kernels import twins


def small_cases():
    return list(twins.check_kernels("cpu", ((4, 2, 16),), most=64))


def test_every_kernel_agrees_with_its_twin():
    cases = small_cases()
    names = {"scatter", "attend", "pick", "accept", "advance", "rotate", "add_norm", "gate"}
    assert {case.kernel for case in cases} == names
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
    found = {case.kernel for case in small_cases() if not case.agrees}
    assert found == {"attend", "pick", "accept", "advance"}
