"""What Triton's interpreter does otherwise than devices, set right: rounding to bfloat16, and the order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def rounds_to_nearest(monkeypatch):
    """Triton's interpreter cuts numbers off where it makes bfloat16 of them. Devices round to the nearest."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def nearest(data, source, target, mode):
        if str(source) == "fp32" and str(target) == "bf16":
            return torch.from_numpy(data.copy()).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


@pytest.fixture
def sums_in_order(monkeypatch):
    """`tl.dot` adds products from the first input to the last, as one instruction of tensor cores always adds in one
    order. The interpreter's own product is a library's, whose order depends on the number of rows."""
    from triton.runtime import interpreter

    def dot(self, a, b, d, *_):
        products = a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)
        sums = np.add.accumulate(np.concatenate([d.data[:, None], products], 1), 1, dtype=np.float32)[:, -1]
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
