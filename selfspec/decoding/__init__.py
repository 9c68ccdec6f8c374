"""Rounds: plan, draft, verify, accept, observe."""
