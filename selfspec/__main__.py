"""`python -m selfspec` is `selfspec`."""

from __future__ import annotations

import sys

from selfspec.cli import main

sys.exit(main())
