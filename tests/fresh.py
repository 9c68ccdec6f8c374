"""Settings of properties that look for new counterexamples: each run throws its own dice, and says how to repeat it."""

from __future__ import annotations

from hypothesis import settings

# All other properties use the same examples every time, so that a run of the suite can be repeated. Each failure here
# prints the line @reproduce_failure(...), which brings its example back where it is put above the test.
FRESH = settings(derandomize=False, max_examples=60, print_blob=True)
