"""Measurements of selfspec beside what it is to be compared with; never part of the installed package."""
