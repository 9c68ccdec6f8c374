"""GGUF files: what they say, and models that read their weights from them."""
