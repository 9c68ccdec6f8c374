"""What a CUDA device makes of the kernels: whether they agree with their plain twins, and how fast it is."""
