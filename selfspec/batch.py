"""`python -m selfspec.batch` is `selfspec batch`."""

from __future__ import annotations

import sys

from selfspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
