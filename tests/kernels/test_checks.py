"""Kernels and twins refuse what a kernel would misread: other dtypes, strides, shapes, devices, by name."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels.layout import Norm, Rotation
from selfspec.kernels.suite import REFERENCE, has_triton, triton_kernels
from tests.kernels import samples

SUITES = [REFERENCE, *([triton_kernels()] if has_triton() else [])]


def strided(tensor):
    """The same numbers, every second place in memory."""
    out = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
    out[..., 0] = tensor
    return out[..., 0]


def calls():
    """A right call of every kernel: name -> arguments by name."""
    paged = samples.paged([(20, 3), (0, 0), (5, 1)], 4, 2, 8, 16)
    key = {"key": paged.key, "value": paged.value, "keys": paged.keys, "values": paged.values}
    attend = {
        "queries": paged.queries,
        "keys": paged.keys,
        "values": paged.values,
        "layout": paged.layout,
        "scale": 1.0,
    }
    sampling = samples.sampling([(0.8, 0, 1.0, 0.0), (0.0, 5, 0.9, 0.1)], 0)
    small = torch.tensor([0, 3]).int()
    accept = {
        "state": torch.zeros(2, 20, dtype=torch.int64), "fed": torch.arange(6), "picks": torch.arange(6),
        "starts": small, "counts": small, "most_new": 3,
    }  # fmt: skip
    norms = [Norm(torch.ones(8), 1e-6) for _ in range(4)]
    hidden = torch.randn(4, 8)
    rotate = {
        "qkv": torch.randn(4, 64), "keys": paged.keys, "values": paged.values, "layout": paged.layout,
        "rotation": Rotation(torch.randn(30, 4), torch.randn(30, 4), *norms[:2]),
    }  # fmt: skip
    return {
        "add_norm": {"hidden": hidden, "branch": hidden, "norm": norms[2], "post": norms[3]},
        "rotate": rotate,
        "gate": {"gate_up": hidden, "activation": "silu"},
        "scatter": {**key, "slots": paged.layout.slots},
        "attend": {**attend, "sinks": torch.zeros(4)},
        "pick": {"logits": torch.randn(2, 33), "sampling": sampling},
        "prepare": {
            "state": torch.zeros(2, 20, dtype=torch.int64),
            "pages": torch.zeros(2, 3).int(),
            "page_size": 4,
            "width": 3,
            "most_tokens": 12,
        },
        "accept": accept,
    }


def paths(value):
    """Where tensors lie in an argument, by field names."""
    if isinstance(value, torch.Tensor):
        yield ()
    for field in getattr(value, "_fields", ()):
        for path in paths(getattr(value, field)):
            yield field, *path


def changed(given, path, change):
    """The arguments with one tensor changed."""
    if len(path) == 1:
        if isinstance(given, dict):
            return {**given, path[0]: change(given[path[0]])}
        return given._replace(**{path[0]: change(getattr(given, path[0]))})
    inner = given[path[0]] if isinstance(given, dict) else getattr(given, path[0])
    made = changed(inner, path[1:], change)
    return {**given, path[0]: made} if isinstance(given, dict) else given._replace(**{path[0]: made})


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
@pytest.mark.parametrize("kernel", calls())
def test_a_right_call_is_served(suite, kernel):
    getattr(suite, kernel)(**calls()[kernel])


FAULTS = {
    "strides": strided,
    "dtype": lambda one: one.double() if one.dtype != torch.float64 else one.float(),
    "device": lambda one: one.to("meta"),
    "shape": lambda one: torch.cat([one, one[..., :1]], -1),
}
UNREAD = {"attend": ["slots"], "rotate": ["starts", "counts", "lengths", "pages", "rows"]}  # fields of the layout
HARMLESS = {
    ("shape", "pages"),
    ("shape", "logits"),
    ("dtype", "sinks"),
    ("shape", "state"),
}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", calls())
def test_tensors_that_would_be_misread_are_refused_by_name(suite, kernel, fault):
    given = calls()[kernel]
    for path in [(name, *inner) for name, value in given.items() for inner in paths(value)]:
        if path[-1] in UNREAD.get(kernel, ()) or (fault, path[-1]) == ("device", "gate_up"):
            continue  # it is not read; the only tensor of a kernel may be on any device
        wrong = changed(calls()[kernel], path, FAULTS[fault])
        if (fault, path[-1]) in HARMLESS:
            getattr(suite, kernel)(**wrong)
            continue
        with pytest.raises(ValueError, match=rf"^{kernel}: "):
            getattr(suite, kernel)(**wrong)
