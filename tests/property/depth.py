"""How far tests that try many cases go: all the way in `make test-long`, a quarter otherwise."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("BANASERVE_TEST_DEPTH") == "long"


def num_examples(in_long: int) -> int:
    """How many cases to try where `make test-long` tries ``in_long``."""
    return in_long if IS_LONG else max(in_long // 4, 2)
