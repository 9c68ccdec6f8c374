"""Drafters: early exit, prompt lookup, and lookup in a corpus."""
