"""Measuring what the pieces of a round take on this machine, and the file that keeps it."""
