"""How far tests that try many cases go: all the way in `make test-long`, a quarter otherwise.

``BANASERVE_TEST_SEED`` lets those that run from seeds run one seed alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

IS_LONG = os.environ.get("BANASERVE_TEST_DEPTH") == "long"
_SEED = os.environ.get("BANASERVE_TEST_SEED")


def num_examples(in_long: int) -> int:
    """How many cases to try where `make test-long` tries ``in_long``."""
    return in_long if IS_LONG else max(in_long // 4, 2)


def seeds(in_long: int, otherwise: int) -> Sequence[int]:
    """Seeds to run: so many in `make test-long`, fewer otherwise, or the one that is asked for."""
    if _SEED is not None:
        return [int(_SEED)]
    return range(in_long if IS_LONG else otherwise)


def chosen_seed(usual: int) -> int:
    """Seed of a test that runs once: ``usual``, or the one that is asked for; a failure says it."""
    seed = usual if _SEED is None else int(_SEED)
    SEEDS_OF_TEST.append(seed)
    return seed


SEEDS_OF_TEST: list[int] = []
"""Those of the test under way, which ``seeding`` shows."""


@contextlib.contextmanager
def says_seed(seed: int) -> Iterator[None]:
    """Let a failure say which seed it is of."""
    try:
        yield
    except Exception as failed:
        failed.add_note(f"seed {seed}: BANASERVE_TEST_SEED={seed} runs it alone")
        raise
