"""The CPU executor: compiled code for the layers of Llama-shaped models and for programs of rounds."""
