"""Who runs plans: `eager` everywhere, `cpu` and `cuda` where they serve the model; all emit the same tokens."""
