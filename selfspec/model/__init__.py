"""The split model: twin, views, packed rows, paged KV cache, attention, self-check."""
