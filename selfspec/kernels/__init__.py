"""Kernels on tensors, in Triton and C++. Each has a reference implementation in torch."""
