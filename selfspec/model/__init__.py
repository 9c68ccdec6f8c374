"""The model, opened up without copying its code: twin, views, packed rows, paged cache, self-check."""
