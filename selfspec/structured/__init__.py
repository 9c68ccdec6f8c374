"""Structured outputs: a grammar is a mask before every pick, and a drafter where it leaves a single token."""
