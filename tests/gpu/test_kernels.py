"""Every kernel beside its plain twin on a device, over the shapes of heads that real models have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from eval.synthetic import synthetic_target
from selfspec.executors.cuda.body_checks import MAX_ROUNDINGS, differing_rows, layers_error
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.skinny_body import SkinnyBody
from selfspec.kernels.suite import triton_kernels
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


@on_dtypes
def test_products_of_few_rows_agree(dtype):
    assert_agree(twins.check_products(DEVICE, dtype))


@on_dtypes
@pytest.mark.parametrize("heads", twins.HEADS, ids=lambda heads: ":".join(map(str, heads)))
def test_attention_of_a_layer_in_one_launch_agrees(heads, dtype):
    assert_agree(twins.check_layer_attention(DEVICE, dtype, heads))


@on_dtypes
def test_layers_in_five_launches_are_those_of_the_views_and_give_a_row_the_same_bits_among_others(dtype):
    made = synthetic_target("tiny", dtype=dtype, device="cuda", hidden_size=1024, intermediate_size=3072).split
    body = SkinnyBody(FusedBody(made.llama, triton_kernels(), "copy"))
    assert layers_error(made, body) <= MAX_ROUNDINGS
    assert differing_rows(made, body) == ""


@pytest.mark.parametrize("check", [twins.check_pick, twins.check_accept])
def test_picks_and_acceptance_agree(check):
    assert_agree(check(DEVICE))
