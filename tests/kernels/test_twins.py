"""The comparison of kernels with their references: in the interpreter, at one small shape, and with broken kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from selfspec.kernels import fused_accept, fused_pick, paged_attention, reference
from tests.kernels import twins

pytestmark = pytest.mark.slow  # the kernels' own tests compare each of them; this is what runs on a device


def small_cases():
    return list(twins.check_kernels("cpu", ((4, 2, 16),), most=64))


def test_every_kernel_agrees_with_its_reference():
    cases = small_cases()
    names = {"scatter", "attend", "pick", "prepare", "accept", "rotate", "add_norm", "gate"}
    names |= {"norm_product", "gate_product", "product_add", "squares", "rotate_attend"}
    assert {case.kernel for case in cases} == names
    assert [case for case in cases if not case.agrees] == []


def test_a_broken_kernel_is_found(monkeypatch):
    def careless(queries, keys, values, layout, *given, honest=reference.attend, **options):  # reads unwritten slots
        beyond = layout._replace(
            lengths=layout.lengths + 1, positions=layout.positions + 1, pages=layout.pages.clamp(max=len(keys) - 1)
        )
        return honest(queries, keys, values, beyond, *given, **options)

    def accept(state, *given):  # of any length
        before = state[:, 2].clone()
        done = reference.accept(state, *given)
        state[:, 2] = before
        return done

    monkeypatch.setattr(paged_attention, "attend", careless)
    monkeypatch.setattr(fused_pick, "pick", lambda logits, sampling: (logits.argmin(-1), None))
    monkeypatch.setattr(fused_accept, "accept", accept)
    assert {case.kernel for case in small_cases() if not case.agrees} == {"attend", "pick", "accept"}
