"""Where a model comes from, and the opened model."""
