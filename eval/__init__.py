"""Measurements of selfspec and comparisons with other decoders; not part of the installed package."""
