"""Training of early-exit models: `python -m train CONFIG`."""
