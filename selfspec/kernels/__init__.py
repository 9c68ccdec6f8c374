"""Functions on plain tensors that a device may fuse; each has a plain-torch form that says what is meant."""
