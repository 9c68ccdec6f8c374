"""Every family's layers and heads run on a device without a copy from the host, in the dtypes that kernels accept.

On the processor such a copy is invisible: the host's memory is the device's. On the meta device it is not. A copy from
the host inside a recording fails on CUDA, since the memory it comes from is not pinned.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec.executors.cuda.round_inputs import RoundInputs, RoundKey
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.executors.cuda.whole_round import WholeRound
from selfspec.kernels.suite import REFERENCE
from selfspec.model import views
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack
from tests.cuda.test_launches import layout
from tests.models import FAMILIES, GROUPED, SMALL
from tests.slow import slow


class NoHostCopies(TorchDispatchMode):
    """Raises where memory of the host enters an operation of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        made = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
        hosts = [one for one in given if not one.is_meta]
        if not hosts or not any(one.is_meta for one in (*given, *made)):
            return out
        # A number of the host beside tensors of the device is handed to the kernel by value.
        by_value = len(hosts) < len(given) and not any(one.dim() for one in hosts) and "copy" not in str(func)
        if not by_value:
            raise AssertionError(f"{func} reads memory of the host")
        return out


@pytest.fixture
def meta_is_served(monkeypatch):
    """A model without weights is refused where tokens are asked of it; here nothing but its operations is looked at."""
    monkeypatch.setattr(views, "refuse_unsplittable", lambda model: None)


def on_meta(family, dtype):
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
        return Stack(AutoModelForCausalLM.from_config(config, dtype=dtype).eval())


CASES = [slow(family, torch.float32) for family in FAMILIES if family not in GROUPED]
CASES += [(family, torch.bfloat16) for family in FAMILIES]


@pytest.mark.usefixtures("meta_is_served")
@pytest.mark.parametrize(("family", "dtype"), CASES)
@torch.inference_mode()
def test_layers_and_heads_copy_nothing_from_the_host(family, dtype):
    stack = on_meta(family, dtype)
    cache = PagedCache(4, 16)
    for start, stop in ((0, 2), (2, 4)):
        given = torch.zeros(4, dtype=torch.int64, device="meta")
        if start:
            given = torch.zeros(4, SMALL["hidden_size"], dtype=dtype, device="meta")
        rows = StaticRows(cache, layout([(5, 2), (0, 2)], "meta"), REFERENCE)
        hidden = stack.run_here(rows, start, stop, given)  # makes what is made once
        with NoHostCopies():
            hidden = stack.run_here(StaticRows(cache, rows.layout, REFERENCE), start, stop, given)
            logits = stack.logits(hidden, stop)
    assert logits.is_meta and logits.shape == (4, SMALL["vocab_size"])


@pytest.mark.usefixtures("meta_is_served")
@pytest.mark.parametrize("stop", ["none", "confidence", "survival"])
@torch.inference_mode()
def test_a_round_copies_nothing_from_the_host(stop):
    stack = on_meta("llama", torch.float32)
    cache = PagedCache(4, 16)
    key = RoundKey(1, 3, 2, 32, 1, True, True, stop)
    body = WholeRound(stack, cache, REFERENCE, RoundInputs(key, cache, stack.device))
    body()
    with NoHostCopies():
        (record,) = body()
    assert record.is_meta and len(record) == 2


@pytest.mark.parametrize("inference", [True, False])
def test_a_copy_from_the_host_is_seen(inference):
    with torch.inference_mode(inference):
        check_that_copies_are_seen()


def check_that_copies_are_seen():
    with NoHostCopies():
        assert (torch.zeros(2, device="meta") * torch.tensor(2.0)).is_meta
    with pytest.raises(AssertionError, match="reads memory of the host"), NoHostCopies():
        torch.zeros(()).to("meta")
    with pytest.raises(AssertionError, match="reads memory of the host"), NoHostCopies():
        torch.zeros(2, device="meta").copy_(torch.zeros(2))
