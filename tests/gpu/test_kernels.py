"""Every kernel beside its plain twin on a device, over the shapes of heads that real models have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels import twins

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
on_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def assert_agree(cases):
    assert [case for case in cases if not case.agrees] == []


@on_dtypes
@pytest.mark.parametrize("heads", twins.HEADS, ids=lambda heads: ":".join(map(str, heads)))
def test_attention_agrees(heads, dtype):
    assert_agree(twins.check_attention(DEVICE, dtype, heads))


@on_dtypes
def test_attention_over_prompts_agrees(dtype):
    assert_agree(twins.check_prompts(DEVICE, dtype))


@on_dtypes
def test_scatter_agrees(dtype):
    assert_agree(twins.check_scatter(DEVICE, dtype))


@on_dtypes
@pytest.mark.parametrize("heads", twins.HEADS, ids=lambda heads: ":".join(map(str, heads)))
def test_kernels_of_fused_layers_agree(heads, dtype):
    assert_agree(twins.check_layers(DEVICE, dtype, heads))


@pytest.mark.parametrize("check", [twins.check_pick, twins.check_accept])
def test_picks_and_acceptance_agree(check):
    assert_agree(check(DEVICE))
