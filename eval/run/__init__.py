"""`python -m eval run`: methods side by side on a question file, in Spec-Bench's records and with honest figures."""
