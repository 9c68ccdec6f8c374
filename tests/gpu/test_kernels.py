"""Every kernel beside its plain twin on a device, over the shapes of heads that real models have; and bandwidth."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from eval.gpu import kernels

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
on_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def assert_agree(cases):
    assert [case for case in cases if not case.agrees] == []


@on_dtypes
@pytest.mark.parametrize("heads", kernels.HEADS, ids=lambda heads: ":".join(map(str, heads)))
def test_attention_agrees(heads, dtype):
    assert_agree(kernels.check_attention(DEVICE, dtype, heads))


@on_dtypes
def test_attention_over_prompts_agrees(dtype):
    assert_agree(kernels.check_prompts(DEVICE, dtype))


@on_dtypes
def test_scatter_agrees(dtype):
    assert_agree(kernels.check_scatter(DEVICE, dtype))


@pytest.mark.parametrize("check", [kernels.check_pick, kernels.check_accept])
def test_picks_and_acceptance_agree(check):
    assert_agree(check(DEVICE))


def test_a_device_copies_and_multiplies():
    told = kernels.bandwidth(DEVICE, 0.25, 2048, 3)
    assert told["copy_bytes_per_second"] > 1e10 and told["matmul_flops_per_second"] > 1e11
