"""The CPU executor: a Llama-shaped model's layers, and whole programs of rounds, in compiled code."""
