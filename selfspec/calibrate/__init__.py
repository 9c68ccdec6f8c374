"""Measuring the cost table of a machine, and the profile files."""
